"""Dynamic programming over stretches between cuts: the least extra time within a budget, by sums of units.

    units      0  1  2  3 | 4  5  6  7 | 8  9 10 11 | ...           cut: what later units are computed from is kept
    stretch    keep or drop each unit by its price; what is dropped comes back together when backward gets here

Within a stretch a unit is dropped if computing it costs at most ``price`` seconds per byte. The programme chooses the
cuts, and a price for every stretch. A partial solution is a pair (bytes kept so far, extra time), and only those that
no other beats in both survive; a stretch is possible if what is kept before and in it, what comes back, and the
gradients in flight fit together. That reaches past a fixed segment length: early stretches may be longer, because by
then backward has freed the rest.

Peaks are estimates here; :mod:`lightning_dpx.memory.plan.planners.optimal` asks the exact forecast about what it finds.

Related: rotor (Beaumont et al., 2019) for chains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_dpx.memory.plan.choice import Choice

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.problem import Problem

_MOST_CUTS = 100
_MOST_POINTS = 24
_PRICES = 6
_BINS = 1024


@dataclass(frozen=True, slots=True)
class Variant:
    """The problem with some units pinned down.

    Attributes:
        droppable: Which units may be dropped here.
        uncached: Which of them would be forgotten after every use.
    """

    problem: "Problem"
    droppable: np.ndarray
    uncached: np.ndarray


def variants(problem: "Problem") -> list[Variant]:
    units = problem.units
    can = np.array([unit.droppable for unit in units], bool)
    rates = np.array([unit.seconds / max(1, unit.num_bytes) for unit in units], float)
    # To forget what is cheap after every use costs little, and a stretch comes back without it.
    cheap = can & (rates <= 0.25 * rates[can].max(initial=0.0))
    cheap &= np.array([bool(unit.inputs) for unit in units], bool)  # what is offloaded or compressed is not computed
    nothing = np.zeros(len(units), bool)
    uncached = np.zeros(len(units), bool)
    for index in np.nonzero(cheap)[0].tolist():  # never one from another, or the work would double at every step
        uncached[index] = not any(uncached[source] for source in units[index].inputs)
    far = np.array([len(unit.inputs) > 4 for unit in units], bool)
    found = [Variant(problem, can, nothing), Variant(problem, can, uncached)]
    if (far & can).any():
        found += [Variant(problem, can & ~far, nothing), Variant(problem, can & ~far, uncached)]
    return found


class StretchTable:
    """What every price means for every unit, as sums from the beginning, and what crosses every cut."""

    def __init__(self, variant: Variant) -> None:
        problem = variant.problem
        units = problem.units
        self._count = len(units)
        self._uncached = variant.uncached
        # All pairs of cuts are looked at, for every price: the time grows with the square of their
        # number.
        cuts = _thinned([cut for cut in problem.cuts if cut != len(units) - 1], _MOST_CUTS)
        self._cuts = np.array([*cuts, len(units) - 1])
        self._starts = np.concatenate([[-1], self._cuts[:-1]])
        self._sizes = np.array([unit.num_bytes for unit in units], dtype=np.float64)
        self._times = np.array([unit.seconds for unit in units])
        overhead = np.append(_overheads(problem), 0.0)  # there may be no unit at all
        # [cut, start] -> the most between them
        highest = [np.maximum.accumulate(overhead[start + 1 :]) for start in self._starts.tolist()]
        between = np.maximum(self._cuts[:, None] - self._starts - 1, 0)
        self._over = np.stack([most[at] for most, at in zip(highest, between.T, strict=True)], axis=1)
        self._drops: list[np.ndarray] = []
        self._members: list[list[np.ndarray]] = []
        # [cut] -> price x start: bytes kept, peak beyond what was kept before, extra time
        rows: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = []
        for price in _prices(self._times, self._sizes, variant.droppable):
            rows.append(self._at_price(problem, variant.droppable & (self._times <= price * self._sizes)))
        self._kept: list[np.ndarray] = []
        self._peak: list[np.ndarray] = []
        self._seconds: list[np.ndarray] = []
        for of_cut in zip(*rows, strict=True):  # what each price makes of one cut
            kept, peaks, seconds = zip(*of_cut, strict=True)
            self._kept.append(np.stack(kept))
            self._peak.append(np.stack(peaks))
            self._seconds.append(np.stack(seconds))

    def _at_price(self, problem: "Problem", drop: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        last = np.arange(self._count)
        shallow = np.zeros(self._count, bool)
        inner = np.zeros(self._count, bool)
        for index in np.nonzero(drop)[0].tolist():
            sources = problem.units[index].inputs
            for source in sources:
                last[source] = max(last[source], index)
                inner[source] = True
            shallow[index] = not any(drop[source] for source in sources)
        uncached = drop & self._uncached
        cost = np.where(uncached & inner, 2, 1) * self._times  # once on the way to others, once for itself
        back = np.where(uncached, 0.0, self._sizes)
        # Sums from the beginning: what lies between two units is a difference of two of them.
        kept = _sums_of(~drop, self._sizes)
        again = _sums_of(drop, back)
        spent = _sums_of(drop, cost)
        # A unit that leads beyond the cut is kept after all, unless it can be made at once from
        # what is kept: otherwise all of its stretch would have to come back for what lies beyond.
        deep = drop & ~shallow
        members = []
        row = []
        for number, cut in enumerate(self._cuts.tolist()):
            starts = self._starts[: number + 1]
            crossing = np.nonzero(deep[: cut + 1] & (last[: cut + 1] > cut))[0]
            members.append(crossing)
            # Of those the ones in the stretch: a stretch begins at each of the earlier cuts.
            first = np.searchsorted(crossing, starts, side="right")
            tails = np.zeros((3, len(crossing) + 1))
            for index, column in enumerate((self._sizes, back, cost)):
                tails[index, :-1] = np.cumsum(column[crossing][::-1])[::-1]
            held, held_back, saved = tails[:, first]
            stays = kept[cut + 1] - kept[starts + 1] + held
            peak = stays + again[cut + 1] - again[starts + 1] - held_back + self._over[number, : number + 1]
            row.append((stays, peak, np.maximum(spent[cut + 1] - spent[starts + 1] - saved, 0.0)))
        self._drops.append(drop)
        self._members.append(members)
        return row

    def solve(self, budget: float) -> Choice | None:
        """The least extra time, as far as sums can tell; ``None`` if nothing fits."""
        kept = np.zeros(1)
        spent = np.zeros(1)  # of all points so far
        owner = np.zeros(1, dtype=int)  # which start they stand at
        origin: list[tuple[int, int, int]] = [(-1, 0, 0)]  # point before, price, cut
        for number in range(len(self._cuts)):
            fits = kept + self._peak[number][:, owner] <= budget
            price, point = np.nonzero(fits)
            then_kept = (kept + self._kept[number][:, owner])[fits]
            then_spent = (spent + self._seconds[number][:, owner])[fits]
            front = _front(then_kept, then_spent)
            if number == len(self._cuts) - 1:
                if not len(front):
                    return None
                winner = front[np.argmin(then_spent[front])]
                return self._choice((int(point[winner]), int(price[winner]), number), origin)
            kept = np.concatenate([kept, then_kept[front]])
            spent = np.concatenate([spent, then_spent[front]])
            owner = np.concatenate([owner, np.full(len(front), number + 1)])
            origin += [(int(point[index]), int(price[index]), number) for index in front]
        raise AssertionError("the last cut ends the loop")

    def _choice(self, step: tuple[int, int, int], origin: list[tuple[int, int, int]]) -> Choice:
        dropped: set[int] = set()
        while step[0] >= 0:
            point, price, number = step
            before = origin[point]
            start = -1 if before[0] < 0 else int(self._cuts[before[2]])
            stop = int(self._cuts[number])
            inside = np.nonzero(self._drops[price][start + 1 : stop + 1])[0] + start + 1
            members = self._members[price][number]
            dropped |= set(inside.tolist()) - set(members[members > start].tolist())
            step = before
        chosen = frozenset(dropped)
        return Choice(chosen, chosen & frozenset(np.nonzero(self._uncached)[0].tolist()))


def _sums_of(mask: np.ndarray, column: np.ndarray) -> np.ndarray:
    """The sums of ``column``, where ``mask`` holds, before each unit and after the last."""
    sums: np.ndarray = np.concatenate([[0.0], np.cumsum(np.where(mask, column, 0.0))])
    return sums


def _front(kept: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """Indices of the points that no other beats, thinned out evenly."""
    if not len(kept):
        return np.zeros(0, dtype=int)
    bins = (kept * (_BINS / max(float(kept.max()), 1.0))).astype(int)  # sorting all of them would take long
    lowest = np.full(_BINS + 2, np.inf)
    np.minimum.at(lowest, bins + 1, spent)
    below = np.minimum.accumulate(lowest)
    rest = np.nonzero((spent == lowest[bins + 1]) & (spent < below[bins]))[0]
    order = rest[np.lexsort((spent[rest], kept[rest]))]
    lowest = np.minimum.accumulate(spent[order])
    front: np.ndarray = order[np.concatenate([[True], lowest[1:] < lowest[:-1]])]
    if len(front) > _MOST_POINTS:
        front = front[np.unique(np.linspace(0, len(front) - 1, _MOST_POINTS).round().astype(int))]
    return front


def _thinned(cuts: Sequence[int], most: int) -> list[int]:
    if len(cuts) <= most:
        return list(cuts)
    return [cuts[round(index * (len(cuts) - 1) / (most - 1))] for index in range(most)]


def _prices(times: np.ndarray, sizes: np.ndarray, droppable: np.ndarray) -> list[float]:
    """Seconds per byte: a few between the cheapest and the costliest unit."""
    rates = np.sort((times / np.maximum(sizes, 1))[droppable])
    if not len(rates):
        return [-1.0]
    picks = np.unique(np.linspace(0, len(rates) - 1, _PRICES).round().astype(int))
    return [-1.0, *(float(rates[select_output]) * (1 + 1e-9) for select_output in picks)]


def _overheads(problem: "Problem") -> np.ndarray:
    """Bytes beside the units, at the most, while backward is at each unit: gradients in flight and the like."""
    profile = problem.profile
    units = problem.units
    events = len(profile.curve)
    start = profile.forward_events
    change = np.zeros(events + 1)
    position = np.full(events, -1)
    for index, unit in enumerate(units):
        span = profile.storages[profile.values[unit.values[0]].storage]
        if span.unused < span.freed:
            change[min(span.unused + 1, events)] += unit.num_bytes
            change[min(span.freed, events)] -= unit.num_bytes
        position[start : span.freed] = np.maximum(position[start : span.freed], index)
    beside = np.array(profile.curve) - np.cumsum(change)[:events]
    result = np.zeros(len(units))
    for event in range(start, events):
        if position[event] >= 0:
            result[position[event]] = max(result[position[event]], beside[event])
    return result
