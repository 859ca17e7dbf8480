"""Which device is meant."""

import subprocess
import sys

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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["gpu"], "'gpu' names no device here; give a type and an index, such as 'cuda:0', or 'cpu'"),
        ([None], "None names no device here"),
        ("cpu", r"devices='cpu' is not allowed; give a list: \['cpu'\]"),
        (torch.device("cpu"), r"devices='cpu' is not allowed; give a list"),
        (["cpu", "cuda:98"], "The device 'cuda:98' is not there: torch finds \\d+ of the type 'cuda'"),
        (["meta"], "The device 'meta.*' is not there"),
    ],
)
def test_names_of_devices_that_are_wrong_are_told_without_torch_s_list(given: object, said: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=said):
        dpx.ReplicaGroup(torch.nn.Linear(1, 1), given)
    with pytest.raises(dpx.ConfigurationError, match=said):
        devices.present_devices(given)


def test_devices_that_are_only_named_need_not_be_there() -> None:
    assert devices.named_devices(["cuda:98", "cpu"]) == [torch.device("cuda", 98), torch.device("cpu")]
    assert devices.present_devices(["cpu:3"]) == [torch.device("cpu")]
    with pytest.raises(dpx.ConfigurationError, match="'gpu' names no device"):
        dpx.tune(torch.nn.Linear(1, 1), devices=["gpu"])
    with pytest.raises(dpx.ConfigurationError, match="devices is empty"):
        dpx.tune(torch.nn.Linear(1, 1), devices=[])


@pytest.mark.slow
def test_simulated_devices_that_are_not_made_yet_are_told_how() -> None:
    program = "import lightning_dpx as dpx; from torch import nn; dpx.ReplicaGroup(nn.Linear(1, 1), ['sim:0'])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ConfigurationError: 'sim:0' names no device here; call lightning_dpx.simulate() first" in ended.stderr


@pytest.mark.parametrize(("given", "message"), [(2, "devices=2 is not allowed; give a list"), ("cpu", r"\['cpu'\]")])
def test_devices_are_a_list(given: object, message: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.ReplicaGroup(torch.nn.Linear(2, 2), given)  # type: ignore[arg-type]
