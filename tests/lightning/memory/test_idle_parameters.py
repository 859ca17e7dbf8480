"""Parameters that no step uses have no gradients and no states, and take nothing from a budget until one does."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.memory.idle_parameters import IdleParameters
from tests.conftest import make_trainer

WIDTH = 64
ROWS = 512
UNUSED = 4 * 512 * 512  # bytes of the head that is not used
ACTIVATIONS = 6 * 4 * ROWS * WIDTH  # bytes that six layers keep


class HasUnusedHead(LightningModule):
    """Six layers, and a head that is used from step ``uses_from`` on."""

    def __init__(self, uses_from: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
        self.head = nn.Linear(512, 512, bias=False)
        self.uses_from = uses_from

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        if self.uses_from is not None and batch_idx >= self.uses_from:
            loss = loss + self.head.weight.sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)  # whose step takes nothing beside


class Rooms(Callback):
    """What plans allow activations, step by step."""

    def __init__(self) -> None:
        self.seen: list[int | None] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen += [plan.budget for plan in trainer.strategy.planning.devices.plans.values()]


class GivesGradients(Callback):
    """To a head that no step uses, by hand, from the third step on."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step >= 2:
            pl_module.head.weight.grad = torch.ones_like(pl_module.head.weight)


def fit(
    module: LightningModule,
    budget: int,
    micro_batches: int = 1,
    callbacks: Sequence[Callback] = (),
    accumulate_grad_batches: int = 1,
) -> list[int | None]:
    rooms = Rooms()
    strategy = dpx.DPXStrategy(memory_budget=budget, micro_batches=micro_batches, plan_cache=False)
    trainer = make_trainer(
        strategy=strategy,
        devices=1,
        max_epochs=1,
        callbacks=[*callbacks, rooms],
        accumulate_grad_batches=accumulate_grad_batches,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(6 * ROWS, WIDTH)), ROWS))
    return rooms.seen


@pytest.mark.parametrize("accumulate_grad_batches", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_room_is_kept_for_gradients_and_states_of_what_no_step_uses(
    micro_batches: int, accumulate_grad_batches: int
) -> None:
    # With a gradient and two states of the head it would be 4 times its size.
    budget = 2 * UNUSED + ACTIVATIONS
    rooms = fit(HasUnusedHead(), budget, micro_batches, accumulate_grad_batches=accumulate_grad_batches)
    assert len(rooms) == 6


@pytest.mark.parametrize("accumulate_grad_batches", [1, 3])
def test_a_step_that_uses_them_later_has_memory_planned_anew(accumulate_grad_batches: int) -> None:
    budget = 5 * UNUSED + ACTIVATIONS // 3
    rooms = fit(HasUnusedHead(uses_from=2), budget, accumulate_grad_batches=accumulate_grad_batches)
    first, last = rooms[0], rooms[-1]
    assert first is not None
    assert last is not None
    # Before, what is allowed is more than any step can take.
    assert last < first - 2 * UNUSED


def test_hooks_that_give_them_gradients_have_memory_planned_anew() -> None:
    rooms = fit(HasUnusedHead(), 5 * UNUSED + ACTIVATIONS // 3, callbacks=[GivesGradients()])
    first, last = rooms[0], rooms[-1]
    assert first is not None
    assert last is not None
    assert last < first - 2 * UNUSED


def loss_of(run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, list[nn.Parameter]]:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    return run(net, torch.ones(2, 4, requires_grad=True)).sum(), list(net.parameters())


def test_the_graph_of_a_loss_tells_which_they_are() -> None:
    idle = IdleParameters()
    loss, parameters = loss_of(lambda net, x: net[0](x))  # type: ignore[index]
    idle.look(loss, parameters, parameters)
    assert idle.ids == {id(parameters[1])}
    assert not idle.some_have_come()
    parameters[1].grad = torch.zeros(4, 4)
    assert idle.some_have_come()
    assert not idle.ids


def test_nothing_is_told_of_a_graph_with_backwards_of_its_own() -> None:
    idle = IdleParameters()
    loss, parameters = loss_of(lambda net, x: checkpoint(net[0], x, use_reentrant=True))  # type: ignore[index]
    idle.look(loss, parameters, parameters)
    assert not idle.ids, "of the first one as well the graph shows nothing"


def test_nothing_is_told_of_a_loss_without_a_graph() -> None:
    idle = IdleParameters()
    _, parameters = loss_of(lambda net, x: net[0](x))  # type: ignore[index]
    idle.look(torch.zeros((), requires_grad=True), parameters, parameters)
    assert not idle.ids, "a step that skips a batch, say"
