"""Options are checked before any device is touched, and what follows from them is said once."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.lightning.options import StrategyOptions, parse_shifts


def options(**given: Any) -> StrategyOptions:
    """The defaults of the strategy, and what is given."""
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(dpx.DPXStrategy.__init__).parameters.items()
    }
    names = [field.name for field in dataclasses.fields(StrategyOptions) if field.init]
    return StrategyOptions(**{**{name: defaults[name] for name in names}, **given})


def test_what_follows_from_the_options() -> None:
    plain = options()
    assert (plain.wire_dtype, plain.shifts_activations, plain.number_rule) == (None, False, "mean")
    assert options(communication_dtype="bfloat16").wire_dtype == torch.bfloat16
    assert options(loss_reduction="sum").number_rule == "sum"
    auto = options(shifts="auto")
    assert auto.chooses_shifts
    assert auto.shifts_activations
    shifted = options(shifts={"meta:0": "meta:1"}, shift_activations=["net"])
    assert shifted.device_shifts == {torch.device("meta", 0): torch.device("meta", 1)}
    assert shifted.shifted_parts == ["net"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"execution": "fast"}, "execution='fast'"), ({"communication_dtype": "int8"}, "communication_dtype='int8'"),
        ({"gradient_buckets": True}, "gradient_buckets=True"), ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("inf")}, "timeout=inf"), ({"process_group_backend": 3}, "process_group_backend=3"),
        ({"reducer": "naiv"}, "Unknown reducer"), ({"example_batch": 1}, "give memory_budget with it"),
        ({"check_replicas_every_n_steps": -1}, "check_replicas_every_n_steps=-1"), ({"verify": "no"}, "verify='no'"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        options(**given)


@pytest.mark.parametrize(
    ("shifts", "parts", "message"),
    [
        ("auto", ["net"], "leave shift_activations out"), ({"cuda:0": "cuda:1"}, None, "shifts needs shift_act"),
        (None, ["net"], "shift_activations needs shifts"), ("cuda:1", ["net"], "give 'auto' or"),
        ({"cuda:0": "cuda:1"}, [], "name at least one submodule"),
    ],
)  # fmt: skip
def test_shifts_need_both_devices_and_parts(shifts: Any, parts: Any, message: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        parse_shifts(shifts, parts)


def test_shifts_are_devices_and_names() -> None:
    meta = [torch.device("meta", index) for index in range(2)]
    assert parse_shifts({"meta:0": "meta:1"}, "net") == ({meta[0]: meta[1]}, ["net"])
    assert parse_shifts(None, None) == ({}, [])
    assert parse_shifts("auto", None) is None


@pytest.mark.parametrize("number", [0, "many", [2, 0]])
def test_micro_batches_may_be_chosen_by_the_planner(number: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r'is not allowed; give .* or "auto"'):
        dpx.DPXStrategy(micro_batches=number)
