"""The number of micro-batches and their plan are chosen together, by the seconds of both."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

import lightning_dpx as dpx
from lightning_dpx.memory import BesideActivations, Profile, plan_in_micro_batches, plan_profile, scaled
from lightning_dpx.memory.plan.micro_batches import (
    Candidate,
    ProfilesByRows,
    candidates_of,
    choose_micro_batches,
    numbers_worth_trying,
)
from lightning_dpx.memory.plan.plan import MemoryPlan
from tests.memory.chains import chain_profile

ROWS = 24
WHOLE = replace(chain_profile("equal", 12), step_seconds=400.0)


class Chain:
    """What the plans are made for, as far as plans know it."""

    def named_parameters(self) -> list[tuple[str, object]]:
        return []

    def named_modules(self) -> list[tuple[str, object]]:
        return []


def part(rows: int, fixed: float) -> Profile:
    """A micro-batch: everything in proportion to its rows, and ``fixed`` seconds in any case."""
    profile = scaled(WHOLE, rows / ROWS)
    return replace(profile, step_seconds=profile.step_seconds + fixed, scale=1.0)


def profiles(fixed: float) -> ProfilesByRows:
    return ProfilesByRows(replace(WHOLE, step_seconds=400.0 + fixed), ROWS, {12: part(12, fixed), 6: part(6, fixed)})


def planned(candidate: Candidate) -> MemoryPlan:
    return plan_profile(Chain(), candidate.profile, candidate.budget, "optimal")


def budget(share: float) -> Callable[[int], int]:
    return lambda _number: int(share * WHOLE.peak)


def test_numbers_that_only_make_small_micro_batches_smaller_are_not_tried() -> None:
    assert numbers_worth_trying(24) == [1, 2, 3, 4, 5, 6, 8, 12, 24]
    assert numbers_worth_trying(13) == [1, 2, 3, 4, 5, 7, 13]
    assert numbers_worth_trying(24, 4) == [1, 2, 3, 4]
    assert numbers_worth_trying(1) == [1]


def test_sizes_between_those_that_were_run_are_on_a_line() -> None:
    found = profiles(10.0)
    for rows in (2, 6, 8, 12):
        assert found.of_part(rows).step_seconds == pytest.approx(400 * rows / ROWS + 10)
        assert found.of_part(rows).peak == pytest.approx(WHOLE.peak * rows / ROWS, abs=2)


def test_a_step_whose_rows_do_not_divide_takes_the_time_of_both_sizes() -> None:
    five = next(one for one in candidates_of(profiles(10.0), budget(0.21)) if one.number == 5)
    assert five.rows == 5
    assert five.seconds == pytest.approx(400 + 5 * 10)


def test_where_micro_batches_cost_nothing_they_replace_the_plan() -> None:
    numbers = []

    def noted(candidate: Candidate) -> MemoryPlan:
        numbers.append(candidate.number)
        return planned(candidate)

    choice = choose_micro_batches(candidates_of(profiles(0.0), budget(0.34)), noted)
    assert choice.candidate.number == 3
    assert choice.plan.keeps_all
    assert choice.seconds == pytest.approx(400)
    assert numbers == [3], "nothing else was planned"


def test_where_they_cost_much_the_plan_replaces_them() -> None:
    choice = choose_micro_batches(candidates_of(profiles(1000.0), budget(0.5)), planned)
    assert choice.candidate.number == 1
    assert not choice.plan.keeps_all


@pytest.mark.parametrize("fixed", [2.0, 8.0, 20.0, 60.0])
@pytest.mark.parametrize("share", [0.5, 0.3, 0.2])
def test_the_choice_is_the_best_of_all_numbers(fixed: float, share: float) -> None:
    candidates = candidates_of(profiles(fixed), budget(share))
    choice = choose_micro_batches(candidates, planned)
    best = inf
    for candidate in candidates:
        try:
            best = min(best, candidate.seconds_with(planned(candidate)))
        except dpx.BudgetError:
            continue
    assert choice.seconds == pytest.approx(best)
    assert choice.least <= best


def test_a_mix_is_found_where_it_is_below_both() -> None:
    candidates = candidates_of(profiles(20.0), budget(0.2))
    choice = choose_micro_batches(candidates, planned)
    alone = candidates[0].seconds_with(planned(candidates[0])) if candidates[0].least < inf else inf
    without = next(candidate.seconds for candidate in candidates if candidate.fits)
    assert choice.seconds < min(alone, without)
    assert 1 < choice.candidate.number < 6
    assert not choice.plan.keeps_all


def test_gradients_that_are_there_during_forwards_are_room_that_is_not() -> None:
    candidates = candidates_of(profiles(0.0), lambda number: int((0.34 if number == 1 else 0.26) * WHOLE.peak))
    assert choose_micro_batches(candidates, planned).candidate.number == 4


def test_a_budget_that_no_number_meets_is_refused_with_the_least_that_one_could() -> None:
    with pytest.raises(dpx.BudgetError) as caught:
        choose_micro_batches(candidates_of(profiles(0.0), lambda _number: 10), planned)
    alone = plan_profile(Chain(), part(1, 0.0), None, "optimal")
    assert caught.value.smallest == alone.peak


def test_of_many_hopeless_numbers_the_one_that_needs_least_is_asked_how_much() -> None:
    asked = []

    def plan(candidate: Candidate) -> MemoryPlan:
        asked.append(candidate.number)
        return planned(candidate)

    with pytest.raises(dpx.BudgetError) as refused:
        choose_micro_batches(candidates_of(profiles(0.0), lambda _number: 10), plan)
    assert len(asked) <= 2
    assert asked[-1] == ROWS
    with pytest.raises(dpx.BudgetError) as least:
        planned(candidates_of(profiles(0.0), lambda _number: 10)[-1])
    assert refused.value.smallest == least.value.smallest


def keep_all(profile: Profile, limit: int | None) -> MemoryPlan:
    """Only what fits as it is."""
    if limit is not None and profile.peak > limit:
        raise dpx.BudgetError("It computes nothing again.", smallest=profile.peak)
    return plan_profile(Chain(), profile, None, "optimal")


def test_a_size_that_takes_more_than_was_guessed_is_followed_by_smaller_ones() -> None:
    """What lies between two sizes was guessed, and a kernel may take another way on few rows."""
    tried: list[int] = []

    def profile_of(rows: int, /, *, accumulates: bool) -> Profile:
        tried.append(rows)
        steps_more = 6 if rows == 4 else rows
        return part(steps_more, 0.0)

    room = int(4.5 / ROWS * WHOLE.peak)
    plan, choice = plan_in_micro_batches(ROWS, profile_of, keep_all, room)
    assert tried == [24, 12, 6, 4, 1, 3]
    assert (choice.candidate.rows, plan.micro_batches) == (3, 8)


def test_nothing_is_refused_before_single_rows_are_looked_at() -> None:
    """The last size that a guess said to fit takes more, and so do all that are larger."""

    def profile_of(rows: int, /, *, accumulates: bool) -> Profile:
        return part(rows if rows == 1 else max(5, rows), 0.0)

    _plan, choice = plan_in_micro_batches(ROWS, profile_of, keep_all, int(3.5 / ROWS * WHOLE.peak))
    assert choice.candidate.rows == 1


def test_a_refusal_counts_what_micro_batches_leave_beside_them() -> None:
    aside = WHOLE.peak // 2
    beside = BesideActivations(gradients=aside)
    with pytest.raises(dpx.BudgetError, match=r"In \d+ micro-batches of \d+ rows?, beside .* of gradients") as refused:
        plan_in_micro_batches(ROWS, lambda rows, accumulates: part(rows, 0.0), keep_all, aside + 1, beside=beside)
    assert refused.value.smallest is not None
    assert refused.value.smallest > aside + 1


def test_every_micro_batch_has_its_buffers_beside_its_activations() -> None:
    each = WHOLE.peak // 32

    def choice_within(budget: int) -> int:
        beside = BesideActivations(buffers=each)
        found = plan_in_micro_batches(ROWS, lambda rows, accumulates: part(rows, 0.0), keep_all, budget, beside=beside)
        return found[1].candidate.number

    number = choice_within(WHOLE.peak // 2)
    assert WHOLE.peak // number + number * each <= WHOLE.peak // 2
    with pytest.raises(dpx.BudgetError, match=r"beside .* of buffers, which each has its own copies of") as refused:
        choice_within(WHOLE.peak // 8)
    least = refused.value.smallest
    assert least is not None
    choice_within(least)  # what it names will do


def test_buffers_that_are_kept_anyway_count_once_less() -> None:
    """One micro-batch has those of the module; what they were before a step, several devices keep in any case."""
    assert BesideActivations(buffers=8).of(4) == 8 * 4
    assert BesideActivations(buffers=8, keeps_buffers=False).of(4) == 8 * 3
    assert BesideActivations(gradients=5, buffers=8, keeps_buffers=False).of(1) == 0


def test_one_piece_is_taken_where_it_takes_nearly_as_long() -> None:
    candidates = candidates_of(profiles(8.0), budget(0.5))
    fastest = choose_micro_batches(candidates, planned)
    alone = candidates[0].seconds_with(planned(candidates[0]))
    assert fastest.candidate.number > 1
    difference = alone / fastest.seconds - 1
    assert choose_micro_batches(candidates, planned, margin=0.9 * difference).candidate.number > 1
    chosen = choose_micro_batches(candidates, planned, margin=1.1 * difference)
    assert chosen.candidate.number == 1
    assert chosen.seconds == pytest.approx(alone)
