"""``shifts="auto"`` is decided before the first step, by its budgets; a plan is made for what each device has then."""

from typing import Any

import pytest

import lightning_dpx as dpx
from tests.conftest import SIMULATED, assert_equal
from tests.lightning.memory.test_planning import MIB, tower
from tests.lightning.memory.test_shifts_and_plans import plain, trained

pytestmark = [
    pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED),
    pytest.mark.usefixtures("sim"),
    pytest.mark.shares_plans,
    pytest.mark.xdist_group("plans of shifted steps"),
]


def test_what_shifts_auto_chose_is_planned(sim: Any) -> None:
    dpx.simulate(2, memory=["4MiB", "15MiB"])
    ours = trained(tower(dropout=0.0), shifts="auto", memory_budget="2.75MiB")
    assert all(sim.max_memory_allocated(device) <= 2.75 * MIB for device in range(2))
    dpx.simulate(8)
    assert_equal(ours, plain(), bitwise=True)


@pytest.mark.parametrize(
    ("memory", "budget", "is_enough"),
    [
        ("15MiB", "4MiB", True),
        ("15MiB", {"sim:0": "3.5MiB", "sim:1": "5MiB"}, True),
        ("15MiB", "2.75MiB", False),
        ("15MiB", "2.25MiB", False),
    ],
    ids=["one for all", "each its own", "too small for shifts alone", "too small for a plan alone"],
)
def test_shifts_auto_looks_at_the_budget_and_not_at_what_the_device_has(
    memory: str, budget: Any, is_enough: bool, sim: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dpx.simulate(2, memory=memory)
    with caplog.at_level("INFO"):
        ours = trained(tower(dropout=0.0), shifts="auto", memory_budget=budget)
    peaks = [sim.max_memory_allocated(device) for device in range(2)]
    dpx.simulate(8)
    assert_equal(ours, plain(), bitwise=True)
    limits = list(budget.values()) if isinstance(budget, dict) else [budget, budget]
    for peak, limit in zip(peaks, limits, strict=True):
        assert peak <= float(limit.removesuffix("MiB")) * MIB
    told = [record.message for record in caplog.records]
    assert any("dpx: shifts sim:0 -> sim:1" in text for text in told)
    # What shifts cannot do is left to a plan of both devices, and said.
    assert (
        any("a plan is to meet the budget, as shifts alone cannot: shifts='auto'" in text for text in told) != is_enough
    )
