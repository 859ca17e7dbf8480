"""The number of micro-batches and their plan are chosen together, by the seconds of both."""

from collections.abc import Callable, Container
from dataclasses import replace
from math import inf

import pytest

import lightning_dpx as dpx
from lightning_dpx.memory import BesideActivations, Profile, plan_in_micro_batches, plan_profile, scaled
from lightning_dpx.memory.micro_batch_planning import TooFewRowsError
from lightning_dpx.memory.plan.micro_batch_candidates import (
    Candidate,
    MicroBatchProfiles,
    candidates_of,
    choose_micro_batches,
    numbers_worth_trying,
)
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.profile.data import IsWorth
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


def profiles(fixed: float) -> MicroBatchProfiles:
    return MicroBatchProfiles(
        replace(WHOLE, step_seconds=400.0 + fixed), ROWS, {12: part(12, fixed), 6: part(6, fixed)}
    )


def planned(candidate: Candidate) -> MemoryPlan:
    return plan_profile(Chain(), candidate.profile, candidate.budget, "optimal")


def optimal(profile: Profile, limit: int | None) -> MemoryPlan:
    return plan_profile(Chain(), profile, limit, "optimal")


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
    assert tried == [24, 4, 2, 3]
    assert (choice.candidate.rows, plan.micro_batches) == (3, 8)


def measured(room: int, fixed: float = 0.0, **options: float) -> tuple[list[int], int]:
    """The rows of the steps that are profiled for a choice, in order; and the number that is chosen."""
    tried: list[int] = []

    def profile_of(rows: int, /, *, accumulates: bool) -> Profile:
        tried.append(rows)
        return part(rows, fixed)

    _plan, choice = plan_in_micro_batches(ROWS, profile_of, optimal, room, **options)
    return tried, choice.candidate.number


def test_two_steps_are_profiled_where_the_first_guess_fits() -> None:
    assert measured(WHOLE.peak // 2) == ([24, 12], 2)
    assert measured(WHOLE.peak // 4) == ([24, 6], 4)


def test_no_part_is_profiled_of_a_step_that_fits() -> None:
    assert measured(WHOLE.peak) == ([24], 1)


def test_no_plan_of_one_piece_is_searched_for_that_the_bound_tells_to_cost_more() -> None:
    planned_rows: list[float] = []

    def plan_of(profile: Profile, limit: int | None) -> MemoryPlan:
        planned_rows.append(profile.step_seconds)
        return optimal(profile, limit)

    plan_in_micro_batches(ROWS, lambda rows, accumulates: part(rows, 0.0), plan_of, WHOLE.peak // 4, margin=0.02)
    assert WHOLE.step_seconds not in planned_rows


def halves(seconds: float, room: int) -> tuple[list[str], int]:
    """What is found out of two micro-batches that take so long together, and the number that is chosen."""
    told: list[str] = []
    half = replace(part(12, 0.0), step_seconds=seconds / 2)

    def profile_of(rows: int, /, *, accumulates: bool) -> Profile:
        told.append(f"profiled {rows}")
        return {24: WHOLE, 12: half}.get(rows) or part(rows, 0.0)

    def profile_if(rows: int, is_worth: IsWorth) -> Profile | None:
        told.append(f"timed {rows}")
        if is_worth(half.step_seconds):
            return profile_of(rows, accumulates=True)
        return None

    _plan, choice = plan_in_micro_batches(ROWS, profile_of, optimal, room, margin=0.02, profile_if=profile_if)
    return told, choice.candidate.number


def test_halves_that_are_slower_than_a_plan_of_one_piece_are_timed_and_no_more() -> None:
    room = WHOLE.peak // 2
    again = optimal(WHOLE, room).recompute_share or 0.0
    limit = WHOLE.step_seconds * (1.0 + again) / 1.02
    assert halves(limit + 1.0, room) == (["profiled 24", "timed 12"], 1)
    assert halves(limit - 1.0, room) == (["profiled 24", "timed 12", "profiled 12"], 2)


def test_halves_that_are_faster_than_one_piece_are_found_where_its_plan_costs_next_to_nothing() -> None:
    """As where fewer rows stay in the processor's caches: a convolutional net took 0.8 of its time in two parts."""
    room = int(0.99 * WHOLE.peak)
    assert halves(0.8 * WHOLE.step_seconds, room) == (["profiled 24", "timed 12", "profiled 12"], 2)


def test_parts_are_profiled_at_once_where_a_plan_of_fewer_may_be_faster() -> None:
    """Four that are too slow say nothing of three with a plan."""
    assert halves(400.0, WHOLE.peak // 4)[0][:2] == ["profiled 24", "profiled 6"]


def runs_on(rows: Container[int]) -> Callable[..., Profile]:
    """Profiles a step that fails on other numbers of rows."""

    def profile_of(count: int, /, *, accumulates: bool) -> Profile:
        if count not in rows:
            raise TooFewRowsError(f"{count} rows are too few")
        return part(count, 0.0)

    return profile_of


def test_where_the_first_guess_has_too_few_rows_larger_ones_are_planned() -> None:
    """Four rows fit, if something is computed again, and three would fit as they are."""
    room = int(3.5 / ROWS * WHOLE.peak)
    plan, choice = plan_in_micro_batches(ROWS, runs_on(range(4, ROWS + 1)), optimal, room)
    assert (plan.micro_batches, choice.candidate.rows) == (6, 4)
    assert plan.num_recomputed


def test_a_number_of_rows_that_does_not_suit_the_step_rules_out_no_smaller_one() -> None:
    """As of rows that are taken in pairs: the first guess is three, and two run."""
    room = int(3.5 / ROWS * WHOLE.peak)
    of_eight = scaled(WHOLE, 8 / ROWS)
    plan, choice = plan_in_micro_batches(8, runs_on(range(2, ROWS, 2)), keep_all, room, of_eight)
    assert (plan.micro_batches, choice.candidate.rows) == (4, 2)


def test_fewer_parts_of_one_size_with_a_cheap_plan_are_looked_at() -> None:
    """Five micro-batches fit; four take less, which shows only where they have run."""
    tried: list[int] = []

    def profile_of(rows: int, /, *, accumulates: bool) -> Profile:
        tried.append(rows)
        found = part(rows, 0.0)
        if rows == 6:
            return replace(found, step_seconds=0.9 * found.step_seconds)
        return found

    _plan, choice = plan_in_micro_batches(ROWS, profile_of, optimal, int(0.23 * WHOLE.peak), margin=0.15)
    assert tried == [24, 5, 6]
    assert choice.candidate.number == 4


def test_what_does_not_grow_with_the_rows_shows_in_one_part_beside_the_whole() -> None:
    fixed = WHOLE.peak // 4

    def with_fixed(rows: int) -> Profile:
        found = part(rows, 30.0)
        return replace(found, curve=tuple(size + fixed for size in found.curve), adding=())

    known = MicroBatchProfiles(with_fixed(ROWS), ROWS, {6: with_fixed(6)})
    for rows in (2, 3, 8, 12):
        guess = known.of_part(rows)
        assert guess.peak == pytest.approx(with_fixed(rows).peak, rel=1e-3)
        assert guess.step_seconds == pytest.approx(with_fixed(rows).step_seconds)


def test_nothing_is_refused_before_single_rows_are_looked_at() -> None:
    """The last size that a guess said to fit takes more, and so do all that are larger."""

    def profile_of(rows: int, /, *, accumulates: bool) -> Profile:
        return part(rows if rows == 1 else max(5, rows), 0.0)

    _plan, choice = plan_in_micro_batches(ROWS, profile_of, keep_all, int(3.5 / ROWS * WHOLE.peak))
    assert choice.candidate.rows == 1


def test_nothing_is_refused_before_the_easiest_number_is_looked_at() -> None:
    """Each part has buffers of its own, so that two of them fit and no more; and half the rows take less than half."""

    def profile_of(rows: int, /, *, accumulates: bool) -> Profile:
        found = part(rows, 0.0)
        return found if rows == ROWS else replace(found, curve=tuple(int(0.9 * size) for size in found.curve))

    beside = BesideActivations(buffers=WHOLE.peak // 4)
    room = beside.of(2) + int(0.46 * WHOLE.peak)
    _plan, choice = plan_in_micro_batches(ROWS, profile_of, keep_all, room, beside=beside)
    assert choice.candidate.number == 2


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


def test_all_micro_batches_but_the_first_have_copies_of_tensors_in_attributes() -> None:
    beside = BesideActivations(attributes=8)
    assert [beside.of(number) for number in (1, 2, 4)] == [0, 8, 24]
    assert "24 bytes of copies of tensors in attributes" in beside.describe(4)


def test_what_steps_leave_is_copied_for_all_micro_batches_but_the_first() -> None:
    beside = BesideActivations(left_behind=800)
    assert [beside.of(number) for number in (1, 2, 4)] == [0, 400, 600]
    assert "600 bytes of copies" in beside.describe(4)


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
