"""Generators of the host and of devices continue where they were."""

import pytest
import torch

from lightning_dpx import devices
from tests.conftest import SIMULATED, sim_device

CPU = torch.device("cpu")


def places() -> list[torch.device]:
    return [CPU] if SIMULATED else [CPU, sim_device(1)]


def draw() -> list[float]:
    return [torch.rand(1, device=device).item() for device in places()]


def test_states_are_compared_and_restored_on_every_device() -> None:
    before = devices.RandomStates(places())
    assert before == before.again()
    assert before.digest() == before.again().digest()
    first = draw()
    assert before != before.again()
    assert before.digest() != before.again().digest()
    before.restore()
    assert draw() == first


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")
def test_devices_with_the_process_s_seed_get_others_and_a_seed_of_the_user_s_stays() -> None:
    module = torch.get_device_module("sim")
    torch.manual_seed(5)
    with devices.device_context(sim_device(2)):
        module.manual_seed(77)
    devices.seed_apart([sim_device(0), sim_device(1), sim_device(2)])
    seeds = []
    for index in range(3):
        with devices.device_context(sim_device(index)):
            seeds.append(module.initial_seed())
    assert seeds == [5, 6, 77]
