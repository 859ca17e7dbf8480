"""Steps are called as Lightning calls them, whatever their arguments are named; budgets that cannot be met say why."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.tuner.batch_size_scaling import is_oom_error
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.errors import BudgetError


class Steps(nn.Module):
    """A module with a training step, as a LightningModule has one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.indices = list[Any]()

    def loss(self, x: Tensor, *index: Any) -> Tensor:
        self.indices.append(index)
        assert index in ((), (0,))
        return self.layers(x).pow(2).mean()


class Batch(Steps):
    def training_step(self, batch: Tensor) -> Tensor:
        return self.loss(batch)


class Renamed(Steps):
    def training_step(self, inputs: Tensor, number: int) -> Tensor:
        return self.loss(inputs, number)


class Starred(Steps):
    def training_step(self, *args: Any) -> Tensor:
        return self.loss(*args)


class Default(Steps):
    def training_step(self, batch: Tensor, batch_idx: int = 7) -> Tensor:
        return self.loss(batch, batch_idx)


class Keyword(Steps):
    def training_step(self, batch: Tensor, *, noise: float = 0.0) -> Tensor:
        return self.loss(batch + noise)


RUNS: list[Callable[[nn.Module, Tensor], Any]] = [
    lambda module, x: dpx.search_plan(module, x, budget=0.9),
    lambda module, x: dpx.search_plan(module, x, budget=0.9, device="cuda"),
    lambda module, x: dpx.trace_activations(module, x),
]


@pytest.mark.parametrize("kind", [Batch, Renamed, Starred, Default, Keyword])
def test_a_step_gets_the_arguments_that_it_takes(kind: type[Steps]) -> None:
    for run in RUNS:
        assert run(kind(), torch.rand(64, 64))


def test_a_budget_that_is_too_small_says_so_in_units_that_show_it() -> None:
    with pytest.raises(BudgetError) as caught:
        dpx.search_plan(Batch(), torch.rand(64, 64), budget=1000)
    message = str(caught.value)
    assert message.startswith("A budget of 1000 bytes for activations cannot be met; the smallest that can is ")
    assert "KiB" in message
    assert "0.00" not in message
    assert "out of memory" not in message
    assert "Lightning" not in message
    assert is_oom_error(caught.value), "what looks for a smaller batch knows it all the same"
    assert caught.value.smallest is not None


class Wide(nn.Module):
    """Small tensors everywhere, and one large one in the middle that nothing can avoid."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.wide, self.last = nn.Linear(64, 4096), nn.Linear(4096, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.wide(self.narrow(x))))


def test_the_floor_of_a_budget_is_explained_by_what_sets_it() -> None:
    sets = r"What sets that is \w+ in the (forward|backward) at '(wide|last|the step itself)'.* pass: gradients, and"
    with pytest.raises(BudgetError, match=sets) as caught:
        dpx.search_plan(Wide(), torch.rand(64, 64), budget=100_000)
    proved = re.search(r"nothing that drops and computes again takes less than ([\d.]+) MiB", str(caught.value))
    assert proved is not None
    assert caught.value.smallest is not None
    assert 0.9 * caught.value.smallest <= float(proved[1]) * 2**20 <= 1.01 * caught.value.smallest
