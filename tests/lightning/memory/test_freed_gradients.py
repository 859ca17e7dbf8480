"""Gradients that nothing needs are freed before a planned step's forward: activations have their room."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import SIMULATED, assert_equal, make_trainer

WIDTH = 512
LAYERS = 8
WEIGHTS = LAYERS * 4 * (WIDTH * WIDTH + WIDTH)  # bytes
MARGIN = 2**16  # bytes: small tensors


class Stack(LightningModule):
    """Layers with large weights and small activations, over rows (B, 512)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ReadsGradients(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        seen = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.log("norm", sum(gradient.norm() for gradient in seen) if seen else 0.0)
        return super().training_step(batch, batch_idx)


class TrainsHalf(Stack):
    """Of the other half the gradients stay, and add up."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[: LAYERS // 2].parameters(), lr=0.1)


class Watch(Callback):
    """How many gradients every forward finds, and what plans allow."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.rooms: list[int | None] = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        def look(module: nn.Module, args: Any) -> None:
            # Not in the forwards of a profile, which has a shadow of the module.
            if next(module.parameters()) is parameters[0]:
                self.found.append(sum(parameter.grad is not None for parameter in parameters))

        parameters = list(pl_module.parameters())
        pl_module.net.register_forward_pre_hook(look)  # type: ignore[union-attr]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        planning = getattr(trainer.strategy, "planning", None)
        if planning is not None:
            self.rooms.extend(plan.budget for plan in planning.plans.values())


class LooksBeforeZeroing(Callback):
    def on_before_zero_grad(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        self.norms = [parameter.grad.norm() for parameter in pl_module.parameters() if parameter.grad is not None]


def fit(
    model: type[Stack],
    callbacks: Sequence[Callback] = (),
    *,
    budget: int | None = None,
    accelerator: str = "cpu",
    rows: int = 256,
    **options: Any,
) -> LightningModule:
    torch.manual_seed(0)
    module = model()
    generator = torch.Generator().manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(4 * rows, WIDTH, generator=generator)), rows)
    strategy: Any = "auto"
    if budget is not None:
        strategy = dpx.DPXStrategy(memory_budget=budget, micro_batches=1, plan_cache=False)
    trainer = make_trainer(
        max_epochs=1, strategy=strategy, accelerator=accelerator, devices=1, callbacks=list(callbacks), **options
    )
    trainer.fit(module, data)
    return module


@pytest.mark.parametrize(
    ("model", "callbacks", "options"),
    [
        (Stack, [], {}),
        (Stack, [LooksBeforeZeroing()], {}),
        (Stack, [], {"accumulate_grad_batches": 2}),
        (ReadsGradients, [], {}),
        (TrainsHalf, [], {}),
    ],
    ids=["nothing", "a callback", "accumulation", "the step", "no optimizer"],
)
def test_gradients_are_counted_where_they_come_unless_something_needs_them(
    model: type[Stack], callbacks: list[Callback], options: dict[str, Any]
) -> None:
    budget = 4 * WEIGHTS
    watch = Watch()
    ours = fit(model, [watch, *callbacks], budget=budget, **options)
    theirs = fit(model, **options)
    assert_equal(ours.state_dict(), theirs.state_dict(), bitwise=True)
    needed = bool(callbacks or options or model is not Stack)
    assert watch.rooms[-1] is not None
    held = budget - watch.rooms[-1] - 256 * WIDTH * 4
    assert held == pytest.approx((2 if needed else 1) * WEIGHTS, abs=MARGIN)
    if not needed:
        assert watch.found == [0] * len(watch.found)


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize("share", [0.95, 0.9])
def test_the_device_takes_what_the_budget_allows(share: float, sim: Any) -> None:
    """Less than weights, gradients and activations together: most activations are gone when most gradients come."""
    before = sim.memory_allocated(0)
    rows = 1024
    activations = LAYERS * rows * WIDTH * 4
    budget = before + int(share * (WEIGHTS + activations)) + MARGIN

    class Peaks(Callback):
        def __init__(self) -> None:
            self.peaks: list[int] = []
            self.predicted: list[int] = []

        def on_train_batch_start(self, *_: Any) -> None:
            sim.reset_peak_memory_stats(0)

        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            self.peaks.append(sim.max_memory_allocated(0))
            device = trainer.strategy.root_device
            self.predicted.append(trainer.strategy.planning.forecast(device)[0])

    peaks = Peaks()
    ours = fit(Stack, [peaks], budget=budget, accelerator="sim", rows=rows)
    assert_equal(ours.state_dict(), fit(Stack, rows=rows).state_dict())
    # The first step finds another state: its profile is part of it.
    assert max(peaks.peaks[1:]) <= budget
    assert max(peaks.peaks[1:]) > 0.9 * budget, "gradients count where they come, and not from the start"
    static = before + WEIGHTS  # a batch comes to the device within the step
    assert max(peaks.peaks[1:]) - static == pytest.approx(peaks.predicted[-1], rel=0.001)
