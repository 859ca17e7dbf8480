"""Moves a choice towards the budget by the exact forecast: drops more above it, keeps more below it."""

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from lightning_dpx.memory.plan.choice import Choice

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.problem import Problem
    from lightning_dpx.memory.plan.solvers.bounds import Relaxation

_FEW = 4
_FEWEST_FORECASTS = 20  # of plain steps
_MOST_MISSES = 12
_WITHIN_REACH = 1.5  # times the budget
_Change = Callable[[Choice, frozenset[int]], Choice]
LOWERING = 5e5
REACHING = 2e5  # events, values and computations of all forecasts together: about 0.4 s and 0.15 s
HASTENING = 1e6  # likewise, 0.8 s: spent near the smallest peak only, where steps else take many times as long
_SHARES = (0.1, 0.05, 0.02, 0.01, 0.005)  # of the peak


class Descent:
    """Steps down, each the best of a few for the highest event.

    A step drops what is kept there: the cheapest bytes that are enough, or one of the cheapest or largest units. Of
    what is there only because others are computed from it, it keeps one of the largest (what that is computed from
    stays away), or forgets it after every use.

    The best step is the one that leaves least above the target, over all events: many of them may be equally high, and
    a step takes one of them down.

    Args:
        relaxation: What can be dropped.
        work: That all forecasts together may take.
    """

    def __init__(self, relaxation: "Relaxation", work: float) -> None:
        self._relaxation = relaxation
        self._problem = relaxation.problem
        profile = self._problem.profile
        # Work is counted instead of time, so that a plan does not depend on how busy the machine
        # is; small steps may have a few forecasts in any case.
        self._until = self._problem.work + max(work, _FEWEST_FORECASTS * (len(profile.curve) + len(profile.values)))

    def reach(self, choice: Choice, budget: int) -> Choice:
        """Takes the budget where ``choice`` is near it, or comes as near as steps lead."""
        # From far above no few steps lead to the budget.
        if not budget < self._problem.forecast(choice).peak <= _WITHIN_REACH * budget:
            return choice
        curve = self._curve(choice)
        while curve.max() > budget:
            attempts = list[tuple[Choice, np.ndarray]]()
            for step in self.steps(choice, curve, budget):
                if self._has_more():
                    attempts.append((step, self._curve(step)))
            after = min(attempts, key=lambda attempt: self._rank(attempt, budget), default=(choice, curve))
            # No step leads further down.
            if _above(after[1], budget) >= _above(curve, budget):
                break
            choice, curve = after
        return choice

    def lower(self, choice: Choice) -> Choice:
        """The lowest choice to which steps lead from ``choice``: large ones, then smaller ones."""
        peak = self._problem.forecast(choice).peak
        for share in _SHARES:
            while self._has_more():
                after = self.reach(choice, int((1 - share) * peak))
                if self._problem.forecast(after).peak >= peak:
                    break
                choice = after
                peak = self._problem.forecast(after).peak
        return choice

    def _has_more(self) -> bool:
        return self._problem.work < self._until

    def _curve(self, choice: Choice) -> np.ndarray:
        return self._problem.timeline(choice).astype(np.float64)

    def _rank(self, attempt: tuple[Choice, np.ndarray], budget: int) -> tuple[float, float]:
        above = _above(attempt[1], budget)
        return above, 0.0 if above else self._problem.forecast(attempt[0]).seconds

    def steps(self, choice: Choice, curve: np.ndarray, budget: int) -> list[Choice]:
        """Other choices that are lower at the highest event of ``choice``.

        Args:
            choice: Where the steps begin.
            curve: Bytes at every event with it (E).
            budget: Bytes that the first step is to free at once, if it can.
        """
        units = self._relaxation.units
        event = int(np.argmax(curve))
        freed = self._relaxation.freed(event)
        kept = self._relaxation.cheapest(np.where([unit in choice.dropped for unit in units], 0, freed))
        enough = int(np.searchsorted(np.cumsum(freed[kept]), curve[event] - budget)) + 1
        found = [Choice(choice.dropped | {units[at] for at in kept[:enough].tolist()}, choice.uncached)]
        large = kept[np.argsort(-freed[kept], kind="stable")]
        for at in (*kept[:_FEW].tolist(), *large[:_FEW].tolist()):
            found.append(Choice(choice.dropped | {units[at]}, choice.uncached))
        for unit in self._early(event, choice, freed)[: 2 * _FEW]:
            found.append(Choice(choice.dropped - {unit}, choice.uncached - {unit}))
            found.append(Choice(choice.dropped, choice.uncached | ({unit} & self._problem.forgettable)))
        # Several ways may lead to one choice, and each costs a forecast.
        return [step for step in dict.fromkeys(found) if step != choice]

    def _early(self, event: int, choice: Choice, freed: np.ndarray) -> list[int]:
        """The units that are there because others were computed from them, the largest first."""
        relaxation = self._relaxation
        there = relaxation.computed_by(event, self._problem.values_of(choice.dropped))
        there &= relaxation.requests.keys() & relaxation.column_of.keys()
        columns = {relaxation.column_of[value] for value in there if relaxation.requests[value][-1].event > event}
        order = sorted((at for at in columns if freed[at] > 0), key=lambda at: (-freed[at], at))
        return [relaxation.units[at] for at in order]


def _above(curve: np.ndarray, budget: int) -> float:
    """Bytes above the budget, added up over all events."""
    return float(np.maximum(curve - budget, 0).sum())


def fill(problem: "Problem", choice: Choice, budget: int) -> Choice:
    """Keeps what still fits, the costliest bytes first; then what is not to be forgotten after every use."""
    if problem.forecast(choice).peak > budget:
        return choice
    kept = _filled(problem, choice, budget, _kept)
    if kept.uncached:
        return _filled(problem, kept, budget, _cached)
    return kept


def _kept(choice: Choice, units: frozenset[int]) -> Choice:
    return Choice(choice.dropped - units, choice.uncached - units)


def _cached(choice: Choice, units: frozenset[int]) -> Choice:
    return Choice(choice.dropped, choice.uncached - units)


def _filled(problem: "Problem", choice: Choice, budget: int, change: _Change) -> Choice:
    """Changes what still fits and takes no more time, in handfuls, halved when one does not fit."""
    result = problem.forecast(choice)
    units = problem.units
    candidates = choice.dropped if change is _kept else choice.uncached
    # The bytes that are kept are to spare as much time as they can.
    waiting = sorted(
        candidates,
        key=lambda unit: units[unit].seconds / max(1, units[unit].num_bytes),
        reverse=True,
    )
    size = max(1, len(waiting) // 4)
    misses = 0
    while waiting and misses < _MOST_MISSES:
        handful = frozenset(waiting[:size])
        attempt = change(choice, handful)
        after = problem.forecast_within(attempt, budget, result.seconds)
        if after is not None:
            choice = attempt
            result = after
            waiting = waiting[len(handful) :]
        elif size > 1:
            size = max(1, size // 2)
        else:
            waiting = waiting[1:]
            misses += 1
    return choice


def hasten(problem: "Problem", choice: Choice, budget: int, until: float) -> Choice:
    """Keeps or caches what spares most time by the exact forecast, one unit after the other, as long as that fits.

    Where units that are forgotten after every use are computed from each other, one of them decides how often all
    behind it are computed: what a unit's own seconds do not tell. What fits, or spares time, only beside another unit
    is found when all are looked at once more.

    Args:
        problem: What is planned.
        choice: Within the budget.
        budget: Bytes.
        until: The work of the problem beyond which nothing more is looked at; see ``HASTENING``.
    """
    if not problem.is_nested(choice):
        return choice
    before = None
    while choice != before and problem.work <= until:
        before = choice
        choice = _hastened(problem, choice, budget, until)
    return choice


def _hastened(problem: "Problem", choice: Choice, budget: int, until: float) -> Choice:
    """One round of :func:`hasten`: a gain is worked out again only where its unit leads (lazy greedy: Minoux, 1978)."""
    now = problem.forecast(choice).seconds
    # No gain is known yet: the costliest units first, as not all of them may be looked at.
    order = sorted(choice.dropped, key=lambda unit: -problem.units[unit].seconds)
    waiting: list[tuple[float, int, _Change, frozenset[int]]] = []
    changes: tuple[_Change, ...] = (_cached, _kept)
    for change in changes:
        for unit in order:
            waiting.append((-np.inf, len(waiting), change, frozenset({unit})))
    while waiting and problem.work <= until:
        _, number, change, unit_alone = heapq.heappop(waiting)
        attempt = change(choice, unit_alone)
        after = problem.forecast_within(attempt, budget, now)
        # Also what was taken before, of which nothing is left to gain.
        if after is None or after.seconds >= now:
            continue
        gain = now - after.seconds
        if waiting and gain < -waiting[0][0]:
            heapq.heappush(waiting, (-gain, number, change, unit_alone))
            continue
        choice = attempt
        now = after.seconds
    return choice
