"""Between the steps, operators whose operands lie on both sides of a cut run where they write."""

import pytest
import torch

from lightning_dpx.shifting.between_steps import BetweenSteps
from tests.conftest import SIMULATED, sim_device

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
HERE, THERE = torch.device("cpu"), torch.device("sim", 1)


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


def test_without_a_cut_and_with_other_devices_torch_says_what_it_always_does() -> None:
    for pairs in ([], [(HERE, sim_device(2))]):
        between = BetweenSteps()
        between.pairs = pairs
        with between, pytest.raises(RuntimeError):
            torch.ones(2) + torch.ones(2, device=THERE)
