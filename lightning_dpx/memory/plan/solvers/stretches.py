"""Dynamic programming over stretches between cuts: the least extra time within a budget, by sums of units.

    units      0  1  2  3 | 4  5  6  7 | 8  9 10 11 | ...           cut: what later units are computed from is kept
    stretch    keep or drop each unit by its price; what is dropped comes back together when backward gets here

Within a stretch a unit is dropped if computing it costs at most ``price`` seconds per byte. The program chooses the
cuts, and a price for every stretch. A partial solution is a pair (bytes kept so far, extra time), and only those that
no other beats in both survive; a stretch is possible if what is kept before and in it, what comes back, and the
gradients in flight fit together. That reaches past a fixed segment length: early stretches may be longer, because by
then backward has freed the rest.

Peaks are estimates here; :mod:`lightning_dpx.memory.plan.planners.optimal` asks the exact forecast about what it finds.

Related: rotor (Beaumont et al., 2019) for chains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_dpx.memory.plan.choice import Choice

if TYPE_CHECKING:
    from lightning_dpx.memory.plan.problem import Problem

_MOST_CUTS = 100
_MOST_POINTS = 24  # that are kept of those that end at one cut
_PRICES = 6
_DROPS_NOTHING = -1.0  # seconds per byte: no unit is computed in less than no time
_BINS = 1024  # of bytes
_MANY_INPUTS = 4  # units: what is computed from more brings much of the step back with it
_CHEAP = 0.25  # of the costliest unit's seconds per byte


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
    """With units that are computed from many others and without, with cheap ones forgotten after every use and not."""
    units = problem.units
    can = np.array([unit.droppable for unit in units], bool)
    rates = np.array([unit.seconds / max(1, unit.num_bytes) for unit in units], float)
    # To forget what is cheap after every use costs little, and a stretch comes back without it.
    cheap = can & (rates <= _CHEAP * rates[can].max(initial=0.0))
    cheap &= np.array([bool(unit.inputs) for unit in units], bool)  # what is offloaded or compressed is not computed
    nothing = np.zeros(len(units), bool)
    uncached = np.zeros(len(units), bool)
    for index in np.nonzero(cheap)[0].tolist():  # never one from another, or the work would double at every step
        uncached[index] = not any(uncached[source] for source in units[index].inputs)
    far = np.array([len(unit.inputs) > _MANY_INPUTS for unit in units], bool)
    # Pinning no unit down, or forgetting none, would solve the same problem twice.
    pinned = [can, can & ~far] if (far & can).any() else [can]
    forgotten = [nothing, uncached] if uncached.any() else [nothing]
    return [Variant(problem, droppable, after_use) for droppable in pinned for after_use in forgotten]


@dataclass(frozen=True, slots=True)
class _Stretches:
    """The stretches that end at one cut, for each price (P) and each start (S): estimates, by sums over their units.

    Attributes:
        kept_bytes: What stays of a stretch, for itself and for what lies beyond the cut (P x S).
        peak_bytes: The most at a time while backward is in it, beyond what stretches before it keep (P x S).
        extra_seconds: To compute again what it drops (P x S).
        leading_on: For each price, the units up to the cut that are kept though the price drops them: what lies beyond
            is computed from them.
    """

    kept_bytes: np.ndarray
    peak_bytes: np.ndarray
    extra_seconds: np.ndarray
    leading_on: list[np.ndarray]


class StretchTable:
    """What every stretch would keep, hold and cost at every price, and the search for the best row of them.

                         start s              cut c
        units      ... 4 | 5   6   7   8   9 | 10 ...
        at price p       | -   -   +   -   ^ |            - dropped   + kept   ^ leads on: kept for 10
        forward          kept_bytes[p, s]     of + and ^
        backward         peak_bytes[p, s]     of all, as - come back, and of the most that passes beside them
                         extra_seconds[p, s]  of -

    Args:
        variant: Which units may be dropped.
    """

    def __init__(self, variant: Variant) -> None:
        problem = variant.problem
        units = problem.units
        self._variant = variant
        # All pairs of cuts are looked at, for every price: the time grows with the square of their
        # number.
        cuts = _thinned([cut for cut in problem.cuts if cut != len(units) - 1], _MOST_CUTS)
        self._cuts = np.array([*cuts, len(units) - 1])  # a stretch ends with the unit of its cut
        self._starts = np.concatenate([[-1], self._cuts[:-1]])  # and begins behind that of an earlier one
        self._num_bytes = np.array([unit.num_bytes for unit in units], dtype=np.float64)
        self._seconds = np.array([unit.seconds for unit in units])
        # By price, which units it drops.
        self._dropped: list[np.ndarray] = []
        for price in _prices(self._seconds, self._num_bytes, variant.droppable):
            self._dropped.append(variant.droppable & (self._seconds <= price * self._num_bytes))
        beside = self._most_beside()
        by_price = [self._stretches_at_price(dropped, beside) for dropped in self._dropped]
        self._ending_at: list[_Stretches] = []  # by cut
        for of_cut in zip(*by_price, strict=True):  # what each price makes of one cut
            kept, peaks, seconds, leading_on = zip(*of_cut, strict=True)
            self._ending_at.append(_Stretches(np.stack(kept), np.stack(peaks), np.stack(seconds), list(leading_on)))

    def _most_beside(self) -> np.ndarray:
        """The most bytes that are there beside the units of a stretch, while backward is in it (cut x start)."""
        beside = np.append(_bytes_beside(self._variant.problem), 0.0)  # there may be no unit at all
        highest = [np.maximum.accumulate(beside[start + 1 :]) for start in self._starts.tolist()]
        last_of_stretch = np.maximum(self._cuts[:, None] - self._starts - 1, 0)
        pairs = zip(highest, last_of_stretch.T, strict=True)
        return np.stack([most[last] for most, last in pairs], axis=1)

    def _stretches_at_price(
        self, dropped: np.ndarray, beside: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """For each cut, the row of one price in the arrays of :class:`_Stretches`."""
        units = self._variant.problem.units
        last_use = np.arange(len(units))
        is_shallow = np.zeros(len(units), bool)  # computed from kept units alone
        is_input = np.zeros(len(units), bool)  # of another dropped one
        for index in np.nonzero(dropped)[0].tolist():
            sources = units[index].inputs
            for source in sources:
                last_use[source] = max(last_use[source], index)
                is_input[source] = True
            is_shallow[index] = not any(dropped[source] for source in sources)
        uncached = dropped & self._variant.uncached
        seconds = np.where(uncached & is_input, 2, 1) * self._seconds  # once on the way to others, once for itself
        bytes_back = np.where(uncached, 0.0, self._num_bytes)
        # Sums from the beginning: what lies between two units is a difference of two of them.
        sum_kept = _sums_of(~dropped, self._num_bytes)
        sum_back = _sums_of(dropped, bytes_back)
        sum_seconds = _sums_of(dropped, seconds)
        # A unit that leads beyond the cut is kept after all, unless it can be made at once from
        # what is kept: otherwise all of its stretch would have to come back for what lies beyond.
        may_lead_on = dropped & ~is_shallow
        rows = []
        for number, cut in enumerate(self._cuts.tolist()):
            starts = self._starts[: number + 1]
            leading_on = np.nonzero(may_lead_on[: cut + 1] & (last_use[: cut + 1] > cut))[0]
            # Of those the ones in the stretch: a stretch begins at each of the earlier cuts.
            first = np.searchsorted(leading_on, starts, side="right")
            tails = np.zeros((3, len(leading_on) + 1))
            for row, column in enumerate((self._num_bytes, bytes_back, seconds)):
                tails[row, :-1] = np.cumsum(column[leading_on][::-1])[::-1]
            lead_bytes, lead_back, lead_seconds = tails[:, first]
            kept = sum_kept[cut + 1] - sum_kept[starts + 1] + lead_bytes
            back = sum_back[cut + 1] - sum_back[starts + 1] - lead_back
            peak = kept + back + beside[number, : number + 1]
            spent = np.maximum(sum_seconds[cut + 1] - sum_seconds[starts + 1] - lead_seconds, 0.0)
            rows.append((kept, peak, spent, leading_on))
        return rows

    def solve(self, budget: float) -> Choice | None:
        """The least extra time within a budget in bytes, as far as sums can tell; ``None`` if nothing fits."""
        # A point is a row of stretches from the first unit to a cut. Of all points so far:
        kept = np.zeros(1)  # bytes
        spent = np.zeros(1)  # seconds
        ends_at = np.zeros(1, dtype=int)  # number of the start behind them
        origin = [_Origin(before=-1, price=0, cut=0)]
        for number, stretches in enumerate(self._ending_at):
            # Each point, with a stretch more from where it ends to this cut, at each price.
            fits = kept + stretches.peak_bytes[:, ends_at] <= budget
            price, point = np.nonzero(fits)
            then_kept = (kept + stretches.kept_bytes[:, ends_at])[fits]
            then_spent = (spent + stretches.extra_seconds[:, ends_at])[fits]
            front = _front(then_kept, then_spent)
            if number == len(self._cuts) - 1:
                if not len(front):
                    return None
                winner = front[np.argmin(then_spent[front])]
                return self._choice(_Origin(int(point[winner]), int(price[winner]), number), origin)
            kept = np.concatenate([kept, then_kept[front]])
            spent = np.concatenate([spent, then_spent[front]])
            ends_at = np.concatenate([ends_at, np.full(len(front), number + 1)])
            origin += [_Origin(int(point[index]), int(price[index]), number) for index in front]
        raise AssertionError("the last cut ends the loop")

    def _choice(self, step: "_Origin", origin: list["_Origin"]) -> Choice:
        """What the stretches drop that lead to ``step``, from the last to the first."""
        dropped: set[int] = set()
        while step.before >= 0:
            before = origin[step.before]
            start = -1 if before.before < 0 else int(self._cuts[before.cut])
            stop = int(self._cuts[step.cut])
            inside = np.nonzero(self._dropped[step.price][start + 1 : stop + 1])[0] + start + 1
            leading_on = self._ending_at[step.cut].leading_on[step.price]
            dropped |= set(inside.tolist()) - set(leading_on[leading_on > start].tolist())
            step = before
        chosen = frozenset(dropped)
        return Choice(chosen, chosen & frozenset(np.nonzero(self._variant.uncached)[0].tolist()))


class _Origin(NamedTuple):
    """How a point came to be: the point before it, and the price and the cut (by number) of its last stretch."""

    before: int
    price: int
    cut: int


def _sums_of(mask: np.ndarray, column: np.ndarray) -> np.ndarray:
    """The sums of ``column``, where ``mask`` holds, before each unit and after the last."""
    sums: np.ndarray = np.concatenate([[0.0], np.cumsum(np.where(mask, column, 0.0))])
    return sums


def _front(kept: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """Indices of the points that no other beats in bytes and in seconds, thinned out evenly."""
    if not len(kept):
        return np.zeros(0, dtype=int)
    # Sorting all of them would take long: of the points in a bin of bytes only the quickest stays, and only if it is
    # quicker than all with fewer bytes.
    bins = (kept * (_BINS / max(float(kept.max()), 1.0))).astype(int)
    quickest = np.full(_BINS + 2, np.inf)
    np.minimum.at(quickest, bins + 1, spent)
    quickest_below = np.minimum.accumulate(quickest)
    unbeaten = np.nonzero((spent == quickest[bins + 1]) & (spent < quickest_below[bins]))[0]
    order = unbeaten[np.lexsort((spent[unbeaten], kept[unbeaten]))]
    least_so_far = np.minimum.accumulate(spent[order])
    front: np.ndarray = order[np.concatenate([[True], least_so_far[1:] < least_so_far[:-1]])]
    if len(front) > _MOST_POINTS:
        front = front[np.unique(np.linspace(0, len(front) - 1, _MOST_POINTS).round().astype(int))]
    return front


def _thinned(cuts: Sequence[int], most: int) -> list[int]:
    if len(cuts) <= most:
        return list(cuts)
    return [cuts[round(index * (len(cuts) - 1) / (most - 1))] for index in range(most)]


def _prices(seconds: np.ndarray, num_bytes: np.ndarray, droppable: np.ndarray) -> list[float]:
    """Seconds per byte: one at which nothing is dropped, and a few from the cheapest unit to the costliest."""
    rates = np.sort((seconds / np.maximum(num_bytes, 1))[droppable])
    if not len(rates):
        return [_DROPS_NOTHING]
    picks = np.unique(np.linspace(0, len(rates) - 1, _PRICES).round().astype(int))
    # A little more than the rate: the product with the bytes is rounded.
    return [_DROPS_NOTHING, *(float(rates[pick]) * (1 + 1e-9) for pick in picks)]


def _bytes_beside(problem: "Problem") -> np.ndarray:
    """Bytes beside the units, at the most, while backward is at each unit: gradients in flight and the like."""
    profile = problem.profile
    units = problem.units
    num_events = len(profile.curve)
    change = np.zeros(num_events + 1)  # of the bytes of units, from one event to the next
    unit_at = np.full(num_events, -1)  # which unit backward is at: the last one that is still there
    for index, unit in enumerate(units):
        span = profile.storages[profile.values[unit.values[0]].storage]
        if span.unused < span.freed:
            change[min(span.unused + 1, num_events)] += unit.num_bytes
            change[min(span.freed, num_events)] -= unit.num_bytes
        in_backward = slice(profile.forward_events, span.freed)
        unit_at[in_backward] = np.maximum(unit_at[in_backward], index)
    beside = np.array(profile.curve) - np.cumsum(change)[:num_events]
    result = np.zeros(len(units))
    for event in range(profile.forward_events, num_events):
        if unit_at[event] >= 0:
            result[unit_at[event]] = max(result[unit_at[event]], beside[event])
    return result
