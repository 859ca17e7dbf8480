"""Dynamic programming over stretches, on chains of made-up layers of one MiB and one second each."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_dpx.memory.plan.problem import Problem
from lightning_dpx.memory.plan.solvers.stretches import StretchTable, Variant, variants
from lightning_dpx.memory.profile.data import Profile
from tests.memory.made_up import SIZE, chain


def _variant(problem: Problem) -> Variant:
    """The one in which all may be dropped, and nothing goes after every use."""
    return variants(problem)[0]


def _kept(problem: Problem, dropped: frozenset[int]) -> list[int]:
    return sorted(set(range(len(problem.units))) - dropped)


def _with_seconds(profile: Profile, seconds: dict[int, float]) -> Profile:
    values = list(profile.values)
    for index, each in seconds.items():
        values[index] = replace(values[index], seconds=each)
    return replace(profile, values=tuple(values))


class TestSolve:
    def test_all_is_kept_where_all_fits(self) -> None:
        choice = StretchTable(_variant(Problem(chain(16)))).solve(18 * SIZE)
        assert choice is not None
        assert not choice.dropped

    def test_nothing_fits_below_a_layer_and_what_stays_around_it(self) -> None:
        assert StretchTable(_variant(Problem(chain(16)))).solve(2 * SIZE) is None

    @pytest.mark.parametrize("num_layers", [8, 10, 12, 14])
    def test_no_layer_more_is_dropped_than_the_estimate_asks_for(self, num_layers: int) -> None:
        # One layer beside the stretch is in use while it comes back: dropping the first ones is enough.
        problem = Problem(chain(16))
        choice = StretchTable(_variant(problem)).solve((num_layers + 2) * SIZE)
        assert choice is not None
        result = problem.forecast(choice)
        assert result.peak == num_layers * SIZE
        assert result.seconds == 16 - num_layers

    def test_earlier_stretches_are_longer(self) -> None:
        # By the time that backward gets to them, what later ones have kept is gone.
        problem = Problem(chain(16))
        choice = StretchTable(_variant(problem)).solve(7 * SIZE)
        assert choice is not None
        kept = _kept(problem, choice.dropped)
        assert kept == [6, 12, 13, 14, 15]
        assert problem.forecast(choice).peak <= 7 * SIZE

    def test_units_that_the_variant_pins_stay(self) -> None:
        problem = Problem(chain(16))
        free = _variant(problem)
        droppable = free.droppable.copy()
        droppable[:4] = False
        choice = StretchTable(replace(free, droppable=droppable)).solve(12 * SIZE)
        assert choice is not None
        assert not choice.dropped & {0, 1, 2, 3}
        assert choice.dropped

    def test_costly_layers_are_kept_before_cheap_ones(self) -> None:
        costly = {2: 50.0, 5: 50.0, 9: 50.0}
        problem = Problem(_with_seconds(chain(16), costly))
        choice = StretchTable(_variant(problem)).solve(10 * SIZE)
        assert choice is not None
        assert not choice.dropped & costly.keys()


class TestVariants:
    def test_cheap_units_may_go_after_every_use_but_never_two_in_a_row(self) -> None:
        # Computed from each other, the work would double at every step.
        cheap = dict.fromkeys((3, 4, 5, 9), 0.1)
        with_uncached = variants(Problem(_with_seconds(chain(16), cheap)))[1]
        assert np.nonzero(with_uncached.uncached)[0].tolist() == [3, 5, 9]

    def test_the_choice_says_which_of_the_dropped_ones_do(self) -> None:
        problem = Problem(_with_seconds(chain(16), {3: 0.1, 9: 0.1}))
        choice = StretchTable(variants(problem)[1]).solve(9 * SIZE)
        assert choice is not None
        assert choice.uncached == choice.dropped & {3, 9}
        assert choice.uncached

    def test_units_that_are_computed_from_far_away_are_pinned_in_a_variant_of_their_own(self) -> None:
        profile = chain(16)
        values = list(profile.values)
        values[10] = replace(values[10], inputs=(1, 3, 5, 7, 9))
        far = replace(profile, values=tuple(values))
        assert [bool(variant.droppable[10]) for variant in variants(Problem(far))] == [True, False]
        with_cheap = variants(Problem(_with_seconds(far, {3: 0.1})))
        assert [bool(variant.droppable[10]) for variant in with_cheap] == [True, True, False, False]
        assert [bool(variant.uncached[3]) for variant in with_cheap] == [False, True, False, True]

    def test_no_problem_is_solved_twice(self) -> None:
        assert len(variants(Problem(chain(16)))) == 1
