"""Places at which values are dropped, counted on chains of made-up layers."""

from dataclasses import replace

import pytest

from lightning_dpx.memory.profile.data import PlanOverhead
from lightning_dpx.memory.profile.drop_sites import count_places, made_again, seconds_of_places
from tests.memory.made_up import chain


@pytest.mark.parametrize(
    ("dropped", "num_places"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([4, 5, 6], 1, id="neighbors"),
        pytest.param([4, 6, 8], 1, id="one kept value does not part them"),
        pytest.param([4, 7, 10], 3, id="two kept values do"),
    ],
)
def test_dropped_values_with_few_kept_ones_between_them_are_one_place(dropped: list[int], num_places: int) -> None:
    assert count_places(chain(16), dropped) == num_places


def test_what_nobody_saves_is_made_again_on_the_way() -> None:
    profile = chain(8)
    values = list(profile.values)
    for index in (3, 4):
        values[index] = replace(values[index], name="", storage=-1)
    passing = replace(profile, values=tuple(values))
    assert made_again(passing, [5]) == {3, 4, 5}
    assert made_again(passing, [2]) == {2}


def test_a_place_counts_beyond_the_share_that_the_values_seconds_hold() -> None:
    profile = replace(chain(16), overhead=PlanOverhead(per_place=2.0, usual_places=0.5))
    assert seconds_of_places(profile, [4, 7, 10]) == 2.0 * (3 - 0.5 * 3)
    assert seconds_of_places(profile, [4, 5, 6]) == 2.0 * (1 - 0.5 * 3)
    assert seconds_of_places(chain(16), [4, 7, 10]) == 0.0


def test_values_without_seconds_hold_no_share_that_could_be_taken_off() -> None:
    profile = replace(chain(16), overhead=PlanOverhead(per_place=2.0, usual_places=0.5))
    values = list(profile.values)
    for index in (4, 5):
        values[index] = replace(values[index], seconds=0.0)
    values[6] = replace(values[6], call="6")
    profile = replace(profile, values=tuple(values))
    assert seconds_of_places(profile, [4, 5]) == 2.0
    assert seconds_of_places(profile, [4, 5, 6, 7]) == 2.0 * (1 - 0.5)
