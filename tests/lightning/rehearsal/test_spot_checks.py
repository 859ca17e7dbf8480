"""A step that was as on one device is looked at again: what the first rows do not show is told a few batches later."""

import gc
import os
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.rehearsal.spot_checks import SpotChecks
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer

BATCH = 10


def padded_later() -> DataLoader[Any]:
    """Labels of which the first batch has all, and later ones two thirds."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4 * BATCH, 8, generator=generator)
    labels = torch.randint(0, 3, (4 * BATCH,), generator=generator)
    labels[BATCH:][torch.arange(3 * BATCH) % 3 == 0] = -100
    return DataLoader(TensorDataset(rows, labels), batch_size=BATCH)


class IgnoresPadding(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=-100)


class ContrastsLater(Classifier):
    """A second term, over pairs of the whole batch, from the second batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        if self.global_step:
            loss = loss + F.cross_entropy(logits @ logits.T, torch.arange(len(logits), device=logits.device))
        return loss


class SkipsLater(Classifier):
    """No step on a later batch with few rows of a label: a slice has fewer."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if self.global_step and (batch[1] == 0).sum() < 2:
            return None
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Plain(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        os.write(self.hparams.counter, b".")  # outside of the process: no rehearsal puts it back
        return F.cross_entropy(self.net(batch[0]), batch[1])


def fitted(
    kind: type[Classifier], loader: Any, counter: int = 2, **options: Any
) -> tuple[dict[str, torch.Tensor], list[str]]:
    torch.manual_seed(0)
    model = kind()
    model.hparams.counter = counter
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=2, **options).fit(model, loader, make_loader())
    said = [str(one.message) for one in caught if "not what it is on one device" in str(one.message)]
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}, said


def on_two(**options: Any) -> dict[str, Any]:
    return {"strategy": dpx.DPXStrategy(execution="inline", **options), "devices": 2}


@pytest.mark.parametrize(
    ("kind", "loader"), [(IgnoresPadding, padded_later), (ContrastsLater, make_loader), (SkipsLater, make_loader)]
)
@pytest.mark.usefixtures("hardware")
def test_a_loss_that_is_a_mean_over_rows_at_first_only_is_told_of_once(kind: Any, loader: Any) -> None:
    _, said = fitted(kind, loader(), **on_two())
    assert len(said) == 1
    assert "the loss is" in said[0]
    assert "The batches that were checked before had shown nothing of it." in said[0]


def test_micro_batches_go_on_as_the_step_may_not_fit_without_them() -> None:
    _, said = fitted(ContrastsLater, make_loader(), strategy=dpx.DPXStrategy(micro_batches=3), devices=1)
    assert len(said) == 1
    assert "With micro_batches=1 it stays in one piece." in said[0]


def test_first_runs_such_a_step_on_one_device_from_then_on() -> None:
    with pytest.warns(UserWarning, match="rows its slices differ from one device: the loss is"):
        make_trainer(max_epochs=2, **on_two(verify="first")).fit(ContrastsLater(), make_loader(), make_loader())
    with pytest.raises(dpx.ParityError, match="the loss is"):
        fitted(ContrastsLater, make_loader(), **on_two(verify="raise"))


class LogsOtherNames(Classifier):
    """A loss of the whole batch; every batch logs a name that none before it did, and so the step is checked again."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        self.log(f"mean_{batch_idx}", logits.mean())
        if batch_idx > 1:
            self.log("spread", logits.std())
        return F.cross_entropy(logits / logits.std(), batch[1])


def test_what_is_checked_again_is_told_again_only_where_more_of_it_differs() -> None:
    _, said = fitted(LogsOtherNames, make_loader(6 * BATCH, BATCH), **on_two())
    assert len(said) == 2
    assert "the loss is" in said[0]
    assert "logged value 'spread': " in said[1]


def test_a_look_changes_nothing_and_ever_more_batches_lie_between_two(tmp_path: Any) -> None:
    def counted(**options: Any) -> tuple[dict[str, torch.Tensor], int]:
        path = tmp_path / str(options)[:40]
        counter = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        values, said = fitted(Plain, loader, counter, **options)
        os.close(counter)
        assert not said
        return values, path.stat().st_size

    loader = make_loader(33 * 8, 8)
    plain, steps = counted()
    unchecked, slices = counted(**on_two(verify="off"))
    ours, calls = counted(**on_two())
    assert (steps, slices) == (66, 2 * 66)
    looks = 7  # in batches 2, 4, 8, 16, 32, 64 and the first of the second epoch; as one device, and in two slices
    assert calls - slices == 3 + 3 * looks
    assert_equal(ours, plain)
    assert all(torch.equal(value, unchecked[name]) for name, value in ours.items())


def test_a_look_needs_no_room_for_gradients(sim: Any) -> None:
    class Wide(Classifier):
        def on_train_batch_start(self, *_: Any) -> None:
            gc.collect()
            sim.reset_peak_memory_stats(0)

        def on_train_batch_end(self, *_: Any) -> None:
            peaks.append(sim.max_memory_allocated(0))

    def peaks_of(verify: str) -> list[int]:
        peaks.clear()
        fitted(Wide, make_loader(8 * 64, 64), accelerator="sim", **on_two(verify=verify))
        return peaks[2:]  # the first two begin without the state of the optimizer

    peaks: list[int] = []
    without = peaks_of("off")
    assert max(peaks_of("warn")) <= 1.05 * max(without)


def test_news_are_kinds_that_were_not_told_before() -> None:
    checks = SpotChecks()
    key = ("training_step", 0)
    assert checks.news(key, [("logged value", "a"), ("state", "b")]) == [("logged value", "a")]
    assert checks.news(key, [("logged value", "c"), ("loss", "d"), ("gradient", "e")]) == [
        ("loss", "d"),
        ("gradient", "e"),
    ]
    assert checks.news(key, [("gradient", "e")]) == []
    assert checks.news(("validation_step", 0), [("output", "f")]) == [("output", "f")]
    assert [number for number in range(2, 40) if checks.is_due(key)] == [2, 4, 8, 16, 32]


def test_a_look_at_micro_batches_keeps_to_the_budget(sim: Any) -> None:
    """All rows together would take more without a graph than a micro-batch of one row does with its plan."""
    taken: list[int] = []

    class Wide(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())

        def on_train_batch_start(self, *_: Any) -> None:
            gc.collect()
            sim.reset_peak_memory_stats(0)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            taken.append(sim.max_memory_allocated(0))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = torch.randn(8 * 8, 4096, 16, generator=torch.Generator().manual_seed(0))
    budget = 9 * 2**18
    strategy = dpx.DPXStrategy(memory_budget=budget, micro_batches="auto")
    trainer = make_trainer(max_epochs=1, strategy=strategy, accelerator="sim", devices=1)
    trainer.fit(Wide(), DataLoader(TensorDataset(rows), 8))
    assert max(taken[1:]) <= budget


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("devices", "options"), [(2, {}), (1, {"micro_batches": 4})])
def test_a_look_leaves_nothing_on_an_accelerator_that_waits_for_the_garbage_collector(
    sim: Any, devices: int, options: dict[str, Any]
) -> None:
    """Modules of what was tried hold themselves, their weights and gradients; Python 3.12 seldom collects."""
    seen = list[int]()

    class Notes(Classifier):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append(sim.memory_allocated(0))

    trainer = make_trainer(strategy=dpx.DPXStrategy(**options), accelerator="sim", devices=devices, max_epochs=1)
    trainer.fit(Notes(), make_loader(num_rows=96), make_loader())
    assert len(set(seen[2:])) == 1, "after the rehearsal and looks at batches 1, 2 and 4"
