"""Rules by which results of a step are merged, before and between its checks."""

from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.lightning.rehearsal.known_rules import KnownRules
from tests.conftest import Classifier, make_loader, make_trainer

TRAINING = ("training_step", 0)


@pytest.mark.parametrize(("given", "used"), [("auto", "mean"), ("mean", "mean"), ("sum", "sum")])
def test_a_step_that_no_check_has_seen_is_merged_as_was_asked_for(given: str, used: str) -> None:
    known = KnownRules(given)
    assert known.asked_for(TRAINING) is None
    assert known.of(TRAINING).loss_reduction == used
    assert known.asked_for(TRAINING) is known.of(TRAINING)
    assert not known.is_checked(TRAINING)


def test_a_check_that_fails_half_way_leaves_no_rule_behind() -> None:
    known = KnownRules("auto")
    before = known.of(TRAINING)

    def check() -> None:
        with known.judged_by(TRAINING, None):
            assert known.of(TRAINING) is before
            assert known.of(("validation_step", 0)).loss_reduction == "mean"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check()
    assert dict(known.items()) == {TRAINING: before}


def test_what_a_run_has_found_is_gone_with_it() -> None:
    known = KnownRules("auto")
    before = known.of(TRAINING)
    known.forget()
    assert known.of(TRAINING) is not before


class CountsRows(Classifier):
    """In a buffer; and it keeps something new in every batch, so that it is checked again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_rows", torch.zeros(1))
        self.by_batch: dict[int, list[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_rows += len(batch[0])
        self.by_batch.setdefault(batch_idx, []).append(1)
        return super().training_step(batch, batch_idx)


def test_a_count_goes_on_where_the_rows_of_a_check_are_next_to_nothing_beside_it() -> None:
    model = CountsRows()
    strategy = dpx.DPXStrategy(execution="inline")
    make_trainer(strategy=strategy, devices=2, precision="bf16-mixed").fit(model, make_loader(56, 8), make_loader(8))
    assert model.num_rows.item() == 2 * 56
