"""Many steps with faults at random end with the weights of the steps that counted, and hold nothing of the others."""

import gc
import random
import threading
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.conftest import SIMULATED, make_trainer

ROWS = 8
FAULTS = ("forward", "backward", "oom", "none", "short", "all none")


OPTIMIZERS: list[torch.optim.Optimizer] = []  # a fit after an error goes on with the same one


class PlannedError(RuntimeError):
    """A fault on purpose."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise PlannedError("backward")


class Faulty(LightningModule):
    """Rows (B, 6) to 3 classes; at the planned steps something goes wrong in one replica."""

    def __init__(self, faults: dict[int, tuple[str, int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        self.faults = faults

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = int(batch["step"][0])
        kind, where = self.faults.get(step, ("", 0))
        here = self.global_rank == where
        logits = self.net(batch["rows"])
        if kind == "forward" and here:
            raise PlannedError("forward")
        if kind == "oom" and here:
            raise torch.OutOfMemoryError("CUDA out of memory, on purpose")
        if kind == "backward" and here:
            logits = FailsInBackward.apply(logits)
        if kind == "all none" or (kind == "none" and here):
            return None
        return F.cross_entropy(logits, batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[0]


def sgd(model: Faulty) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)


def plan_of_faults(num_steps: int) -> dict[int, tuple[str, int]]:
    chance = random.Random(7)
    return {step: (chance.choice(FAULTS), chance.randrange(2)) for step in range(num_steps) if chance.random() < 0.04}


def batches(faults: dict[int, tuple[str, int]], num_steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for step in range(num_steps):
        rows = 3 if faults.get(step, ("",))[0] == "short" else ROWS
        made.append(
            {
                "rows": torch.randn(rows, 6, generator=generator),
                "labels": torch.randint(3, (rows,), generator=generator),
                "step": torch.full((rows,), step),
            }
        )
    return made


def without_faults(data: list[dict[str, torch.Tensor]], faults: dict[int, tuple[str, int]]) -> nn.Module:
    """The steps that counted, on one device, with the rows that counted."""
    model = Faulty(faults)
    optimizer = sgd(model)
    for step, batch in enumerate(data):
        kind, where = faults.get(step, ("", 0))
        if kind in ("forward", "backward", "oom", "all none"):
            continue
        half = slice(ROWS // 2) if where == 1 else slice(ROWS // 2, ROWS)
        kept = half if kind == "none" else slice(None)
        optimizer.zero_grad()
        F.cross_entropy(model.net(batch["rows"][kept]), batch["labels"][kept]).backward()
        optimizer.step()
    return model


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_steps", [800, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:training_step returned None", "ignore:.*returned `None`")
def test_steps_with_faults(num_steps: int) -> None:
    faults = plan_of_faults(num_steps)
    assert {kind for kind, _ in faults.values()} == set(FAULTS)
    data, model = batches(faults, num_steps), Faulty(faults)
    OPTIMIZERS[:] = [sgd(model)]
    sim, held, threads, ended = torch.get_device_module("sim"), [], threading.active_count(), 0
    begin = noted = 0
    while begin < num_steps:
        strategy = dpx.DPXStrategy(execution="threads", timeout=60, verify="off")
        trainer = make_trainer(strategy=strategy, accelerator="sim", devices=2, max_epochs=1)
        try:
            trainer.fit(model, DataLoader(data[begin:], batch_size=None))
            begin = num_steps
        except (PlannedError, torch.OutOfMemoryError) as error:
            noted += any("In replica" in note for note in error.__notes__)
            ended += 1
            begin += trainer.fit_loop.epoch_loop.batch_progress.current.ready
        del trainer, strategy
        gc.collect()
        held.append(sim.memory_allocated(0) + sim.memory_allocated(1))
    assert ended == sum(kind in ("forward", "backward", "oom") for kind, _ in faults.values())
    assert noted == ended

    assert len(set(held)) == 1, "memory is flat"
    assert threading.active_count() == threads
    for (name, ours), theirs in zip(
        model.state_dict().items(), without_faults(data, faults).state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)
