"""Steps that save what no profile has seen are noticed, and looked for until they are profiled."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dpx.lightning.memory.profiled_steps import SeenStep
from lightning_dpx.lightning.memory.unplanned_steps import UnplannedSteps
from tests.memory.made_up import chain

MIB = 1 << 20


def applied(**unknown: int) -> Any:
    """A plan at work, as far as what a step has saved beside it."""
    return SimpleNamespace(unknown=dict(unknown), plan=SimpleNamespace(unplanned_peak=100 * MIB))


def seen(*names: str) -> list[SeenStep]:
    profile = chain(len(names))
    values = tuple(replace(value, name=name) for value, name in zip(profile.values, names, strict=True))
    return [SeenStep((replace(profile, values=values),), (1,))]


def test_what_is_worth_a_profile_is_expected_until_a_profile_shows_it(caplog: Any) -> None:
    steps = UnplannedSteps()
    steps.look_back(applied(small=MIB))
    assert not steps.expected, "two percent of the peak are not worth a profile"
    steps.look_back(applied(**{"net.2:0": 5 * MIB}))
    assert steps.expected
    assert not steps.found_in(seen("net.0:0"))
    found = seen("net.0:0", "net.2:0", "small")
    assert steps.found_in(found)
    steps.plan_for(found)
    assert not steps.expected
    steps.look_back(applied(**{"net.2:0": 5 * MIB}))
    assert not steps.expected, "it is planned for"


def test_after_many_profiles_in_vain_the_search_ends_with_a_warning() -> None:
    steps = UnplannedSteps()
    steps.look_back(applied(**{"net.2:0": 5 * MIB}))
    for _ in range(7):
        assert not steps.found_in(seen("net.0:0"))
    with pytest.warns(UserWarning, match=r"5\.0 MiB that a step kept was in none of the 8 steps after it"):
        steps.found_in(seen("net.0:0"))
    assert not steps.expected
