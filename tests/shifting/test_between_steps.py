"""Between the steps, operators whose operands lie on both sides of a cut run where they write."""

import copy

import pytest
import torch

from lightning_dpx.shifting.between_steps import BetweenSteps
from tests.conftest import SIMULATED, sim_device

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
HERE, THERE = torch.device("cpu"), sim_device(1)


def mode() -> BetweenSteps:
    made = BetweenSteps()
    made.pairs = [(HERE, THERE)]
    return made


def test_operands_come_together_where_the_rest_runs() -> None:
    with mode():
        total = torch.ones(2) + torch.ones(2, device=THERE)
        stacked = torch.stack([torch.ones(1, device=THERE), torch.ones(1)])
    assert (total.device, total.tolist()) == (HERE, [2, 2])
    assert stacked.device == HERE


def test_what_is_written_stays_where_it_is() -> None:
    weight = torch.ones(2, device=THERE)
    with mode():
        weight.add_(torch.ones(2))
        torch.mul(torch.ones(2), weight, out=weight)
    assert (weight.device, weight.tolist()) == (THERE, [2, 2])


def test_a_deep_copy_stays_where_its_tensors_are() -> None:
    """As of an optimizer's state, whose memo leads to tensors on both sides."""
    state = {"here": torch.ones(2), "there": torch.ones(2, device=THERE)}
    with mode():
        copied = copy.deepcopy(state, {1: torch.ones(2)})
    assert (copied["here"].device, copied["there"].device) == (HERE, THERE)


def test_gradients_are_of_the_tensors_that_are_asked_for() -> None:
    here = torch.ones(2, requires_grad=True)
    there = torch.ones(2, device=THERE, requires_grad=True)
    loss = (here * there.to(HERE)).sum()
    with mode():
        gradients = torch.autograd.grad(loss, [here, there])
    assert [(one.device, one.tolist()) for one in gradients] == [(HERE, [1, 1]), (THERE, [1, 1])]


def test_without_a_cut_and_with_other_devices_torch_says_what_it_always_does() -> None:
    for pairs in ([], [(HERE, sim_device(2))]):
        between = BetweenSteps()
        between.pairs = pairs
        with between, pytest.raises(RuntimeError):
            torch.ones(2) + torch.ones(2, device=THERE)
