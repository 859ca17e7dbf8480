"""What a shift is given: devices that are there, and names that match something."""

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.shifting.choose import choose_modules
from tests.conftest import SIMULATED, sim_device

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
HOME = sim_device(0)


@pytest.mark.parametrize(
    ("chosen", "shifts", "message"),
    [
        (["b"], {"sim:0": "sim:0"}, "shifts to itself"),
        (
            ["b"],
            {"sim:0": "sim:1", "sim:1": "sim:2"},
            r"shifts\['sim:0'\]='sim:1' shifts to a device that is shifted too",
        ),
        (["b"], {}, "shifts is empty"),
        (["b"], {"sim:0": "nowhere:1"}, r"shifts\['sim:0'\]='nowhere:1' names an unknown device"),
        (["b"], {"sim:3": "sim:1"}, "lives on sim:0; shifts must name exactly one of its devices"),
        (["bb"], {"sim:0": "sim:1"}, "'bb', which matches no submodule; the nearest are: b"),
        ([], {"sim:0": "sim:1"}, "activations is empty"),
    ],
)
def test_bad_shifts_are_refused(chosen: list[str], shifts: dict[str, str], message: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.shift_activations(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}).to(HOME), chosen, shifts)


def test_activations_stand_for_their_modules() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    kept = dpx.trace_activations(net, torch.ones(2, 4))
    assert choose_modules(net, kept) == ["1", "2.0", "2.1"]
    assert choose_modules(net, kept[0]) == ["1"]
    own_code = r"Sequential's own code keeps; .*: 0, 1, 2, 2\.0, 2\.1"
    for wrong, told in ((3, "activations holds 3; give names"), ("", own_code)):
        with pytest.raises(dpx.ConfigurationError, match=told):
            choose_modules(net, [wrong])
    with pytest.raises(dpx.ConfigurationError, match=r"matches no submodule; there are: 0, 1, 2, 2\.0, 2\.1"):
        choose_modules(net, "encoder")


@pytest.mark.parametrize("shifts", [[("cpu", "meta")], "cuda:0"])
def test_shifts_are_a_mapping(shifts) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"which is no mapping; give \{from: to\}"):
        dpx.shift_activations(nn.Sequential(nn.Linear(2, 2)), "0", shifts)


def test_a_type_of_devices_that_torch_was_not_built_for_is_unknown() -> None:
    if torch.cuda.is_available():
        pytest.skip("it was")
    with pytest.raises(dpx.ConfigurationError, match=r"shifts\['cpu'\]='cuda:0' names an unknown device"):
        dpx.shift_activations(nn.Sequential(nn.Linear(2, 2)), "0", {"cpu": "cuda:0"})
