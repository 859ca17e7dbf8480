"""The first step by hand is undone whatever it did; later ones begin anew until an optimizer has acted."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.lightning.manual.restarts import Restarts
from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.step import TrainingStep
from tests.conftest import make_loader, make_trainer

CPU = torch.device("cpu")


class ByHand(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(8, 3)
        self.count = 0
        self.generator = torch.Generator().manual_seed(1)
        self.held = [np.random.default_rng(1), random.Random(1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        self.optimizers().step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def module() -> ByHand:
    model = ByHand()
    make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(), devices=1).fit(model, make_loader(8, 4))
    model.zero_grad()
    return model


@pytest.fixture
def restarts(module: ByHand) -> Restarts:
    replicas = ReplicaSet(module, [CPU] * 2, execution="inline", keep=[module.trainer])
    return Restarts(module.trainer.strategy, replicas, TrainingStep(replicas))


def step(module: ByHand, restarts: Restarts) -> None:
    """Writes an attribute, gradients and, by an optimizer, parameters."""
    module.count += 1
    module.net(torch.ones(2, 8)).sum().backward()
    module.optimizers(use_pl_optimizer=False).step()
    restarts.note_act()


def test_the_first_step_is_undone_whatever_it_did(module: ByHand, restarts: Restarts) -> None:
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    before = module.net.weight.detach().clone()
    momentum = optimizer.state[module.net.weight]["momentum_buffer"].clone()
    restarts.begin([optimizer])
    step(module, restarts)
    assert not torch.equal(module.net.weight, before)
    assert restarts.undo_first_step()
    assert torch.equal(module.net.weight, before)
    assert torch.equal(optimizer.state[module.net.weight]["momentum_buffer"], momentum)
    assert module.count == 0
    assert not restarts.undo_first_step(), "it is over"


DRAWS: dict[str, Callable[[ByHand], float]] = {
    "torch": lambda _: torch.rand(()).item(),
    "numpy": lambda _: np.random.rand(),
    "random": lambda _: random.random(),
    "a generator of torch that the module holds": lambda module: torch.rand((), generator=module.generator).item(),
    "one of numpy": lambda module: module.held[0].random(),
    "one of random": lambda module: module.held[1].random(),
}


@pytest.mark.parametrize("source", DRAWS)
def test_the_step_that_is_taken_again_draws_the_same_numbers(source: str, module: ByHand, restarts: Restarts) -> None:
    draw = DRAWS[source]
    restarts.begin([])
    first = draw(module)
    assert restarts.undo_first_step()
    assert draw(module) == first


def test_a_later_step_begins_anew_unless_an_optimizer_has_acted(module: ByHand, restarts: Restarts) -> None:
    restarts.begin([])
    restarts.end()
    assert not restarts.undo_first_step()
    restarts.begin([])
    assert restarts.before_adding is not None
    module.count += 1
    module.net(torch.ones(2, 8)).sum().backward()
    number = torch.rand(())
    assert restarts.begin_anew()
    assert module.count == 0
    assert module.net.weight.grad is None
    assert torch.rand(()) == number
    restarts.begin([])
    step(module, restarts)
    assert not restarts.begin_anew()
    assert module.count == 1
