"""The config that is measured and saved trains as the prediction was made for."""

import argparse
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.commands.tuned_config import check_devices, key_of, tell_other_devices, tuned_config
from tests.conftest import SIMULATED


def arguments(**given: Any) -> argparse.Namespace:
    """As the command line leaves them where nothing is said."""
    usual = dict.fromkeys(("devices", "budget", "planner", "batch_size_key", "save"))
    return argparse.Namespace(**{**usual, "micro_batches": "auto", "measure": True, **given})


def config(**trainer: Any) -> dict[str, Any]:
    return {"trainer": {"accelerator": "auto", "devices": "auto", **trainer}, "data": {"batch_size": 8}}


@pytest.mark.parametrize(
    ("devices", "accelerator", "written"),
    [
        ("3", "auto", 3),
        ("cuda:0,cuda:2", "cuda", [0, 2]),
        ("cuda", "cuda", [0]),
        ("1,3", "cuda", [1, 3]),
        ("cpu,cpu", "cpu", 2),
        pytest.param("sim:1", "sim", [1], marks=pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)),
    ],
)
def test_devices_are_written_as_a_trainer_takes_them(devices: str, accelerator: str, written: Any) -> None:
    own = config()
    found = tuned_config(arguments(devices=devices), own, "data.batch_size", 32)
    assert (found["trainer"]["accelerator"], found["trainer"]["devices"]) == (accelerator, written)
    assert found["data"] == {"batch_size": 32}
    assert own == config()


def test_several_devices_are_those_of_our_strategy_where_the_config_leaves_it_open() -> None:
    """Lightning would take DDP, of which nothing was predicted."""
    ours = {"class_path": "lightning_dpx.DPXStrategy"}
    for devices, given, written in [("2", "auto", ours), ("1", "auto", "auto"), ("2", "ddp", "ddp")]:
        found = tuned_config(arguments(devices=devices), config(strategy=given), "data.batch_size", 8)
        assert found["trainer"]["strategy"] == written


def test_what_the_command_line_does_not_say_stays() -> None:
    own = config(accelerator="cpu", devices=2, strategy="ddp")
    assert tuned_config(arguments(), own, "data.batch_size", 8) == own
    budgeted = tuned_config(arguments(budget="1GiB"), own, "data.batch_size", 8)["trainer"]["strategy"]
    assert budgeted["init_args"] == {"memory_budget": "1GiB", "micro_batches": "auto"}


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("cuda:0,cpu", "a Trainer has devices of one type"),
        ("cuda:0,cuda:0", "it names cuda:0 twice"),
        ("sim:0,sim:0", "a Trainer takes each device once"),
        ("cuda:98,cuda:99", "cuda:98 and cuda:99 cannot be found here; leave it out, or name devices of this machine"),
    ],
)
def test_devices_that_no_trainer_takes(devices: str, said: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=said):
        check_devices(arguments(devices=devices))


def test_devices_need_not_be_there_to_be_saved() -> None:
    check_devices(arguments(devices="cuda:98", measure=False))
    check_devices(arguments(devices="cpu,cpu"))
    check_devices(arguments(devices="98"))


@pytest.mark.parametrize(
    ("devices", "accelerator", "is_told"),
    [("2", "cpu", True), (None, "cpu", True), ("2", "gpu", False), ("2", "auto", False), ("cuda:0", "cpu", False)],
)
def test_a_prediction_for_other_devices_is_told(
    devices: str | None, accelerator: str, is_told: bool, capsys: Any
) -> None:
    tell_other_devices(arguments(devices=devices), config(accelerator=accelerator), [torch.device("cuda", 0)])
    assert ("is for cuda:0, and the config trains with" in capsys.readouterr().err) == is_told


def test_the_key_is_that_of_a_number() -> None:
    assert key_of(arguments(), config()) == "data.batch_size"
    assert key_of(arguments(batch_size_key="trainer.devices"), config()) == "trainer.devices"
    with pytest.raises(dpx.ConfigurationError, match=r"it is a section of the config; name a key .* data\.batch_size"):
        key_of(arguments(batch_size_key="data"), config())
    with pytest.raises(dpx.ConfigurationError, match="the config has no such key"):
        key_of(arguments(batch_size_key="data.rows"), config())
