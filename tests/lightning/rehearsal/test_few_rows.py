"""Which rows of a batch a rehearsal takes."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.rehearsal.few_rows import FewRows, unequal_sizes
from lightning_dpx.lightning.rehearsal.outcome import Call, NotRehearsed
from lightning_dpx.replicas import ReplicaSet
from tests.conftest import make_trainer, places


@pytest.mark.parametrize(
    ("num_rows", "num_slices", "sizes"),
    [
        (16, 2, (4, 3)),
        (16, 3, (3, 2, 2)),
        (64, 2, (9, 8)),
        (1000, 4, (9, 8, 8, 8)),
        (64, 8, (3, 2, 2, 2, 2, 2, 2, 2)),
        (4, 2, (3, 1)),
        (3, 2, (2, 1)),
    ],
)
def test_slices_have_unequal_rows_and_all_together_no_more_than_one_of_the_batch(num_rows, num_slices, sizes) -> None:
    assert unequal_sizes(num_rows, num_slices) == sizes


class NoCopy:
    def __deepcopy__(self, memo: dict[int, object]) -> object:
        raise TypeError("one only")


def rows_of(batch: object, num_rows: int) -> FewRows:
    replicas = ReplicaSet(torch.nn.Linear(2, 2), places(2))
    call = Call(name="training_step", args=(batch, 0), kwargs={}, active=(0, 1), num_rows=num_rows)
    return FewRows(call, replicas)


def test_slices_are_the_rows_of_the_whole_in_their_order() -> None:
    batch = torch.arange(40.0).reshape(20, 2)
    rows = rows_of(batch, 20)
    first, second = rows.slices((3, 2))
    assert torch.equal(rows.whole(5), torch.cat([first, second]))
    assert torch.equal(first, batch[:3])


def test_other_rows_are_those_behind_what_is_skipped() -> None:
    batch = torch.arange(40.0).reshape(20, 2)
    rows = rows_of(batch, 20)
    rows.skipped = 1.0
    assert torch.equal(rows.whole(5), batch[15:])
    rows.skipped = 0.5
    assert torch.equal(rows.whole(5), batch[7:12])


@pytest.mark.parametrize(
    ("labels", "first"),
    [
        ([0] * 20, 0),
        ([0, 1] * 10, 0),
        ([0] * 13 + [1] + [0] * 6, 9),  # then it is the last one of the first slice
        ([0] * 19 + [1], 11),
        ([0] * 10 + [1] * 10, 6),
        ([1] * 9 + [0] * 11, 5),  # those in front are alike, though rare
        ([0, 1] * 8 + [2] + [0, 1, 0], 11),  # a class may be rare beside others that are not
        (list(range(20)), 0),
        ([0.5] * 13 + [1.0] + [0.5] * 6, 0),  # no labels
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        torch.tensor,
        lambda labels: torch.tensor(labels)[:, None],
        lambda labels: torch.tensor(labels, dtype=torch.bfloat16),
        np.array,
    ],
)
def test_rows_in_front_that_are_alike_leave_their_place_to_others(labels: list[float], first: int, kind: Any) -> None:
    rows = rows_of({"rows": torch.arange(40.0).reshape(20, 2), "labels": kind(labels)}, 20)
    assert rows.taken() == (first, (5, 4))
    assert rows.whole(9)["rows"][0, 0] == 2 * first
    assert [int(part["rows"][0, 0]) for part in rows.slices((5, 4))] == [2 * first, 2 * first + 10]
    assert len(rows.whole(20)["labels"]) == 20


@pytest.mark.parametrize(
    ("labels", "skipped", "first"),
    [
        ([0] * 20, 0.5, 5),
        ([0] * 17 + [1] + [0] * 2, 0.5, 11),  # they would be alike where half of the others are skipped
        ([0] * 2 + [1] + [0] * 17, 1.0, 0),
        ([0] * 8 + [1] + [0] * 11, 0.5, 5),
    ],
)
def test_another_look_takes_no_rows_that_are_alike_either(labels: list[int], skipped: float, first: int) -> None:
    rows = rows_of({"rows": torch.arange(40.0).reshape(20, 2), "labels": torch.tensor(labels)}, 20)
    rows.skipped = skipped
    assert rows.taken() == (first, (4, 5))
    assert rows.whole(9)["rows"][0, 0] == 2 * first


def test_rows_are_copies() -> None:
    batch = torch.zeros(5, 2)
    rows = rows_of(batch, 5)
    rows.whole(5).add_(1)
    assert not batch.any()


def test_a_batch_that_cannot_be_copied_is_not_rehearsed() -> None:
    rows = rows_of([NoCopy() for _ in range(5)], 5)
    with pytest.raises(NotRehearsed, match=r"cannot be copied.*one only"):
        rows.whole(5)


def test_a_few_rows_take_no_more_than_themselves() -> None:
    batch = {"x": torch.arange(4000.0).reshape(1000, 4), "y": torch.arange(1000)}
    rows = rows_of(batch, 1000)
    whole = rows.whole(5)
    assert torch.equal(whole["x"], batch["x"][:5])
    for part in (whole, *rows.slices((3, 2))):
        for copied in part.values():
            assert copied.untyped_storage().nbytes() == copied.nbytes


def test_tensors_of_the_same_numbers_are_of_the_same_in_the_copy() -> None:
    numbers = torch.zeros(20, 2)
    copied = rows_of([numbers, numbers.view(20, 2)], 20).whole(5)
    copied[0].add_(1)
    assert copied[1].eq(1).all()
    assert not numbers.any()


class WeighsClasses(LightningModule):
    """Rows (B, 6) of two classes, the second of which counts twenty times."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        weight = torch.tensor([1.0, 20.0], device=batch[0].device)
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1], weight=weight)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_loss_that_weighs_classes_is_seen_although_rows_in_front_are_of_one(micro_batches: int) -> None:
    torch.manual_seed(0)
    labels = (torch.arange(16) == 11).long()
    data = DataLoader(TensorDataset(torch.randn(16, 6), labels), 16)
    strategy = dpx.DPXStrategy(execution="inline", micro_batches=micro_batches, verify="raise")
    trainer = make_trainer(devices=3 - min(micro_batches, 2), strategy=strategy, max_epochs=1)
    with pytest.raises(dpx.ParityError, match="the loss is"):
        trainer.fit(WeighsClasses(), data)
