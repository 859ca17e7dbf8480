"""What the command line says of a run that is planned."""

from typing import Any

import pytest

from lightning_dpx.commands.plan_arguments import parse_devices, parse_number
from lightning_dpx.errors import ConfigurationError


def test_devices_as_lightning_takes_them() -> None:
    assert [str(device) for device in parse_devices([0, 2])] == ["cuda:0", "cuda:2"]
    assert [str(device) for device in parse_devices("2")] == ["cuda:0", "cuda:1"]
    assert [str(device) for device in parse_devices("cuda:1, 3")] == ["cuda:1", "cuda:3"]
    assert [str(device) for device in parse_devices("cuda,cpu")] == ["cuda:0", "cpu"]


def test_what_is_no_list_of_devices() -> None:
    with pytest.raises(ConfigurationError, match="means all that a machine has"):
        parse_devices("auto")
    for other in ("gpu:x", "meta", "cuda:256", "cuda:2560", "129", "100000", "9" * 30):
        with pytest.raises(ConfigurationError, match=f"--devices '{other}' is not allowed; give a number up to 128"):
            parse_devices(other)
    assert len(parse_devices("128")) == 128


@pytest.mark.parametrize("devices", ["cuda:0,cuda:0", "0,cuda:0", [0, 1, 0], "cuda,cuda:0"], ids=str)
def test_an_accelerator_is_named_once_as_for_a_trainer(devices: str | list[int]) -> None:
    with pytest.raises(ConfigurationError, match=r"names cuda:0 twice\. Name each device once"):
        parse_devices(devices)


def test_replicas_may_share_the_host_and_simulated_devices(sim: Any) -> None:
    assert [str(device) for device in parse_devices("cpu,cpu")] == ["cpu", "cpu"]
    assert [str(device) for device in parse_devices("sim:0,sim:0")] == ["sim:0", "sim:0"]


def test_numbers_of_micro_batches() -> None:
    assert parse_number("4") == 4
    assert parse_number("auto") == "auto"
    with pytest.raises(ConfigurationError, match="--micro-batches 0 is not allowed"):
        parse_number("0")
