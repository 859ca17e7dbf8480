"""Figures that follow from a profile's numbers."""

import pytest

from lightning_dpx.memory.profile.data import Profile, SavedCall, most_with, outermost
from tests.memory.made_up import SIZE, chain


def call(name: str, parent: int) -> SavedCall:
    return SavedCall(name, "Block", parent, 0, 1, 0, 1.0, 0, (), 0, (), (), 0)


def test_the_peak_is_that_of_the_curve() -> None:
    assert chain(5).peak == 5 * SIZE
    assert Profile((), (), (), (), 0, 1.0).peak == 0


@pytest.mark.parametrize(
    ("wanted", "most"), [([], 10), ([(1, 4)], 12), ([(2, 4)], 11), ([(1, 4), (2, 4)], 15), ([(3, 100)], 10)]
)
def test_what_is_wanted_of_a_call_stays_through_all_later_stretches(wanted: list[tuple[int, int]], most: int) -> None:
    assert most_with((10, 8, 7), wanted) == most


def test_calls_within_another_chosen_call_do_not_count() -> None:
    calls = [call("a", -1), call("a.b", 0), call("a.b.c", 1), call("d", -1)]
    assert outermost(calls, {"a", "a.b.c", "d"}) == {0, 3}
    assert outermost(calls, {"a.b.c"}) == {2}
