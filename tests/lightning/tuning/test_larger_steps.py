"""Larger batches than the loader's are made of its own data, and a step on one is timed where that takes no time."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.memory.dry_run.first_batch import work_on_first_batch
from lightning_dpx.lightning.tuning.larger_steps import Slowdown, larger_batch, rows_worth_timing
from lightning_dpx.memory import Profile
from tests.commands.test_plan import Shallow
from tests.conftest import make_trainer
from tests.memory.random_steps import random_profile

DATA = TensorDataset(torch.arange(64.0 * 64).view(64, 64), torch.arange(64.0).view(64, 1))

CPU = torch.device("cpu")


class Doubles(Shallow):
    """A hook of its own on the way to the step."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, targets = batch
        return 2 * inputs, targets


class Counts(Shallow):
    """Notes how many rows its steps have seen; copies note in the same list."""

    rows: ClassVar[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rows.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


class Refuses(Counts):
    """Does not take batches larger than its loader's."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) > 8:
            raise ValueError("at most 8 rows")
        return super().training_step(batch, batch_idx)


class Slower(Shallow):
    """A row of a large batch takes ten times as long as one of a small one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = len(batch[0])
        began = time.thread_time()
        while time.thread_time() - began < rows * (0.005 if rows > 8 else 0.0005):
            pass
        return super().training_step(batch, batch_idx)


class Passes(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([DATA[index] for index in range(64)])


class Breaks(Dataset[Any]):
    """Is broken from its tenth item on."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index > 9:
            raise KeyError(f"item {index}")
        return DATA[index]


def made(loader: Any, rows: int, module: Shallow | None = None) -> Any:
    """The larger batch of a run with this loader, and its rows."""
    return work_on_first_batch(
        make_trainer(), module or Shallow(), loader, lambda trainer, module, _: [larger_batch(trainer, module, rows)]
    )[0]


def test_it_is_the_batch_of_a_loader_with_that_batch_size() -> None:
    (inputs, targets), rows = made(DataLoader(DATA, 8), 48, Doubles())
    assert rows == 48
    assert torch.equal(inputs, 2 * DATA.tensors[0][:48])
    assert torch.equal(targets, DATA.tensors[1][:48])


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(DataLoader(Passes(), 8), id="no items to ask for"),
        pytest.param(DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), id="a sampler that makes batches"),
        pytest.param([DataLoader(DATA, 8), DataLoader(DATA, 8)], id="two loaders"),
    ],
)
def test_where_none_can_be_made_there_is_none(loader: Any) -> None:
    assert made(loader, 128) is None


def test_one_that_fails_is_announced() -> None:
    with pytest.warns(UserWarning, match=r"one of 48 rows could not be made \(KeyError: 'item 10'\)"):
        assert made(DataLoader(Breaks(), 8), 48) is None


class ByTens(Dataset[Any]):
    """Gives items together alone, and has been asked for so many."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a loader would not ask for one item")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [DATA[index] for index in indices]


def test_items_are_asked_for_as_a_loader_asks() -> None:
    (inputs, _), rows = made(DataLoader(ByTens(), 10), 48)
    assert torch.equal(inputs, DATA.tensors[0][:48])
    assert rows == 48


def test_a_data_set_that_takes_its_time_gives_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))  # a second for every batch of the loader
    (inputs, _), rows = made(DataLoader(DATA, 8), 64)
    assert len(inputs) == rows == 16


def test_steps_between_those_that_were_timed_slow_down_evenly() -> None:
    slowdown = Slowdown(64, 1024, 2.0)
    assert [slowdown.at(rows) for rows in (16, 64, 544, 1024, 4096)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    assert Slowdown().at(8) == 1.0


def test_between_steps_that_were_timed_none_is_slower_than_both() -> None:
    """An accelerator waits for the host on few rows, and takes no longer for 16 times as many."""

    def on_line(rows: int) -> float:
        return 1.0 + 0.25 * (rows - 64) / 64  # seconds: two noisy steps on few rows

    rows_between = (64, 128, 256, 512, 1024, 2048)
    slowdown = Slowdown(64, 1024, 1.1 / on_line(1024), on_line(1024))
    seconds = [on_line(rows) * slowdown.at(rows) for rows in rows_between]
    assert seconds == sorted(seconds)
    assert seconds[2] == pytest.approx(1.0 + 0.1 * (256 - 64) / (1024 - 64))
    assert seconds[4] == pytest.approx(1.1)


def test_the_most_rows_whose_step_is_short_are_timed() -> None:
    def on_line(rows: int) -> Profile:
        return replace(random_profile(0, 4), step_seconds=rows / 1000)

    assert rows_worth_timing([64, 128, 256, 512, 1024], on_line, 64, 0.0, CPU) == 256
    assert rows_worth_timing([64, 128, 256], on_line, 64, 0.01, CPU) == 128, "loading takes too long"
    assert rows_worth_timing([16, 64], on_line, 64, 0.0, CPU) is None


@pytest.mark.parametrize(("device", "largest"), [("cpu", 64), ("cuda:0", 8)])
def test_a_larger_step_runs_only_where_times_are_measured(device: str, largest: int) -> None:
    Counts.rows.clear()
    dpx.tune(Counts(), DataLoader(DATA, 8), devices=[device], batch_sizes=[8, 64])
    assert max(Counts.rows) == largest


def test_a_batch_size_beyond_the_data_set_leaves_the_others_timed() -> None:
    Counts.rows.clear()
    dpx.tune(Counts(), DataLoader(DATA, 8), batch_sizes=[8, 64, 128])
    assert max(Counts.rows) == 64


def test_what_is_slower_in_a_larger_step_is_predicted() -> None:
    small, large = dpx.tune(Slower(), DataLoader(DATA, 8), batch_sizes=[8, 64]).batch_sizes
    assert large.compute > 2 * 8 * small.compute, "the line through steps on few rows says 8 times"


def test_a_step_that_refuses_so_many_rows_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"a step on 64 rows failed \(ValueError: at most 8 rows\)"):
        found = dpx.tune(Refuses(), DataLoader(DATA, 8), batch_sizes=[8, 64])
    assert [one.fits for one in found.batch_sizes] == [True, True]
