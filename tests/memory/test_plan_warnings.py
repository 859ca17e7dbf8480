"""Steps that a plan is not made for are told of, once, and give what they give without a plan."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from tests.conftest import SIMULATED

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)  # the host's allocator is asked

FEW = 64  # rows, beside whose activations gradients weigh


class Block(nn.Module):
    """What a layer of a transformer does, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def planned(rows: int = 512, *, accumulates: bool = False) -> tuple[nn.Module, nn.Module, Tensor]:
    """Six blocks with a plan for 0.7 of their peak, the same without, and their input."""
    torch.manual_seed(5)
    module, x = nn.Sequential(*(Block() for _ in range(6))), torch.randn(rows, 64)
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, dpx.search_plan(module, x, budget=0.7, accumulates=accumulates))
    return module, plain, x


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def have_the_same(module: nn.Module, plain: nn.Module) -> bool:
    return all(map(torch.equal, gradients(module), gradients(plain)))


def two_forwards(module: nn.Module, x: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    (module(x) * module(0.5 * x)).mean().backward()


def step(module: nn.Module, x: Tensor) -> None:
    module(x).square().mean().backward()


def test_a_forward_beside_one_that_waits_for_its_backward_is_told_of_once() -> None:
    """As in a step that compares two views of a sample: the plan is for one forward."""
    module, plain, x = planned()
    for _ in range(3):  # what was forgotten does not wait, with or without a backward
        module.zero_grad(set_to_none=True)
        step(module, x)
        module(x)
    two_forwards(plain, x)
    with pytest.warns(UserWarning, match="before the backward of an earlier one"):
        two_forwards(module, x)
    assert have_the_same(module, plain)
    two_forwards(module, x)  # where a second warning would be an error
    assert have_the_same(module, plain)


def test_a_backward_that_finds_gradients_is_told_of_once() -> None:
    module, plain, x = planned(FEW)
    for one in (module, plain):
        step(one, x)
    with pytest.warns(UserWarning, match="parameters have gradients, to which the backward of the planned Sequential"):
        step(module, x)
    step(plain, x)
    assert have_the_same(module, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(module, x)
    step(plain, x)
    assert have_the_same(module, plain)


def test_a_plan_that_counts_gradients_tells_of_none() -> None:
    module, plain, x = planned(FEW, accumulates=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(module, x)
            step(plain, x)
    assert have_the_same(module, plain)


def test_in_a_region_of_checkpoint_a_plan_is_not_followed_which_is_told_of_once() -> None:
    module, plain, x = planned()

    def in_a_region(module: nn.Module) -> None:
        module.zero_grad(set_to_none=True)
        y = checkpoint(module, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        y.square().mean().backward()

    with pytest.warns(UserWarning, match="a Sequential with a memory plan runs within torch.utils.checkpoint"):
        in_a_region(module)
    step(plain, x)
    assert have_the_same(module, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_a_region(module)
    assert have_the_same(module, plain)
