"""The plan of a step that may be cut into micro-batches: profiled on few sizes, chosen, and profiled as it will run.

whole step --fits?--> one piece, nothing planned
    |
as few rows as may fit --a half, and slower than the plan of one piece?--> one piece
    |
    --choose_micro_batches--> a number --profile of its rows, unless it was run--> the plan

Each profile runs the step several times, so none is made that cannot change what is chosen.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, Protocol

import torch

from lightning_dpx.arguments import is_whole_number
from lightning_dpx.errors import BudgetError, ConfigurationError, DPXError, PlanError
from lightning_dpx.memory.plan.micro_batch_candidates import (
    BesideActivations,
    Candidate,
    MicroBatchChoice,
    MicroBatchProfiles,
    candidate_of,
    candidates_of,
    choose_micro_batches,
    in_micro_batches,
    largest_rows,
    least_number,
    sizes_of_parts,
)
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.profile.data import IsWorth, Profile

MicroBatchNumber = int | Literal["auto"]
PlanOf = Callable[[Profile, int | None], MemoryPlan]  # within so many bytes of activations
ProfileIf = Callable[[int, IsWorth], Profile | None]  # of so many rows, with gradients added to earlier ones
_NOTHING = BesideActivations()
FEWER_PARTS = " On all rows it runs; give fewer micro-batches."  # the end of an error of too few rows


class ProfileOf(Protocol):
    """Profiles a step."""

    def __call__(self, rows: int, /, *, accumulates: bool) -> Profile:
        """The step on so many rows; ``accumulates`` tells whether its gradients are added to earlier ones."""


class TooFewRowsError(PlanError):
    """A step that runs on all rows fails on this few."""


@contextmanager
def told_as_too_few_rows(step: str, end: str = "") -> Iterator[None]:
    """Around a step on a part of its rows: what fails there is told as a lack of rows.

    Args:
        step: What it is, as the beginning of a sentence.
        end: Follows on what was raised.

    Raises:
        TooFewRowsError: it fails, but for errors of this package and of memory, by whose types callers tell them apart.
    """
    try:
        yield
    except (DPXError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise TooFewRowsError(f"{step} raises {type(error).__name__}: {error}{end}") from error


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
        return plan_of(profile_of(rows, accumulates=False), budget)
    # Rows are dealt out as evenly as they can be: some micro-batches have one more than the
    # others.
    parts = {size: profile_of(size, accumulates=True) for size in sizes_of_parts(rows, number)}
    profiles = MicroBatchProfiles(profile_of(rows, accumulates=False), rows, parts, seconds_each)
    candidate = candidate_of(profiles, number, budget)
    plan = plan_of(candidate.profile, budget)
    return _with_figures(plan, profiles.whole, candidate, candidate.seconds_with(plan))


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
    profile_if: ProfileIf | None = None,
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
        profile_if: Times a step of a micro-batch, and profiles it where that is found to be worth it.

    Returns:
        The plan, whose figures are those of all micro-batches together beside the step in one piece; and what was
        considered.

    Raises:
        BudgetError: the budget cannot be met, whatever the number.
    """
    whole = whole or profile_of(rows, accumulates=False)
    measured = _MeasuredSizes(whole, rows, profile_of, seconds_each, runs_twice=runs_twice, profile_if=profile_if)
    return _NumberSearch(measured, plan_of, budget, beside, margin).run()


class _MeasuredSizes:
    """The sizes of micro-batches that were run; all others are on lines between them.

    Args:
        whole: The profile of the step in one piece.
        rows: Of that step.
        profile_of: Profiles a step.
        seconds_each: What running one micro-batch costs beside its step.
        runs_twice: Whether every micro-batch runs forward once more.
        profile_if: Profiles a step where its time is worth it.

    Attributes:
        whole: The profile of the step in one piece.
        rows: Of that step.
        failed: Numbers of rows on which a step was tried in vain.
    """

    def __init__(
        self,
        whole: Profile,
        rows: int,
        profile_of: ProfileOf,
        seconds_each: float,
        *,
        runs_twice: bool,
        profile_if: ProfileIf | None,
    ) -> None:
        self.whole = whole
        self.rows = rows
        self._profile_of = profile_of
        self._seconds_each = seconds_each
        self._runs_twice = runs_twice
        self._profile_if = profile_if
        self._parts: dict[int, Profile] = {}
        self.failed: set[int] = set()

    @property
    def are_none(self) -> bool:
        """Whether only the step in one piece has been run."""
        return not self._parts

    @property
    def most(self) -> int:
        """Micro-batches that are possible, as far as that shows: what fails on few rows does so on fewer."""
        # But for what has run on fewer, as a step that takes its rows in pairs fails on three and runs on two.
        too_few = [size for size in self.failed if not any(known < size for known in self._parts)]
        return max(1, self.rows // (max(too_few, default=0) + 1))

    def profiles(self) -> MicroBatchProfiles:
        """Those of all sizes, as far as they are known now."""
        return MicroBatchProfiles(self.whole, self.rows, self._parts, self._seconds_each, runs_twice=self._runs_twice)

    def add(self, number: int) -> None:
        """Profiles the largest of ``number`` micro-batches, or notes that it fails."""
        size = largest_rows(self.rows, number)
        self._add_size(size)
        # What fails on few rows does so on a single one, and the smallest micro-batch may have one row less.
        if size in self._parts and self.rows // number == 1 < size:
            self._add_size(1)

    def add_halves(self, is_worth: IsWorth) -> bool:
        """Profiles the larger half, where ``is_worth`` says so of the seconds of both; tells whether it did."""
        size = largest_rows(self.rows, 2)
        if self._profile_if is None:
            self.add(2)
            return True
        again = self.whole.forward_seconds if self._runs_twice else 0.0
        try:
            found = self._profile_if(
                size, lambda seconds: is_worth(again + seconds * self.rows / size + 2 * self._seconds_each)
            )
        except TooFewRowsError:
            self.failed.add(size)
            return True
        if found is not None:
            self._parts[size] = found
        return found is not None

    def _add_size(self, size: int) -> None:
        if size in self._parts or size in self.failed:
            return
        try:
            self._parts[size] = self._profile_of(size, accumulates=True)
        except TooFewRowsError:
            self.failed.add(size)


class _NumberSearch:
    """The search for the number of micro-batches: chosen among guesses, and run until the chosen one is none.

    Args:
        measured: The sizes that were run.
        plan_of: Plans a profile.
        budget: Bytes of activations that are allowed.
        beside: What micro-batches need beside their activations.
        margin: The share that a step in one piece may take longer than the fastest.
    """

    def __init__(
        self, measured: _MeasuredSizes, plan_of: PlanOf, budget: int, beside: BesideActivations, margin: float
    ) -> None:
        self._measured = measured
        self._plan_of = plan_of
        self._budget = budget
        self._beside = beside
        self._margin = margin
        self._limit = measured.rows  # micro-batches that are worth a thought
        self._profiles = measured.profiles()
        self._candidates: list[Candidate] = []
        self._plans: dict[int, MemoryPlan | BudgetError] = {}  # by number; refusals as well
        self._planned_as_run: set[int] = set()  # numbers whose plans are for micro-batches that were run

    def run(self) -> tuple[MemoryPlan, MicroBatchChoice]:
        """The plan, and what was considered.

        Raises:
            BudgetError: the budget cannot be met, whatever the number.
        """
        # A step that fits needs none of this.
        if self._measured.rows == 1 or self._measured.whole.peak <= self._budget:
            self._limit = 1
        else:
            self._measure_first()
        self._consider_all()
        # Every round ends here, adds a size that was run, or leaves fewer numbers; there are no more of either than
        # rows.
        while True:
            choice = self._choice()
            if isinstance(choice, Candidate):
                self._measure(choice.number)
                continue
            chosen = choice.candidate
            # What is between two sizes was a guess: it is profiled as it will run, and what does not fit then is out.
            if chosen.number > 1 and not self._profiles.knows(chosen.rows):
                self._measure(chosen.number)
                continue
            as_fast = self._equal_and_as_fast(choice)
            if as_fast is None:
                return _with_figures(choice.plan, self._measured.whole, chosen, choice.seconds, choice.least), choice
            self._measure(as_fast.number)

    @property
    def _most(self) -> int:
        """Micro-batches at the most."""
        return min(self._limit, self._measured.most)

    def _measure_first(self) -> None:
        """Runs the largest micro-batch that may fit without a plan; what lies between it and the whole is on lines."""
        number = least_number(self._measured.whole, self._measured.rows, self._budget_of)
        # With halves that fit as they are there is nothing between them and the plan of one piece, and further cuts
        # take longer: one that is slower than that plan needs no more of a profile than its time.
        if number == 2 and not self._measured.add_halves(self._is_faster_than_one_piece):
            self._limit = 1
            return
        self._measure(number)
        if not self._measured.are_none:
            return
        # It fails on so few rows. A half and a quarter are most likely to run, of which lines lead to all others.
        for number in (2, 4):
            if number <= self._measured.rows:
                self._measure(number)

    def _is_faster_than_one_piece(self, seconds: float) -> bool:
        """Whether a cut step of so many seconds may be chosen beside one piece with its plan."""
        candidate = candidate_of(self._profiles, 1, self._budget)
        cut = seconds * (1.0 + self._margin)
        # The plan is searched for where the bound does not tell.
        if cut < candidate.least:
            return True
        try:
            plan = self._plan(candidate)
        except BudgetError:
            return True
        return cut < candidate.seconds_with(plan)

    def _equal_and_as_fast(self, choice: MicroBatchChoice) -> Candidate | None:
        """Fewer micro-batches of one size, where they were not run and take no longer, for all that is sure.

        Two sizes take turns at the allocator, and what one has left is of no use for the other: a step of small
        operators took 1.3 times its time in 5 or 6 parts of its 32 rows, and 1.1 in 4. No profile of a size shows that.
        """
        rows = self._measured.rows
        equal = [one for one in self._candidates if 1 < one.number < choice.candidate.number and not rows % one.number]
        if not rows % choice.candidate.number or not equal or self._profiles.knows(equal[-1].rows):
            return None
        guess = equal[-1]
        # Where the line is wrong, it may as well take as long as the one that was run.
        seconds = min(guess.seconds, choice.candidate.seconds)
        enough = choice.seconds * (1.0 + self._margin)
        if guess.least / guess.seconds * seconds > enough:
            return None
        try:
            plan = self._plan(guess)
        except BudgetError:
            return None
        if guess.seconds_with(plan) / guess.seconds * seconds > enough:
            return None
        return guess

    def _measure(self, number: int) -> None:
        """Runs a step of ``number`` micro-batches, and considers what that shows of all numbers."""
        self._measured.add(number)
        self._profiles = self._measured.profiles()
        self._consider_all()

    def _consider_all(self) -> None:
        """Begins anew with every number that may be best."""
        # With no part that has run there is nothing to tell of any other.
        most = 1 if self._measured.are_none else self._most
        self._candidates = candidates_of(self._profiles, self._budget_of, most, self._measured.failed)
        # Those of guesses were for other figures.
        for number in list(self._plans):
            if number > 1 and number not in self._planned_as_run:
                del self._plans[number]

    def _budget_of(self, number: int) -> int:
        return self._budget - self._beside.of(number)

    def _choice(self) -> MicroBatchChoice | Candidate:
        """The best of the candidates; where none fits, the guess that is to be run before anything is refused.

        Raises:
            BudgetError: none fits, and none of them is a guess.
        """
        try:
            return choose_micro_batches(self._candidates, self._plan, margin=self._margin)
        except BudgetError:
            easiest = self._easiest
            if easiest is None or self._profiles.knows(easiest.rows):
                raise
            return easiest

    @property
    def _easiest(self) -> Candidate | None:
        """The cut step that lacks least: that of fewest rows, unless each micro-batch has memory of its own beside."""
        cut = [candidate for candidate in self._candidates if candidate.number > 1]
        return min(cut, key=lambda one: one.profile.peak - (one.budget or 0), default=None)

    def _plan(self, candidate: Candidate) -> MemoryPlan:
        """The plan of a candidate: the choice is made anew after every new profile, and asks for most of them again.

        Raises:
            BudgetError: its budget cannot be met.
        """
        number = candidate.number
        if number not in self._plans:
            budget = candidate.budget
            if budget is not None:
                # A planner's is positive; as little as a byte is too little as well.
                budget = max(1, budget)
            try:
                self._plans[number] = self._plan_of(candidate.profile, budget)
            except BudgetError as error:
                self._plans[number] = _in_all(error, candidate, self._beside)
            if self._profiles.knows(candidate.rows):
                self._planned_as_run.add(number)
        found = self._plans[number]
        if isinstance(found, BudgetError):
            raise found
        return found


def _in_all(error: BudgetError, candidate: Candidate, beside: BesideActivations) -> BudgetError:
    """The budget error, with the memory that micro-batches need beside their activations added."""
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
