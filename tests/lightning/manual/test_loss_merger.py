"""What slices give for one loss is a mean by rows, or a sum; what is no loss is the first slice's."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.lightning.manual.loss_merger import LossMerger
from lightning_dpx.replicas import MergeRules, ReplicaSet
from lightning_dpx.step import TrainingStep

CPU = torch.device("cpu")
ROWS = [3.0, 1.0]


def merger(loss_reduction: Any = "mean") -> LossMerger:
    replicas = ReplicaSet(nn.Linear(1, 1), [CPU] * 2, execution="inline")
    return LossMerger(TrainingStep(replicas, rules=MergeRules(loss_reduction=loss_reduction)), CPU)


@pytest.mark.parametrize("as_given", [float, torch.tensor])
def test_losses_are_averaged_by_rows(as_given: Any) -> None:
    assert float(merger().merge([as_given(1.0), as_given(5.0)], ROWS)) == 2.0


@pytest.mark.parametrize("as_given", [float, torch.tensor])
def test_sums_are_added(as_given: Any) -> None:
    assert float(merger("sum").merge([as_given(1.0), as_given(5.0)], [1.0, 1.0])) == 6.0


def test_slices_whose_closure_gives_nothing_do_not_count() -> None:
    assert merger().merge_of_closures([None, torch.tensor(5.0)], ROWS) == 5.0
    assert merger().merge_of_closures([None, None], ROWS) is None
    assert merger().merge_of_closures(["a", "b"], ROWS) == "a"


def test_of_arguments_numbers_that_differ_are_losses() -> None:
    metrics = {"loss": torch.tensor(1.0), "epoch": 3, "name": "a"}
    others = {"loss": torch.tensor(5.0), "epoch": 4, "name": "b"}
    merged = merger().merge_arguments([((metrics,), {}), ((others,), {})], ROWS)
    assert merged == (({"loss": 2.0, "epoch": 3, "name": "a"},), {})


def test_arguments_of_another_structure_are_the_first_ones() -> None:
    assert merger().merge_arguments([(1.0,), (1.0, 2.0)], ROWS) == (1.0,)
