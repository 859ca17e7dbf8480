"""What a step of an optimizer takes on the host while it runs is what the allocator's account says, and told of."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.lightning.memory.update_memory import bytes_of_update
from tests.conftest import SIMULATED, make_trainer

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)  # the host's allocator is asked
MIB = 2**20


def parameters() -> list[nn.Parameter]:
    shapes = [(1024, 64), (64,), (512, 512), (3, 64), ()]
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


@pytest.mark.parametrize(
    "make",
    [
        lambda own: torch.optim.AdamW(own, foreach=True),
        lambda own: torch.optim.AdamW(own, foreach=False),
        lambda own: torch.optim.AdamW(own, fused=True),
        lambda own: torch.optim.SGD([{"params": own[:2]}, {"params": own[2:], "weight_decay": 0.1}], foreach=True),
    ],
    ids=["foreach", "one by one", "fused", "two groups"],
)
def test_it_is_what_the_allocator_gives_out(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    own = parameters()
    optimizer = make(own)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    taken = peak_of_passing(optimizer.step)
    assert bytes_of_update([optimizer]) == pytest.approx(taken, rel=0.05, abs=4096)


def test_nothing_is_known_of_optimizers_that_need_a_closure_and_of_those_that_are_not_of_torch() -> None:
    class Own(torch.optim.SGD):
        pass

    assert bytes_of_update([torch.optim.LBFGS(parameters()), Own(parameters())]) == 0


class Wide(LightningModule):
    """Its parameters are most of what it takes, and each of them a small part."""

    def __init__(self, foreach: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.foreach = foreach
        self.net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(16)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=self.foreach)


def told_of_updates(module: Wide) -> list[str]:
    """What a fit within a budget of 4.75 MiB says of its optimizer's steps."""
    strategy = dpx.DPXStrategy(memory_budget=int(4.75 * MIB), micro_batches=1, plan_cache=False)
    batches = DataLoader(TensorDataset(torch.randn(24, 128)), batch_size=8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make_trainer(max_epochs=1, strategy=strategy, accelerator="cpu", devices=1).fit(module, batches)
    return [str(one.message) for one in told if "a step of the optimizer takes" in str(one.message)]


@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_beyond_the_budget_is_told_of_once_with_its_figures(foreach: bool) -> None:
    messages = told_of_updates(Wide(foreach))
    assert len(messages) == (1 if foreach else 0)
    if foreach:
        assert "takes 1.0 MiB on cpu" in messages[0]
        assert "5.0 MiB, where memory_budget allows 4.8 MiB" in messages[0]


def test_a_parameter_of_one_row_counts_by_its_columns() -> None:
    own = [nn.Parameter(torch.ones(1, 2**21)), *[nn.Parameter(torch.ones(1, 200)) for _ in range(100)]]
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(own, foreach=False)
    optimizer.step()
    taken = peak_of_passing(optimizer.step)
    assert bytes_of_update([optimizer]) == pytest.approx(taken, rel=0.1)


def test_hooks_on_all_optimizers_are_not_called_for_it() -> None:
    calls = list[Any]()
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        assert bytes_of_update([torch.optim.AdamW(parameters(), foreach=True)]) > 0
    finally:
        handle.remove()
    assert not calls


class UsesTheRestLater(Wide):
    """Half of its layers from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net[:8](batch[0]).square().mean()
        if batch_idx > 0:
            # No calls, which would have memory planned anew before the step.
            loss = loss + torch.stack([layer.weight.sum() for layer in self.net[8:]]).sum()
        return loss


def test_a_step_is_told_of_that_is_beyond_the_budget_with_parameters_that_the_first_one_did_not_use() -> None:
    messages = told_of_updates(UsesTheRestLater(True))
    assert len(messages) == 1
