"""Into how many micro-batches a step is cut, and the plan that each of them follows: the fastest mix within a budget.

    profiles of the step on all of its rows, and on as few as may fit
        |  lines through two of them
    a candidate for every number of micro-batches: its largest one's profile, and the time of all
        |  planner x budget, the most promising first
    the candidate whose micro-batches, with their plan, take least time together

A micro-batch keeps activations of fewer rows, and costs what a step costs whatever its rows: launches, weights that are
read once more, gradients that are added. A plan costs what it computes again. Which is cheaper depends on the model and
on the device, so both are priced in seconds of the same profiles. Where recomputation is the better way at first and
micro-batches later, the best is in between.
"""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_dpx.errors import BudgetError
from lightning_dpx.memory.plan.budget_error import surely_needed
from lightning_dpx.memory.plan.lower_bound import lower_bound
from lightning_dpx.memory.plan.offload import ways_to_offload
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.plan.problem import Problem
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.other_outputs import beside_earlier_outputs
from lightning_dpx.memory.profile.scaling import extrapolate, scaled
from lightning_dpx.units import format_bytes

_FAR = 2  # times as many rows
_MOST_PLANS = 3  # that are searched, beside the candidate that needs none


@dataclass(frozen=True, slots=True)
class Candidate:
    """A step in so many micro-batches, before anything is planned.

    Attributes:
        number: M, the micro-batches.
        rows: Of the largest of them.
        profile: Of the largest of them.
        seconds: Of all of them, if nothing is computed again.
        least: The same for the fastest plan that the budget may allow.
        budget: Bytes of activations that one micro-batch may take; as few as can be unless given.
        again: Of the seconds, those of forwards without a graph that come before all others.
    """

    number: int
    rows: int
    profile: Profile
    seconds: float
    least: float
    budget: int | None
    again: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether nothing need be computed again."""
        return self.budget is not None and self.profile.peak <= self.budget

    def seconds_with(self, plan: MemoryPlan) -> float:
        """Seconds of all micro-batches with a plan."""
        return self.again + (self.seconds - self.again) * (1 + (plan.recompute_share or 0.0))


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """What is done, and how long it takes.

    Attributes:
        candidate: The one that was chosen.
        plan: What each of its micro-batches follows.
        seconds: Of the step in micro-batches, with the plan.
        least: Seconds that no plan goes below with any number of micro-batches.
        usual: Seconds of the step in one piece, if nothing is computed again.
    """

    candidate: Candidate
    plan: MemoryPlan
    seconds: float
    least: float
    usual: float

    @property
    def share(self) -> float:
        """The step's time over that of the step in one piece without a plan."""
        return self.seconds / self.usual

    @property
    def cut_share(self) -> float:
        """The same for its micro-batches without the plan, and without forwards that run again."""
        return (self.candidate.seconds - self.candidate.again) / self.usual


def in_micro_batches(plan: MemoryPlan, number: int, rows: int, share: float, least: float | None = None) -> MemoryPlan:
    """The plan of one micro-batch with what all of them take together.

    Args:
        plan: Of the largest.
        number: M, the micro-batches.
        rows: Of the largest.
        share: Seconds of all over those of the step in one piece.
        least: The same that no plan goes below, where it is known.
    """
    return replace(
        plan,
        recompute_share=max(0.0, share - 1),
        least_share=None if least is None else max(0.0, least - 1),
        micro_batches=number,
        micro_batch_rows=rows,
    )


class MicroBatchProfiles:
    """The profile of a step on any number of rows, from some that were run.

    Args:
        whole: The step on all rows, as it is in one piece.
        rows: How many those are.
        parts: Steps on fewer rows, whose gradients are added to those of the micro-batches before, by rows.
        seconds_each: What running one micro-batch costs beside its step.
        runs_twice: Whether every micro-batch runs forward once more, without a graph, before all others.
    """

    def __init__(
        self,
        whole: Profile,
        rows: int,
        parts: Mapping[int, Profile],
        seconds_each: float = 0.0,
        *,
        runs_twice: bool = False,
    ) -> None:
        self.rows = rows
        self.whole = whole
        self.seconds_each = seconds_each
        self.runs_twice = runs_twice
        self._parts = dict(sorted(parts.items()))

    def knows(self, rows: int) -> bool:
        """Whether micro-batches of so many rows were run."""
        return rows in self._parts

    def of_part(self, rows: int) -> Profile:
        """A micro-batch of so many rows."""
        if rows in self._parts:
            return self._parts[rows]
        # Only steps that add to earlier gradients, as micro-batches do: the whole step does not,
        # so it is no point of the line.
        known = list(self._parts)
        nearest = min(known, key=lambda size: abs(size - rows))
        is_between = known[0] < rows < known[-1]
        # A line through sizes that are close to each other says little of those beyond: there the whole step is the
        # better second point.
        if not is_between and known[-1] < _FAR * known[0]:
            return self._beside_whole(nearest, rows)
        # The two sizes on both sides of the one that is sought, or the two nearest to it.
        few = max((size for size in known[:-1] if size < rows), default=known[0])
        more = known[known.index(few) + 1]
        found = extrapolate(self._parts[few], self._parts[more], (few, more), rows)
        # A scale is that of a part of a step; a micro-batch is a step, and runs on just these rows.
        return replace(found, scale=1.0)

    def _beside_whole(self, known: int, rows: int) -> Profile:
        """A micro-batch of so many rows, by one that was run and by the whole step.

        Events of the whole step are others, as it adds to no gradients: what joins the two are their peaks and times.
        """
        part = self._parts[known]
        found = scaled(part, rows / known)
        if known == self.rows:
            return replace(found, scale=1.0)
        share = (rows - known) / (self.rows - known)
        peak = part.peak + (_peak_when_adding(self.whole) - part.peak) * share
        seconds = part.step_seconds + (self.whole.step_seconds - part.step_seconds) * share
        # What is there whatever the rows, such as weights that a library repacks, counts at every event.
        more = round(peak) - found.peak
        curve = tuple(max(0, size + more) for size in found.curve)
        # Fewer rows take less time, and never less than in proportion, as measured times jitter.
        both = sorted((part.step_seconds, part.step_seconds * rows / known))
        return replace(found, curve=curve, step_seconds=min(max(seconds, both[0]), both[1]), scale=1.0)


def _peak_when_adding(whole: Profile) -> int:
    """Bytes of a step in one piece at the most, if its backward found gradients, as that of a micro-batch does."""
    more = dict(whole.adding)
    return max((size + more.get(event, 0) for event, size in enumerate(whole.curve)), default=0)


@dataclass(frozen=True, slots=True)
class BesideActivations:
    """Bytes that micro-batches need beside their activations, and a step in one piece does not.

    Attributes:
        gradients: Of earlier batches, which lie aside.
        buffers: Of the module: every micro-batch has its own, and they are kept as they were before the step.
        keeps_buffers: Whether they are kept so on this device because of the micro-batches: of several devices the
            first one keeps them anyway, and no other one does.
        attributes: Of tensors in attributes of the module: every micro-batch but the first has a copy of them.
        left_behind: What a step in one piece leaves on its module, as attributes that stay.
    """

    gradients: int = 0
    buffers: int = 0
    keeps_buffers: bool = True
    attributes: int = 0
    left_behind: int = 0

    def of(self, number: int) -> int:
        """Bytes beside so many micro-batches."""
        if number == 1:
            return 0
        copies = self._bytes_of_buffers(number) + (number - 1) * self.attributes
        return self.gradients + copies + self._bytes_of_copies(number)

    def _bytes_of_buffers(self, number: int) -> int:
        """Of the copies: one micro-batch has those of the module."""
        copies = number if self.keeps_buffers else number - 1
        return copies * self.buffers

    def _bytes_of_copies(self, number: int) -> int:
        """Of what the first one has left, with which all others are to begin the next step."""
        return self.left_behind * (number - 1) // number

    def describe(self, number: int) -> str:
        """What so many micro-batches need, in words."""
        parts = []
        if self.gradients:
            parts.append(f"{format_bytes(self.gradients)} of gradients that earlier ones leave")
        if self.buffers:
            parts.append(f"{format_bytes(self._bytes_of_buffers(number))} of buffers, which each has its own copies of")
        if self.attributes:
            parts.append(f"{format_bytes((number - 1) * self.attributes)} of copies of tensors in attributes")
        if self.left_behind:
            parts.append(f"{format_bytes(self._bytes_of_copies(number))} of copies of what the first one leaves")
        return " and ".join(parts)


def largest_rows(rows: int, number: int) -> int:
    """Rows of the largest of ``number`` micro-batches of nearly equal size."""
    return -(-rows // number)


def sizes_of_parts(rows: int, number: int) -> set[int]:
    """Rows of each of ``number`` micro-batches of nearly equal size: one number, or two that differ by one."""
    return {rows // number, largest_rows(rows, number)}


def numbers_worth_trying(rows: int, most: int | None = None) -> list[int]:
    """Every number of micro-batches whose largest one has fewer rows than that of any smaller number."""
    limit = rows if most is None else min(rows, most)
    # Of all numbers with the same largest micro-batch the smallest is as good in memory, and has
    # less to do beside the steps.
    sizes = sorted({largest_rows(rows, number) for number in range(1, limit + 1)}, reverse=True)
    return [largest_rows(rows, size) for size in sizes]


def least_number(whole: Profile, rows: int, budget_of: Callable[[int], int]) -> int:
    """The smallest number whose micro-batches may fit without a plan: all bytes are taken to be in proportion to rows.

    What does not grow with the rows makes more of them necessary, and never fewer.
    """
    numbers = numbers_worth_trying(rows)
    # New gradients that count in one piece are those of earlier micro-batches in parts, and in their budgets.
    peak = min(whole.peak, _peak_when_adding(whole))
    for number in numbers:
        if peak * largest_rows(rows, number) <= budget_of(number) * rows:
            return number
    return numbers[-1]


def candidates_of(
    profiles: MicroBatchProfiles,
    budget_of: Callable[[int], int],
    most: int | None = None,
    failed: Container[int] = (),
) -> list[Candidate]:
    """Candidates for every number that may be best: from the first that needs no plan, larger ones only cost more.

    Args:
        profiles: Of the step.
        budget_of: Bytes of activations that a step in so many micro-batches allows: gradients are there during all
            forwards but the first.
        most: The largest number that is allowed; as many as there are rows unless given.
        failed: Rows on which a micro-batch does not run.
    """
    found = list[Candidate]()
    for number in numbers_worth_trying(profiles.rows, most):
        if largest_rows(profiles.rows, number) in failed:
            continue
        candidate = candidate_of(profiles, number, budget_of(number))
        found.append(candidate)
        # More micro-batches would fit as well, and take longer.
        if candidate.fits:
            break
    return found


def candidate_of(profiles: MicroBatchProfiles, number: int, budget: int | None) -> Candidate:
    """The step in ``number`` micro-batches, each of which may take ``budget`` bytes, or as few as can be."""
    rows = largest_rows(profiles.rows, number)
    # In one piece a step finds no gradients of micro-batches before it.
    profile = profiles.whole if number == 1 else beside_earlier_outputs(profiles.of_part(rows), number)
    # The first of two passes takes the time of a forward of all rows, and keeps nothing for backward.
    again = profiles.whole.forward_seconds if profiles.runs_twice and number > 1 else 0.0
    seconds = _seconds_of_all(profiles, number)
    least = seconds
    if budget is not None and profile.peak > budget:
        # A budget below nothing is one that cannot be met; the bound is asked for one byte then.
        least = seconds * (1 + lower_bound(profile, max(1, budget)) / profile.step_seconds)
    return Candidate(number, rows, profile, again + seconds, again + least, budget, again)


def _seconds_of_all(profiles: MicroBatchProfiles, number: int) -> float:
    """Seconds of a step in ``number`` micro-batches, some of which may have one row less."""
    if number == 1:
        return profiles.whole.step_seconds
    small, larger = divmod(profiles.rows, number)
    # Sizes differ by one row at the most, so two profiles tell the time of all.
    seconds = number * profiles.seconds_each
    if larger:
        seconds += larger * profiles.of_part(small + 1).step_seconds
    return seconds + (number - larger) * profiles.of_part(small).step_seconds


def choose_micro_batches(
    candidates: Sequence[Candidate],
    plan: Callable[[Candidate], MemoryPlan],
    margin: float = 0.0,
) -> MicroBatchChoice:
    """The candidate that is fastest with its plan.

    The one that needs no plan is priced first, for nothing. The others follow, those of the least lower bound first,
    until none can be faster, or ``_MOST_PLANS`` were searched.

    Args:
        candidates: As :func:`candidates_of` gives them.
        plan: Plans for a candidate.
        margin: A step in one piece may take this share longer than the fastest, and is taken all the same.

    Raises:
        BudgetError: no candidate meets its budget; names the smallest that one could.
    """
    least = min(candidate.least for candidate in candidates)
    # The one that needs no plan costs no search, and its time is one that others have to beat.
    order = sorted(candidates, key=lambda candidate: (not candidate.fits, candidate.least, candidate.number))
    best: tuple[float, Candidate, MemoryPlan] | None = None
    refusals: list[BudgetError] = []
    searches = 0
    # That of fewest rows, where many micro-batches need no more beside their activations than few.
    easiest = min(candidates, key=lambda candidate: candidate.profile.peak - (candidate.budget or 0))
    for candidate in order:
        # Cut steps are taken for so much slower than they are, which lets the whole one win by a
        # margin.
        weight = 1.0 if candidate.number == 1 else 1.0 + margin
        if best is not None and (weight * candidate.least >= best[0] or searches >= _MOST_PLANS):
            continue
        # A refusal takes a search for the smallest peak, and there may be as many candidates as rows: after the first
        # one only the candidate that needs least is asked for its own, if there is a proof against the others.
        if refusals and candidate is not easiest and _is_hopeless(candidate):
            continue
        # What fits is planned without a search.
        searches += not candidate.fits
        try:
            found = plan(candidate)
        except BudgetError as error:
            refusals.append(error)
            continue
        seconds = candidate.seconds_with(found)
        # Of equally fast ones the fewer micro-batches.
        if best is None or (weight * seconds, candidate.number) < (best[0], best[1].number):
            best = (weight * seconds, candidate, found)
    if best is None:
        raise functools.reduce(_easier, refusals)
    _weighed, candidate, found = best
    return MicroBatchChoice(candidate, found, candidate.seconds_with(found), least, candidates[0].seconds)


def _is_hopeless(candidate: Candidate) -> bool:
    """Whether it is proved that no plan meets the budget, neither value by value nor with replayed calls."""
    if candidate.budget is None or candidate.fits:
        return False
    problems = [Problem(way) for way in ways_to_offload(candidate.profile)]
    return candidate.budget < surely_needed(problems)


def _easier(one: BudgetError, other: BudgetError) -> BudgetError:
    """The refusal of the candidate that would need less."""
    if one.smallest is None:
        return other
    if other.smallest is None or other.smallest >= one.smallest:
        return one
    return other
