"""The plan of a device: what steps leave on their modules is there beside the activations of all later ones."""

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.conftest import SIMULATED, make_trainer

ROWS = 1024
LEFT = 4 * ROWS * 64 * 4  # bytes that a step leaves


class Remembers(LightningModule):
    """Every layer keeps what it has made, for a hook to look at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            made: Any = torch.softmax(layer(batch), -1)
            layer.last = made.detach()
            batch = batch + made.tanh().sin().cos()
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Peaks(Callback):
    """By batch, the most bytes at a time, where a device tells; and the plan that was followed in it."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.plan: Any = None
        self.profile: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if module.device.type == "sim":
            torch.get_device_module("sim").reset_peak_memory_stats(module.device)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if module.device.type == "sim":
            self.bytes.append(torch.get_device_module("sim").max_memory_allocated(module.device))
        ((self.plan, self.profile),) = trainer.strategy.memory_plans.values()


def static_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def peaks_within(budget: int | None, accelerator: str, **options: Any) -> Peaks:
    peaks = Peaks()
    rows = torch.randn(6 * ROWS, 64, generator=torch.Generator().manual_seed(1))
    strategy = dpx.DPXStrategy(plan_cache=False, memory_budget=budget, **options)
    trainer = make_trainer(devices=1, accelerator=accelerator, max_epochs=1, strategy=strategy, callbacks=[peaks])
    gc.collect()
    trainer.fit(Remembers(), DataLoader(rows, ROWS))
    return peaks


@pytest.mark.parametrize("accelerator", ["cpu", "sim"])
def test_a_plan_leaves_room_for_what_steps_leave(accelerator: str, caplog: Any) -> None:
    if accelerator == "sim" and SIMULATED:
        pytest.skip(str(SIMULATED))
    budget = 4 * 2**20
    with caplog.at_level("INFO"):
        peaks = peaks_within(budget, accelerator, micro_batches=1)
    assert peaks.profile.left_behind == LEFT
    # The host counts the batch as well; a device has its copy among the activations of a step.
    beside = static_bytes(Remembers()) + LEFT + (ROWS * 64 * 4 if accelerator == "cpu" else 0)
    assert beside + peaks.plan.peak <= budget
    assert "made anew" not in caplog.text, "the plan of the first step is the plan of all"
    assert all(num_bytes <= budget for num_bytes in peaks.bytes[1:])


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_micro_batches_leave_theirs_each_on_a_module_of_its_own() -> None:
    budget = int(3.5 * 2**20)
    peaks = peaks_within(budget, "sim", micro_batches=2, verify="off")
    assert 2 * peaks.profile.left_behind == LEFT
    assert all(num_bytes <= budget for num_bytes in peaks.bytes[1:])


def test_a_refusal_names_a_budget_that_has_room_for_it_in_micro_batches_as_well() -> None:
    with pytest.raises(dpx.BudgetError) as refused:
        peaks_within(2 * 2**20, "cpu", micro_batches="auto")
    least = refused.value.smallest
    assert least is not None
    assert least > LEFT
