"""Losses over the whole batch in micro-batches: every forward twice, and the gradients are those of the whole batch."""

import itertools
import re
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import assert_equal, make_trainer

PAIRS = 64
WIDTH = 16
SEEN: SimpleQueue[torch.Tensor] = SimpleQueue()  # the embeddings of every forward, where no pass puts anything back


class Contrastive(LightningModule):
    """Pairs (B, 2, 16) to embeddings; each one's positive is told from the B - 1 others."""

    dropout = 0.0
    depth = 2

    def __init__(self) -> None:
        super().__init__()
        layers = (layer for _ in range(self.depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.net = nn.Sequential(*layers, nn.Dropout(self.dropout))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        first, second = self.net(batch[0]).unbind(1)
        SEEN.put(first.detach().cpu())
        self.log("norm", first.detach().norm(dim=1).mean())
        return {"first": first, "second": second, "rows": batch[0][:, 0, 0]}

    def training_step_end(self, outputs: Any) -> torch.Tensor:
        assert not outputs["rows"].requires_grad
        first, second = (F.normalize(outputs[name], dim=1) for name in ("first", "second"))
        loss = F.cross_entropy(first @ second.T * self.scale, torch.arange(len(first), device=first.device))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneDevice(Contrastive):
    """The same in Lightning's own words, which has no such hook."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return Contrastive.training_step_end(self, super().training_step(batch, batch_idx))

    training_step_end = None


class Dropped(Contrastive):
    dropout = 0.3


class NormedBuffers(Contrastive):
    """Counts rows in a buffer, from which embeddings depend."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        outputs = super().training_step(batch, batch_idx)
        outputs["first"] = outputs["first"] + self.seen / 1000
        self.seen += len(batch[0])
        return outputs


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    while not SEEN.empty():
        SEEN.get()


def loader(num_batches: int = 3, num_rows: int = PAIRS) -> Any:
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randn(num_batches * num_rows - 5, 2, WIDTH, generator=generator)
    return DataLoader(TensorDataset(pairs), num_rows)


def fitted(kind: type[LightningModule], batches: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    trainer = make_trainer(max_epochs=1, **options)
    trainer.fit(model, batches or loader())
    seen = {**model.state_dict(), **trainer.callback_metrics}
    seen["steps"] = torch.tensor(model.count)
    return {name: torch.as_tensor(value).detach().cpu().clone() for name, value in seen.items()}


def cut(number: int, num_devices: int = 1, execution: str = "inline", **options: Any) -> dict[str, Any]:
    own = dpx.DPXStrategy(micro_batches=number, execution=execution, **options)
    return {"strategy": own, "devices": num_devices}


@pytest.mark.parametrize(("num_devices", "execution"), [(1, "inline"), (2, "threads"), (2, "inline")])
@pytest.mark.parametrize("window", [1, 2])
def test_gradients_are_those_of_the_whole_batch(num_devices: int, execution: str, window: int, hardware: str) -> None:
    expected = fitted(OneDevice, accumulate_grad_batches=window)
    ours = fitted(Contrastive, accumulate_grad_batches=window, **cut(4, num_devices, execution))
    assert_equal(ours, expected)
    rows = [len(SEEN.get()) for _ in range(SEEN.qsize())]
    assert rows.count(PAIRS // 4 // num_devices) >= 8 * num_devices * 2  # two batches of 64, twice


def test_in_float64_they_agree_to_nine_digits() -> None:
    expected = fitted(OneDevice, precision="64-true")
    assert_equal(fitted(Contrastive, precision="64-true", **cut(8)), expected)


def test_both_passes_draw_the_same_numbers_and_see_the_same_buffers() -> None:
    for kind in (Dropped, NormedBuffers):
        fitted(kind, loader(1), **cut(8, verify="off"))
        forwards = [SEEN.get() for _ in range(SEEN.qsize())]
        assert len(forwards) == 16
        assert all(itertools.starmap(torch.equal, zip(forwards[:8], forwards[8:], strict=True)))
        assert not torch.equal(forwards[0], forwards[1])


def test_a_second_pass_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = NormedBuffers()
    make_trainer(max_epochs=1, **cut(8, verify="off")).fit(model, loader(1))
    assert (model.count, sum(model.sizes)) == (1, PAIRS - 5)  # an attribute counts once a step, a list holds all slices


def test_a_step_that_is_another_one_the_second_time_is_announced() -> None:
    class Unseen(Contrastive):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = iter(range(1000))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            outputs["first"] = outputs["first"] + next(self.numbers)
            return outputs

    with pytest.warns(UserWarning, match="second forward of micro-batch 0, 1 gave other outputs than the first"):
        fitted(Unseen, **cut(2, verify="off"))
    assert [len(SEEN.get()) for _ in range(SEEN.qsize())] == [32, 32, 32, 32, 64, 59]


def test_the_peak_is_that_of_one_micro_batch_and_the_outputs(sim: Any) -> None:
    """By the counters of the device: 64 pairs in micro-batches of 8, beside a batch of 8 pairs."""

    class Deep(Contrastive):
        depth = 40

    peaks = {}
    for name, number, rows in (("8 pairs", 1, 8), ("64 pairs", 1, 64), ("64 pairs in 8", 8, 64)):
        generator = torch.Generator().manual_seed(1)
        pairs = torch.randn(2 * rows, 2, 64, WIDTH, generator=generator)  # many tokens, of which the mean is embedded
        batches = DataLoader(TensorDataset(pairs), rows)

        class Tokens(Deep):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                first, second = self.net(batch[0]).mean(2).unbind(1)
                return {"first": first, "second": second, "rows": batch[0][:, 0, 0, 0]}

        model = Tokens()
        trainer = make_trainer(max_epochs=1, accelerator="sim", **cut(number, verify="off"))
        before = sim.memory_allocated(0)
        sim.reset_peak_memory_stats(0)
        trainer.fit(model, batches)
        peaks[name] = sim.max_memory_allocated(0) - before
    outputs = 64 * 2 * WIDTH * 4
    assert peaks["64 pairs in 8"] <= 1.25 * peaks["8 pairs"] + outputs
    assert peaks["64 pairs in 8"] < 0.3 * peaks["64 pairs"]


class DeepPairs(Contrastive):
    depth = 12

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # the first step is also profiled
            for device in range(self.trainer.num_devices):
                torch.sim.reset_peak_memory_stats(device)


class DeepOneDevice(OneDevice):
    depth = 12


def left_there(sim: Any, num_devices: int) -> int:
    """Bytes that other tests hold on the devices, the most on one of them: a budget counts them, too."""
    return max(sim.memory_allocated(device) for device in range(num_devices))


@pytest.mark.parametrize(
    ("number", "num_devices", "budget", "dropped"),
    [(1, 1, 150, True), (1, 2, 135, True), (8, 1, 120, False), (4, 2, 120, False)],
)
def test_a_budget_holds_where_the_loss_is_one_of_all_rows(
    sim: Any, number: int, num_devices: int, budget: int, dropped: bool, caplog: Any
) -> None:
    """Outputs of all rows, their gradients and the loss of all pairs are there beside a micro-batch and counted."""
    full = {"limit_train_batches": 2}  # with a row less, tensors are too small to be worth a plan
    expected = fitted(DeepOneDevice, **full)
    caplog.set_level("INFO")
    allowed = budget * 2**10 + left_there(sim, num_devices)
    own = cut(number, num_devices, memory_budget=allowed, plan_cache=False)
    assert_equal(fitted(DeepPairs, accelerator="sim", **full, **own), expected)
    for device in range(num_devices):
        assert sim.max_memory_allocated(device) <= allowed
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert ("extra time" in said) == dropped
    shares = [float(share) for share in re.findall(r": (\d\.\d\d) x, peak", said)]
    assert all(share > 1.0 for share in shares), "the second forward is counted"
    assert len(shares) == (num_devices if number > 1 else 0)


def test_a_loss_of_all_rows_that_does_not_fit_is_refused_however_small_the_micro_batches(sim: Any) -> None:
    budget = 80 * 2**10 + left_there(sim, 1)
    with pytest.raises(dpx.BudgetError, match="cannot be met"):
        fitted(DeepPairs, accelerator="sim", **cut(8, memory_budget=budget, plan_cache=False))
