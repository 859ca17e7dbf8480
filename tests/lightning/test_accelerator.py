"""Simulated devices as Lightning's accelerator."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import AcceleratorRegistry

from lightning_dpx.lightning.accelerator import SimAccelerator
from tests.conftest import SIMULATED

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


@pytest.mark.parametrize(
    ("devices", "indices"), [(2, [0, 1]), ("2", [0, 1]), ([0, 3], [0, 3]), ("1,2", [1, 2]), (-1, list(range(8)))]
)
def test_devices_are_read_as_lightning_reads_them(devices: Any, indices: list[int], sim: Any) -> None:
    assert SimAccelerator.parse_devices(devices) == indices


@pytest.mark.parametrize("devices", [9, [8], 0, [-1, 0]])
def test_devices_that_are_not_there_are_refused_with_their_number(devices: Any, sim: Any) -> None:
    with pytest.raises(MisconfigurationException, match="there are 0 to 7; make more with"):
        SimAccelerator.parse_devices(devices)


def test_names_of_devices_are_refused_as_lightning_refuses_them(sim: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"a number of simulated devices, or their indices"):
        SimAccelerator.parse_devices(["sim:0", "sim:1"])


def test_strategies_that_do_not_know_them_are_told_which_does(sim: Any) -> None:
    with pytest.raises(MisconfigurationException, match="Use strategy='dpx'"):
        SimAccelerator().setup_device(torch.device("cpu"))
    SimAccelerator().setup_device(torch.device("sim", 3))
    assert sim.current_device() == 3
    sim.set_device(0)


def test_it_is_registered_once_whoever_asks() -> None:
    SimAccelerator.register_accelerators(AcceleratorRegistry)
    assert type(AcceleratorRegistry.get("sim")) is SimAccelerator
    assert "allocated_bytes.all.peak" in SimAccelerator().get_device_stats("sim:0")
