"""What the command line says of a run that is planned."""

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
    with pytest.raises(ConfigurationError, match="--devices 'gpu:x' is not allowed"):
        parse_devices("gpu:x")


def test_numbers_of_micro_batches() -> None:
    assert parse_number("4") == 4
    assert parse_number("auto") == "auto"
    with pytest.raises(ConfigurationError, match="--micro-batches 0 is not allowed"):
        parse_number("0")
