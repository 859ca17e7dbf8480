"""Which device is meant."""

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx import devices
from tests.conftest import SIMULATED, sim_device

needs_devices = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")
CPU = torch.device("cpu")


def test_all_numbers_of_the_host_are_one_device() -> None:
    assert devices.canonical_device("cpu:3") == CPU
    assert devices.distinct_devices([torch.device("cpu:1"), CPU]) == [CPU]


@needs_devices
def test_an_accelerator_without_a_number_is_the_current_one() -> None:
    with devices.device_context(sim_device(2)):
        assert devices.canonical_device("sim") == sim_device(2)
    with devices.device_context(CPU):
        assert devices.canonical_device("sim") == sim_device(0)


def test_a_device_type_that_is_not_there_is_named() -> None:
    with pytest.raises(dpx.ConfigurationError, match="'xpu' is not there"):
        devices.canonical_device("xpu")


@needs_devices
def test_spare_are_the_devices_of_the_same_kind_that_are_not_used(sim) -> None:
    assert devices.spare_devices([sim_device(0), sim_device(3)]) == [sim_device(n) for n in (1, 2, 4, 5, 6, 7)]
    assert devices.spare_devices([CPU]) == []
    assert devices.accelerators() == [sim_device(n) for n in range(8)]


def test_this_process_may_run_somewhere() -> None:
    assert devices.num_usable_cpus() >= 1
    assert "cpu" in devices.autocast_types()
