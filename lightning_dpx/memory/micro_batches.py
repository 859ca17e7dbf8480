"""The plan of a step that may be cut into micro-batches: profiled on few sizes, chosen, and profiled as it will run.

whole step --fits?--> one piece, nothing planned
    |
a half and a quarter of the rows --choose_micro_batches--> a number --profile of its rows--> the plan
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from lightning_dpx.arguments import is_whole_number
from lightning_dpx.errors import BudgetError, ConfigurationError, PlanError
from lightning_dpx.memory.plan.micro_batches import (
    BesideActivations,
    Candidate,
    MicroBatchChoice,
    ProfilesByRows,
    candidate_of,
    candidates_of,
    choose_micro_batches,
    in_micro_batches,
    largest_rows,
    sizes_of_parts,
)
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.profile.data import Profile

MicroBatchNumber = int | Literal["auto"]
ProfileOf = Callable[[int, bool], Profile]  # of so many rows, and whether gradients are added to earlier ones
PlanOf = Callable[[Profile, int | None], MemoryPlan]  # within so many bytes of activations
_NOTHING = BesideActivations()


class TooFewRowsError(PlanError):
    """A step that runs on all rows does not on so few."""


def parse_micro_batch_number(micro_batches: object) -> MicroBatchNumber:
    """Into how many micro-batches a step is cut.

    Raises:
        ConfigurationError: neither a positive integer nor ``"auto"``.
    """
    if micro_batches == "auto":
        return "auto"
    if is_whole_number(micro_batches) and micro_batches >= 1:
        return int(micro_batches)
    raise ConfigurationError(
        f'micro_batches={micro_batches!r} is not allowed; give a positive number of micro-batches, or "auto".'
    )


def plan_fixed_micro_batches(
    number: int,
    rows: int,
    profile_of: ProfileOf,
    plan_of: PlanOf,
    budget: int | None,
    *,
    seconds_each: float = 0.0,
) -> MemoryPlan:
    """The plan of a step that is cut into ``number`` micro-batches, or as many as it has rows.

    Args:
        number: M, the micro-batches.
        rows: Of the whole step.
        profile_of: Profiles a step.
        plan_of: Plans a profile.
        budget: Bytes of activations that are allowed; as few as can be unless given.
        seconds_each: What running one micro-batch costs beside its step.

    Raises:
        BudgetError: the budget cannot be met.
    """
    number = min(number, rows)  # none is empty
    if number == 1:
        return plan_of(profile_of(rows, False), budget)
    # Rows are dealt out as evenly as they can be: some micro-batches have one more than the
    # others.
    parts = {size: profile_of(size, True) for size in sizes_of_parts(rows, number)}
    profiles = ProfilesByRows(profile_of(rows, False), rows, parts, seconds_each)
    candidate = candidate_of(profiles, number, budget)
    plan = plan_of(candidate.profile, budget)
    return _with_figures(plan, profiles.whole, candidate, candidate.seconds_with(plan))


class _PlansByNumber:
    """Plans, and refusals, of candidates: the choice is made anew after every new profile, and asks for most again.

    Args:
        plan_of: Plans a profile.
        beside: What micro-batches need beside their activations.
    """

    def __init__(self, plan_of: PlanOf, beside: BesideActivations) -> None:
        self._plan_of = plan_of
        self._beside = beside
        self._known = dict[int, MemoryPlan | BudgetError]()

    def __call__(self, candidate: Candidate) -> MemoryPlan:
        """The plan of a candidate.

        Raises:
            BudgetError: its budget cannot be met.
        """
        number = candidate.number
        if number not in self._known:
            try:
                budget = candidate.budget
                # A planner's is positive; as little as a byte is too little as well.
                self._known[number] = self._plan_of(candidate.profile, None if budget is None else max(1, budget))
            except BudgetError as error:
                self._known[number] = _in_all(error, candidate, self._beside)
        found = self._known[number]
        if isinstance(found, BudgetError):
            raise found
        return found

    def forget(self, number: int) -> None:
        """Another profile of this number of micro-batches is known now."""
        del self._known[number]


def plan_in_micro_batches(
    rows: int,
    profile_of: ProfileOf,
    plan_of: PlanOf,
    budget: int,
    whole: Profile | None = None,
    *,
    seconds_each: float = 0.0,
    beside: BesideActivations = _NOTHING,
    margin: float = 0.0,
    runs_twice: bool = False,
) -> tuple[MemoryPlan, MicroBatchChoice]:
    """The number of micro-batches that is fastest within the budget, and their plan.

    Args:
        rows: Of the whole step.
        profile_of: Profiles a step.
        plan_of: Plans a profile.
        budget: Bytes of activations that are allowed.
        whole: The profile of the step in one piece, if it is known.
        seconds_each: What running one micro-batch costs beside its step.
        beside: What micro-batches need beside their activations, and a step in one piece does not.
        margin: A step in one piece may take this share longer than the fastest, and is taken all the same.
        runs_twice: Whether every micro-batch runs forward once more, without a graph, as a loss over all rows needs it.

    Returns:
        The plan, whose figures are those of all micro-batches together beside the step in one piece; and what was
        considered.

    Raises:
        BudgetError: the budget cannot be met, whatever the number.
    """
    whole = whole or profile_of(rows, False)
    parts: dict[int, Profile] = {}
    most = rows
    # Two sizes make the lines on which all others are. A step that fits needs none of this.
    if rows > 1 and whole.peak > budget:
        for number in (2, 4):
            if number <= most:
                most = min(most, _add_part(parts, rows, number, profile_of))
    profiles = ProfilesByRows(whole, rows, parts, seconds_each, runs_twice=runs_twice)

    def budget_of(number: int) -> int:
        return budget - beside.of(number)

    candidates = candidates_of(profiles, budget_of, most)
    plans = _PlansByNumber(plan_of, beside)
    # Every round ends here, adds a size that was run, or leaves fewer numbers; there are no more of either than rows.
    while True:
        try:
            choice = choose_micro_batches(candidates, plans, margin=margin)
            chosen = choice.candidate
        except BudgetError:
            smallest = largest_rows(rows, most)
            if most == 1 or profiles.knows(smallest) or not parts:
                raise
            # Sizes that were not run are on lines, and nothing is refused for a guess: so the smallest is run as well.
            chosen = candidate_of(profiles, most, None)
            choice = None
        if choice is not None and (chosen.number == 1 or profiles.knows(chosen.rows)):
            return _with_figures(choice.plan, whole, chosen, choice.seconds, choice.least), choice
        # What is between two sizes was a guess: it is profiled as it will run, and what does not fit then is out.
        possible = _add_part(parts, rows, chosen.number, profile_of)
        profiles = ProfilesByRows(whole, rows, parts, seconds_each, runs_twice=runs_twice)
        if choice is None or possible < most:
            most = min(most, possible)
            candidates = candidates_of(profiles, budget_of, most)
            plans = _PlansByNumber(plan_of, beside)
            continue
        exact = candidate_of(profiles, chosen.number, chosen.budget)
        candidates = [exact if other.number == chosen.number else other for other in candidates]
        # The first that needs no plan is the last of them, and this one was taken for it.
        if exact.number == candidates[-1].number and not exact.fits:
            further = candidates_of(profiles, budget_of, most)
            candidates += [other for other in further if other.number > exact.number]
        # Its plan was for the guess.
        plans.forget(chosen.number)


def _add_part(parts: dict[int, Profile], rows: int, number: int, profile_of: ProfileOf) -> int:
    """Profiles the largest of ``number`` micro-batches, and tells how many are possible as far as that shows."""
    size = largest_rows(rows, number)
    try:
        parts[size] = profile_of(size, True)
        # What fails on few rows does so on a single one, and the smallest micro-batch may have one row less.
        if rows // number == 1 < size:
            parts[1] = profile_of(1, True)
    except TooFewRowsError:
        few = 1 if size in parts else size
        return max(1, rows // (few + 1))
    return rows


def _in_all(error: BudgetError, candidate: Candidate, beside: BesideActivations) -> BudgetError:
    """The refusal of micro-batches, with what they need beside their activations."""
    if candidate.number == 1 or error.smallest is None:
        return error
    plural = "" if candidate.rows == 1 else "s"
    where = f"In {candidate.number} micro-batches of {candidate.rows} row{plural}"
    needed = beside.of(candidate.number)
    if needed:
        where += f", beside {beside.describe(candidate.number)}"
    return BudgetError(f"{where}: {error.message}", error.smallest + needed, error.device_index)


def _with_figures(
    plan: MemoryPlan, whole: Profile, candidate: Candidate, seconds: float, least: float | None = None
) -> MemoryPlan:
    """The plan with what all micro-batches cost together."""
    if candidate.number == 1:
        return plan
    usual = whole.step_seconds
    # Shares are of the step in one piece, so that they can be compared with those of plans that
    # cut nothing.
    least_share = None if least is None else least / usual
    found = in_micro_batches(plan, candidate.number, candidate.rows, seconds / usual, least_share)
    # What a cut spares is seen beside the step in one piece, and not beside one micro-batch.
    return replace(found, unplanned_peak=whole.peak)
