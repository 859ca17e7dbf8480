"""A small shadow of an optimizer tells what a step of the real one takes; a simulated device's clock says the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.lightning.memory.shadow_optimizer import ShadowOptimizer, trained_by, with_shadow_optimizer
from lightning_dpx.lightning.memory.step_times import seconds_of_update
from lightning_dpx.memory.profile.roofline import Rates, rates_of
from tests.conftest import SIMULATED, sim_device

Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: list[Make] = [
    torch.optim.SGD,
    lambda own: torch.optim.SGD(own, momentum=0.9, nesterov=True),
    torch.optim.Adam,
    lambda own: torch.optim.AdamW([{"params": own[:2]}, {"params": own[2:], "weight_decay": 0.1}], amsgrad=True),
    torch.optim.RMSprop,
]


def parameters(device: torch.device) -> list[nn.Parameter]:
    shapes = [(1024, 64), (64,), (2000, 512)]
    return [nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize("make", MAKERS, ids=["sgd", "nesterov", "adam", "amsgrad and groups", "rmsprop"])
def test_a_step_is_as_long_as_the_clock_of_a_simulated_device_says(make: Make) -> None:
    try:
        dpx.simulate(8, link="5GB/s")
        device = sim_device(0)
        own = parameters(device)
        optimizer = make(own)
        seconds = []
        for _ in range(2):
            for parameter in own:
                parameter.grad = torch.ones_like(parameter)
            before = torch.sim.busy_seconds(device)  # type: ignore[attr-defined]
            optimizer.step()
            seconds.append(torch.sim.busy_seconds(device) - before)  # type: ignore[attr-defined]
        predicted = seconds_of_update([optimizer], own, [0] * len(own), rates_of(device))
    finally:
        dpx.simulate(8)
    assert predicted == pytest.approx(seconds[1], rel=0.02)


RATES = Rates(flops=1e20, bytes=1e9, host_bytes=1e9, start=1.0)


def test_of_parameters_with_several_owners_the_largest_share_counts() -> None:
    own = parameters(torch.device("cpu"))
    optimizer = torch.optim.Adam(own)
    alone = seconds_of_update([optimizer], own, [0, 0, 0], RATES)
    shared = seconds_of_update([optimizer], own, [1, 1, 0], RATES)
    assert shared == pytest.approx(alone * own[2].numel() / sum(parameter.numel() for parameter in own))


def test_fused_steps_and_those_of_other_libraries_move_parameters_and_states_once() -> None:
    class Own(torch.optim.Adam):
        pass

    own = parameters(torch.device("cpu"))
    num_bytes = sum(parameter.nbytes for parameter in own)
    for optimizer in (Own(own), torch.optim.Adam(own, fused=True)):
        assert seconds_of_update([optimizer], own, [0, 0, 0], RATES) == pytest.approx(7 * num_bytes / 1e9, rel=0.4)
    assert seconds_of_update([], own, [0, 0, 0], RATES) == 0


def test_a_tensor_as_learning_rate_and_capturable_steps_have_a_twin() -> None:
    own = parameters(torch.device("cpu"))
    plain = seconds_of_update([torch.optim.Adam(own)], own, [0, 0, 0], RATES)
    for options in ({"lr": torch.tensor(0.1)}, {"capturable": True}, {"lr": torch.tensor(0.1), "capturable": True}):
        optimizer = torch.optim.Adam(own, **options)
        assert seconds_of_update([optimizer], own, [0, 0, 0], RATES) == pytest.approx(plain, rel=0.02)


def test_an_empty_parameter_has_an_empty_part() -> None:
    own = [nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.zeros(2000, 2000))]
    assert seconds_of_update([torch.optim.SGD(own, lr=0.1)], own, [0, 0], RATES) > 0


def test_what_is_not_trained_has_no_twin() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.SGD([frozen], lr=0.1)
    seen: list[ShadowOptimizer] = []
    assert with_shadow_optimizer(optimizer, lambda shadow: seen.append(shadow) or 1.0) is None
    assert seen == []
    assert trained_by(optimizer) == []
    assert seconds_of_update([optimizer], [frozen], [0], RATES) == 0
