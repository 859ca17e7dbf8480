"""Moves a choice towards the budget by the exact forecast: drops more above it, keeps more below it."""

import numpy as np

from lightning_dpx.recompute.bounds import Relaxation
from lightning_dpx.recompute.forecast import timeline
from lightning_dpx.recompute.planner import Choice, Problem

_MOST_ROUNDS, _MOST_EARLY, _MOST_MISSES = 16, 6, 12
_WITHIN_REACH = 1.5  # times the budget


def reach(relaxation: Relaxation, choice: Choice, budget: int) -> Choice:
    """Takes the budget by steps, each the best of a few for the highest event.

    It may drop the cheapest bytes that are kept there; or, of what is there only because others are computed from it,
    keep one of the largest (what that is computed from stays away) or forget it after every use.
    """
    problem = relaxation.problem

    def rank(attempt: Choice) -> tuple[int, float]:
        result = problem.forecast(attempt)
        return max(result.peak, budget), result.seconds

    for _ in range(_MOST_ROUNDS):
        if not budget < problem.forecast(choice).peak <= _WITHIN_REACH * budget:
            break
        attempt = min(_steps(relaxation, choice, budget), key=rank, default=choice)
        if rank(attempt) >= rank(choice):
            break
        choice = attempt
    return choice


def _steps(relaxation: Relaxation, choice: Choice, budget: int) -> list[Choice]:
    problem, units = relaxation.problem, relaxation.units
    curve = timeline(problem.profile, problem.values_of(choice.dropped), problem.values_of(choice.fleeting))
    event = int(np.argmax(curve))
    freed = relaxation.freed(event)
    dropped = np.array([unit in choice.dropped for unit in units], dtype=bool)
    order = relaxation.cheapest(np.where(dropped, 0, freed))
    missing = int(np.searchsorted(np.cumsum(freed[order]), curve[event] - budget)) + 1
    steps = [Choice(choice.dropped | {units[at] for at in order[:missing].tolist()}, choice.fleeting)]
    early = [unit for at, unit in enumerate(units) if dropped[at] and freed[at] > 0]
    for unit in sorted(early, key=lambda unit: problem.units[unit].num_bytes, reverse=True)[:_MOST_EARLY]:
        steps.append(Choice(choice.dropped - {unit}, choice.fleeting - {unit}))
        steps.append(Choice(choice.dropped, choice.fleeting | {unit}))
    return steps


def fill(problem: Problem, choice: Choice, budget: int) -> Choice:
    """Keeps what still fits, the dearest bytes first; in handfuls, halved when one does not fit."""
    result = problem.forecast(choice)
    if result.peak > budget:
        return choice
    units = problem.units
    waiting = sorted(choice.dropped, key=lambda i: units[i].seconds / max(1, units[i].num_bytes), reverse=True)
    size, misses = max(1, len(waiting) // 4), 0
    while waiting and misses < _MOST_MISSES:
        handful = frozenset(waiting[:size])
        attempt = Choice(choice.dropped - handful, choice.fleeting - handful)
        after = problem.forecast(attempt)
        if after.peak <= budget and after.seconds <= result.seconds:
            choice, result, waiting = attempt, after, waiting[len(handful) :]
        elif size > 1:
            size = max(1, size // 2)
        else:
            waiting, misses = waiting[1:], misses + 1
    return choice
