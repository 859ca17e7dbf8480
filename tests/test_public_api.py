import re
from pathlib import Path

import lightning_dpx as dpx


def test_the_public_names_are_frozen_and_sorted() -> None:
    expected = [
        "Activation",
        "ActivationPlanner",
        "BudgetError",
        "CollectiveError",
        "ConfigurationError",
        "DPXError",
        "DPXPrecision",
        "DPXProfiler",
        "DPXStrategy",
        "DeviceMemoryMonitor",
        "DeviceThroughputMonitor",
        "GatherError",
        "GradientPacker",
        "GradientReducer",
        "MemoryPlan",
        "ParityError",
        "PlanError",
        "ReplicaGroup",
        "ReplicationError",
        "SliceError",
        "Slicer",
        "TensorMonitor",
        "Tuning",
        "UnsupportedError",
        "apply_plan",
        "estimate_cost",
        "least_loaded_placement",
        "offload_activations",
        "register_planner",
        "register_recipe",
        "register_reducer",
        "register_slicer",
        "remove_plan",
        "search_plan",
        "shift_activations",
        "simulate",
        "trace_activations",
        "tune",
        "unoffload_activations",
        "unshift_activations",
    ]
    assert dpx.__all__ == expected == sorted(expected)
    assert all(name in vars(dpx) for name in expected)


def test_every_error_is_ours_and_a_built_in() -> None:
    for kind in (dpx.ConfigurationError, dpx.SliceError, dpx.GatherError):
        assert issubclass(kind, dpx.DPXError)
        assert issubclass(kind, ValueError)
    assert issubclass(dpx.UnsupportedError, NotImplementedError)
    assert issubclass(dpx.ReplicationError, TypeError)


def test_what_type_checkers_read_from_outside_uses_every_public_name() -> None:
    text = (Path(__file__).parent / "typed_use.py").read_text()
    used = set(re.findall(r"\bdpx\.(\w+)", text))
    assert set(dpx.__all__) <= used
