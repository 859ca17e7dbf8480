"""Buffers that steps begin to write, or write in another way, in a later batch are what one device has there."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer
from tests.lightning.several_replicas import on_replicas

WRITES = "It writes self.kept in this batch, and wrote nothing there when it was checked"
WAYS: dict[str, dict[str, Any]] = {
    "replicas": on_replicas(3),
    "micro-batches": {"strategy": dpx.DPXStrategy(micro_batches=2), "devices": 1, "accelerator": "cpu"},
}


class KeepsRows(Classifier):
    """What ``write`` makes of its buffer and the rows."""

    def __init__(self, write: Callable[["KeepsRows", torch.Tensor], None]) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8))
        self.kept: torch.Tensor
        self.write = write

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write(self, batch[0])
        return super().training_step(batch, batch_idx)


def from_the_sixth_batch_on(model: KeepsRows, rows: torch.Tensor) -> None:
    """No batch at which a step is looked at anyway."""
    if model.global_step >= 5:
        model.kept += rows.sum(0)


def another_tensor_in_the_sixth_batch(model: KeepsRows, rows: torch.Tensor) -> None:
    if model.global_step == 5:
        model.kept = rows.amax(0)


def by_epoch(model: KeepsRows, rows: torch.Tensor) -> None:
    """A mean, then a maximum, then one number that is set, then a sum."""
    if model.current_epoch == 0:
        model.kept.copy_(rows.mean(0))
    elif model.current_epoch == 1:
        model.kept.copy_(torch.maximum(model.kept, rows.amax(0)))
    elif model.current_epoch == 2:
        model.kept.fill_(1.0)
    else:
        model.kept += rows.sum(0)


def buffers_of(write: Callable[[KeepsRows, torch.Tensor], None], **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = KeepsRows(write)
    loader = make_loader()
    make_trainer(max_epochs=4, **options).fit(model, loader, loader)
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("write", [from_the_sixth_batch_on, another_tensor_in_the_sixth_batch])
def test_a_buffer_that_is_written_for_the_first_time_is_written_by_the_whole_batch(
    way: str, write: Callable[[KeepsRows, torch.Tensor], None]
) -> None:
    expected = buffers_of(write, devices=1, accelerator="cpu")
    with pytest.warns(UserWarning, match=WRITES):
        seen = buffers_of(write, **WAYS[way])
    assert_equal(seen, expected)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_buffer_may_be_written_in_another_way_from_some_epoch_on(way: str) -> None:
    assert_equal(buffers_of(by_epoch, **WAYS[way]), buffers_of(by_epoch, devices=1, accelerator="cpu"))


class KeepsIndices(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.kept.append(self.current_epoch)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("accelerator", ["cpu", "sim"])
def test_a_list_gets_an_item_of_a_batch_each_time_that_one_runs_again(sim: Any, way: str, accelerator: str) -> None:
    """Where replicas take turns on several devices, items of the slices were left in it: [0, 0, 0, 1, ...]."""
    model = KeepsIndices()
    loader = make_loader(24, 6)
    options = {**WAYS[way], "accelerator": accelerator}
    with pytest.warns(UserWarning, match=WRITES):
        make_trainer(max_epochs=3, **options).fit(model, loader, loader)
    assert model.kept == [0, 1, 2]


class RegistersLate(Classifier):
    """Counts rows in a buffer, and registers another one where its first row is such."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.seen: torch.Tensor

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += len(batch[0])
        if batch[0][0, 0] > 0.5 and not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "micro_batches": 3}], ids=str)
def test_a_buffer_that_some_slices_register_is_that_of_the_whole_batch(options: dict[str, Any]) -> None:
    strategy = dpx.DPXStrategy(execution="inline", micro_batches=options.get("micro_batches", 1))
    torch.manual_seed(0)
    model = RegistersLate()
    torch.manual_seed(0)
    alone = RegistersLate()
    rows = make_loader(106)
    with pytest.warns(UserWarning, match="a batch whole.* It writes self.late in this batch"):
        make_trainer(max_epochs=1, strategy=strategy, devices=options["devices"]).fit(model, rows, rows)
    make_trainer(max_epochs=1).fit(alone, rows, rows)
    expected = alone.state_dict()
    assert expected["seen"] == 106
    torch.testing.assert_close(model.state_dict(), expected)


class CountsInAList(Classifier):
    """Counts its steps in a tensor that a list holds, and uses that; the third one leaves a note."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [torch.zeros(1)]
        self.noted: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts[0].add_(1)
        if self.global_step == 2:
            self.noted.append(batch_idx)
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] / self.counts[0].to(self.device)[0]}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_runs_again_counts_once_in_tensors_of_containers(way: str) -> None:
    found = []
    for options in ({}, WAYS[way]):
        torch.manual_seed(0)
        model = CountsInAList()
        trainer = make_trainer(max_epochs=2, limit_val_batches=0, **options)
        loader = make_loader()
        with pytest.warns(UserWarning, match="It writes self.noted in this batch") if options else nullcontext():
            trainer.fit(model, loader, loader)
        found.append({**model.state_dict(), "count": model.counts[0]})
    assert_equal(found[1], found[0])
