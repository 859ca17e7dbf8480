"""What every choice within a budget must hold and must pay: a lower bound of its extra time.

[Note: inequalities that hold for every choice]
Let d[u] = 1 if all values of unit u are dropped, else 0. What that changes of the bytes that are there:

    event      0    1    2    3    4    5    6    7    8    9
               forward             | backward
    kept            ############################                  until autograd has used it for the last time
    dropped         ####                ########                  while forward uses it, and from request to release
    change               -    -    -    -+   -+   -               d[u] times its bytes; the sum over all units is the
                                                                  difference to the curve of the step that keeps all

In the forecast of any choice, and so in any step:

    memory   At every event t, the curve, less what is dropped and would only have been kept, plus what is dropped and
             has been asked for, is at most the budget. A dropped value that autograd asks for at event a is there at a,
             and stays until autograd releases it; to be safe we only count on it until the next request from which it
             might itself be asked for, because such a use may be its last and is followed by another account of it.
    time     A dropped value for which there is a request is computed at least once. So is each value on the way to it
             that is not saved (z), because such values are never kept.

Parts of units may only lower the time, so the linear program min time(d, z), 0 <= d <= 1, is below every choice. Here
it is bounded from below once more, without a solver: at a single event, with the time of what is on the way to several
units divided among them, it is a fractional knapsack (Dantzig, 1957). Every event gives a bound; the largest counts.
:mod:`lightning_dpx.memory.plan.solvers.milp_model` solves it, in integers.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from lightning_dpx.memory.profile.data import Request

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.problem import Problem

_MOST_EVENTS = 200


class Relaxation:
    """The inequalities of the note, as arrays; a column for every unit that may be dropped and frees memory.

    Attributes:
        problem: What it was made of.
        units: The unit of each column, C of them.
        column_of: By value, the column of its unit.
        unsaved: The values that are not saved and that are always computed again when needed, numbered from 0.
        requests: Those for each value of a column or of ``unsaved``; absent if there is none.
        seconds: Time of the values in each column that are asked for (C).
        on_the_way: For each value of a column, the unsaved values that every computation of it computes, too.
        curve: Bytes at every event if all is kept (E events).

    Its methods speak of a column by its number, and of an event by its index in ``curve``.
    """

    def __init__(self, problem: "Problem") -> None:
        self.problem = problem
        values = problem.profile.values
        self.units: tuple[int, ...] = tuple(unit for unit in problem.droppable if problem.units[unit].num_bytes > 0)
        self.column_of: dict[int, int] = {}
        for at, unit in enumerate(self.units):
            self.column_of.update(dict.fromkeys(problem.units[unit].values, at))
        unsaved = [index for index, v in enumerate(values) if v.storage < 0 and not v.name and v.inputs]
        self.unsaved: dict[int, int] = {value: number for number, value in enumerate(unsaved)}
        self.requests: dict[int, list[Request]] = defaultdict(list)
        for request in problem.profile.requests:
            self.requests[request.value].append(request)
        # A look at a value without requests must not add one.
        self.requests.default_factory = None
        self.on_the_way: dict[int, tuple[int, ...]] = {value: self._on_the_way(value) for value in self.column_of}
        self.seconds: np.ndarray = np.zeros(len(self.units))
        for value, at in self.column_of.items():
            if value in self.requests:
                self.seconds[at] += values[value].seconds
        self.curve: np.ndarray = np.array(problem.profile.curve, dtype=np.float64)
        self._request_events = [request.event for request in problem.profile.requests]
        self._spans = self._find_spans()

    def _on_the_way(self, value: int) -> tuple[int, ...]:
        stack = list(self.problem.profile.values[value].inputs)
        seen = set[int]()
        while stack:
            source = stack.pop()
            if source in self.unsaved and source not in seen:
                seen.add(source)
                stack += self.problem.profile.values[source].inputs
        return tuple(seen)

    def _find_spans(self) -> np.ndarray:
        """Rows of (first event, event after the last, column, bytes that a drop adds)."""
        profile = self.problem.profile
        spans = []
        for at, unit in enumerate(self.units):
            values = self.problem.units[unit].values
            storage = profile.storages[profile.values[values[0]].storage]
            spans.append((storage.unused + 1, storage.freed, at, -self.problem.units[unit].num_bytes))
            for value in values:
                for start, stop in self.in_use(value):
                    spans.append((start, stop, at, profile.values[value].num_bytes))
        return np.array(spans, dtype=np.int64).reshape(-1, 4)

    def in_use(self, value: int) -> list[tuple[int, int]]:
        """Events, from and until, at which a dropped value is surely there because autograd has asked for it."""
        found: list[tuple[int, int]] = []
        for request in self.requests.get(value, ()):
            following = self._following(request)
            # From that moment on another account of the value may be the one that counts; see the
            # note.
            others = (r.event for r in following if r.value != value and self._needs(r.value, value))
            stop = next(others, request.released)
            # An operator may ask twice for one tensor, which is there once.
            start = max(request.event, found[-1][1]) if found else request.event
            if start < stop:
                found.append((start, stop))
        return found

    def _following(self, request: Request) -> Sequence[Request]:
        """The requests while autograd still uses what it got by ``request``."""
        first = bisect_right(self._request_events, request.event)
        stop = bisect_left(self._request_events, request.released)
        return self.problem.profile.requests[first:stop]

    def _needs(self, value: int, source: int) -> bool:
        """Whether ``value`` may be computed from ``source``; inputs come first."""
        stack = [value]
        seen = set[int]()
        while stack:
            for index in self.problem.profile.values[stack.pop()].inputs:
                if index == source:
                    return True
                if index > source and index not in seen:  # what comes before it is not made from it
                    seen.add(index)
                    stack.append(index)
        return False

    def computed_by(self, event: int, dropped: frozenset[int]) -> set[int]:
        """The values of ``dropped`` that ``event`` finds computed, for themselves or for others; and unsaved ones."""
        # Requests are in the order of backward: the first one of a value tells whether it was
        # asked for.
        stack = [v for v in self.requests.keys() & dropped if self.requests[v][0].event <= event]
        found = set(stack)
        while stack:
            for source in self.problem.profile.values[stack.pop()].inputs:
                if source not in found and (source in self.unsaved or source in dropped):
                    found.add(source)
                    stack.append(source)
        return found

    def curve_of(self, dropped: np.ndarray) -> np.ndarray:
        """Bytes that are surely there at every event (E), for shares of the units that are dropped (C)."""
        change = np.zeros(len(self.curve) + 1)
        (start, stop, column, size) = self._spans.T
        np.add.at(change, np.minimum(start, len(self.curve)), size * dropped[column])
        np.add.at(change, np.minimum(stop, len(self.curve)), -size * dropped[column])
        return self.curve + np.cumsum(change)[:-1]

    def change_of(self, column: int) -> tuple[int, int, np.ndarray]:
        """What dropping a unit changes: from an event, until another, the bytes at each of them."""
        first, stop = np.searchsorted(self._spans[:, 2], [column, column + 1])  # they stand in that order
        spans = self._spans[first:stop]
        begin = int(spans[:, 0].min())
        end = min(int(spans[:, 1].max()), len(self.curve))
        change = np.zeros(max(0, end - begin))
        for start, stop, _, size in spans:
            change[start - begin : max(start, stop) - begin] += size
        return begin, begin + len(change), change

    @cached_property
    def shared_seconds(self) -> np.ndarray:
        """The time of each column, with its share of what is not saved on the way (C)."""
        seconds = self.seconds.copy()
        ways = defaultdict[int, set[int]](set)
        for value, at in self.column_of.items():
            if value in self.requests:
                for passed in self.on_the_way[value]:
                    ways[passed].add(at)
        # What is computed on the way to several units is computed once at least, so each bears a
        # part of it only.
        for passed, columns in ways.items():
            seconds[list(columns)] += self.problem.profile.values[passed].seconds / len(columns)
        return seconds

    @cached_property
    def _spread(self) -> np.ndarray:
        """The numbers from 0 in the order of van der Corput: the first few of them are far apart (C)."""
        bits = max(1, len(self.units).bit_length())
        return np.array([int(f"{number:0{bits}b}"[::-1], 2) for number in range(len(self.units))])

    def cheapest(self, freed: np.ndarray) -> np.ndarray:
        """The columns that free anything, the least time per byte first, and equal ones spread over the model.

        Neighbors that are dropped come back together, so equal layers are better dropped here and there.
        """
        useful = np.nonzero(freed > 0)[0]
        rates = self.shared_seconds[useful] / freed[useful]
        # Groups of equal rates, and within each the order of van der Corput by the position there.
        order = np.argsort(rates, kind="stable")
        new = np.concatenate([[True], np.diff(rates[order]) != 0])[: len(order)]
        position = np.arange(len(order)) - np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
        result: np.ndarray = useful[order[np.lexsort((self._spread[position], np.cumsum(new)))]]
        return result

    def freed(self, event: int) -> np.ndarray:
        """Bytes that dropping each unit frees at ``event`` (C); negative for what is in use just then."""
        _, _, column, size = self._spans[(self._spans[:, 0] <= event) & (event < self._spans[:, 1])].T
        return np.bincount(column, -size, minlength=len(self.units))


def local_maxima(curve: np.ndarray, level: float, most: int) -> list[int]:
    """Events at which ``curve`` is above ``level`` and its neighbors: the highest of them, and some evenly spread."""
    rising = np.concatenate([[True], curve[1:] > curve[:-1]])
    falling = np.concatenate([curve[:-1] >= curve[1:], [True]])
    found = np.nonzero(rising & falling & (curve > level))[0]
    if len(found) > most:
        highest = np.argsort(-curve[found], kind="stable")[: most // 2]
        spread = np.linspace(0, len(found) - 1, most - most // 2).round().astype(int)
        found = found[np.unique(np.concatenate([highest, spread]))]
    return [int(event) for event in found]


def least_bytes(relaxation: Relaxation, *, with_calls: bool = True) -> int:
    """Bytes that are there at some event in every choice, however often it computes things again.

    Whatever is dropped is there while autograd uses it, and what no plan drops, such as gradients, is there anyway;
    but for what is saved within calls that may be replayed, whatever it is.

    Args:
        relaxation: What can be dropped.
        with_calls: Whether module calls may be replayed as well.
    """
    least = relaxation.curve.copy()
    if with_calls:
        _leave_out_calls(relaxation, least)
    # Each event by itself, and each unit as it is best there: no choice takes less, and none need
    # take so little everywhere.
    for column in range(len(relaxation.units)):
        start, stop, change = relaxation.change_of(column)
        least[start:stop] += np.minimum(change, 0)  # where dropping it would add to what is there, it is kept
    return int(least.max(initial=0.0))


def _leave_out_calls(relaxation: Relaxation, least: np.ndarray) -> None:
    """Takes off ``least`` what goes if calls are replayed, and not if values are dropped one by one."""
    problem = relaxation.problem
    profile = relaxation.problem.profile
    for call in profile.calls:
        # Of nested calls only the outermost is replayed, and it has the tensors of the others.
        if call.parent < 0:
            least[call.end :] -= call.small
    within = {hold.name for hold in profile.holds if hold.name and hold.call >= 0}
    droppable = set(relaxation.units)
    for number, unit in enumerate(problem.units):
        values = [profile.values[index] for index in unit.values]
        if any(value.name in within for value in values):
            storage = profile.storages[values[0].storage]
            # What a drop of the value takes off is taken off by the caller.
            by_value = unit.num_bytes if number in droppable else 0
            least[storage.unused + 1 : storage.freed] -= storage.num_bytes - by_value


def least_seconds(relaxation: Relaxation, budget: int) -> float:
    """What any choice within ``budget`` bytes costs at least; infinite where none can be."""
    return knapsack(relaxation, budget)[0]


def knapsack(relaxation: Relaxation, budget: int) -> tuple[float, frozenset[int]]:
    """The costliest of the fractional knapsacks at the local maxima of the unplanned curve.

    See the note of this module.

    Returns:
        Its seconds, infinite where all that could be dropped is not enough; and its units, the last of them whole.
    """
    most = 0.0
    chosen = frozenset[int]()
    for event in local_maxima(relaxation.curve, budget, _MOST_EVENTS):
        lacking = relaxation.curve[event] - budget
        freed = relaxation.freed(event)
        order = relaxation.cheapest(freed)
        sizes = freed[order]
        seconds = relaxation.shared_seconds[order]
        # The cheapest bytes first, the last of them in part: no choice of whole units frees as
        # much for less.
        before = np.cumsum(sizes) - sizes
        # Not even all that can be dropped frees enough at this event.
        if sizes.sum() < lacking:
            return float("inf"), frozenset(relaxation.units)
        spent = float(seconds @ np.clip((lacking - before) / sizes, 0.0, 1.0))
        if spent >= most:
            most = spent
            chosen = frozenset(relaxation.units[at] for at in order[before < lacking].tolist())
    return most, chosen
