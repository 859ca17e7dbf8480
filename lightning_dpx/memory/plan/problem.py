"""What planners have in common: the profile as a list of units, their registry, and the choice among them.

A unit is one storage with the values in it: dropping a part of a storage frees nothing. Units stand in the order of
forward. A planner is a pure function from a profile and a budget to the units to drop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from lightning_dpx.memory.plan.choice import Choice as Choice  # planners take it from here
from lightning_dpx.memory.plan.forecast import Forecast, Forecaster
from lightning_dpx.memory.plan.solvers.bounds import Relaxation
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.progress import at
from lightning_dpx.registry import Registry

MOST_TIMES = 40  # that values are computed in a step, on average: as few bytes as possible within reason
P = TypeVar("P", bound="type[Planner]")
_Key = tuple[frozenset[int], frozenset[int]]  # indices of values: that are dropped, that go after every use


@dataclass(frozen=True, slots=True)
class Unit:
    """Values that share a storage.

    Attributes:
        values: Their indices in the profile.
        num_bytes: What dropping them frees.
        seconds: To compute them again from other units.
        inputs: These other units.
        droppable: Whether that is possible and frees anything.
    """

    values: tuple[int, ...]
    num_bytes: int
    seconds: float
    inputs: tuple[int, ...]
    droppable: bool


class Problem:
    """A profile, as planners see it.

    Attributes:
        profile: Where it comes from.
        units: In the order of forward.
        proved: For each budget, seconds that no choice within it goes below, where a planner has found that out.
        lowered: Choices with low peaks, where a planner has looked for them.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.proved: dict[int, float] = {}
        self.lowered: list[Choice] = []
        self._forecaster = Forecaster(profile, MOST_TIMES)
        self._forecasts: dict[_Key, Forecast] = {}
        self._beyond: dict[_Key, tuple[int, float]] = {}  # bytes and seconds, one of which a choice takes more of
        # By storage, because values that share one (a tensor and its views) free it only together.
        members: dict[int, list[int]] = {}
        for index, value in enumerate(profile.values):
            if value.storage >= 0:
                members.setdefault(value.storage, []).append(index)
        self._unit_of: dict[int, int] = {}
        for unit, values in enumerate(members.values()):
            self._unit_of.update(dict.fromkeys(values, unit))
        self.units: list[Unit] = [
            self._unit(number, storage, values) for number, (storage, values) in enumerate(members.items())
        ]

    def _unit(self, number: int, storage: int, values: list[int]) -> Unit:
        everything = self.profile.values
        seconds = 0.0
        inputs = set()
        stack = list(values)
        seen = set(values)
        while stack:  # through what is not saved, up to other units
            index = stack.pop()
            seconds += everything[index].seconds
            for source in everything[index].inputs:
                unit = self._unit_of.get(source)
                if unit is None:
                    if source not in seen:  # several may be computed from it, and it counts once
                        seen.add(source)
                        stack.append(source)
                elif unit != number:
                    inputs.add(unit)
        span = self.profile.storages[storage]
        # Memory that is in use as long as it is there is not freed by a drop; and of a storage all
        # values have to be made again.
        droppable = span.unused < span.freed and not any(everything[index].refused for index in values)
        # A mask leaves a compact form of itself.
        stays = sum(everything[index].compact for index in values)
        return Unit(tuple(values), span.num_bytes - stays, seconds, tuple(sorted(inputs)), droppable)

    def values_of(self, units: Iterable[int]) -> frozenset[int]:
        """Indices of the values in ``units``."""
        found: set[int] = set()
        for unit in units:
            found.update(self.units[unit].values)
        return frozenset(found)

    @property
    def work(self) -> int:
        """What forecasts and timelines have gone through so far; see :class:`Forecaster`."""
        return self._forecaster.work

    def forecast(self, choice: Choice) -> Forecast:
        """The step with this choice."""
        return self.forecast_values(self.values_of(choice.dropped), self.values_of(choice.uncached))

    def forecast_values(self, dropped: Collection[int], uncached: Collection[int]) -> Forecast:
        """The same forecast, asked for by values; answers are remembered."""
        # Planners come by the same choice on several ways, and a forecast plays the whole step.
        key = frozenset(dropped), frozenset(uncached)
        if key not in self._forecasts:
            at(f"choosing what to compute again, {len(self._forecasts)} choices tried")
            self._forecasts[key] = self._forecaster.forecast(*key)
        return self._forecasts[key]

    def forecast_within(self, choice: Choice, budget: int, seconds: float) -> Forecast | None:
        """The step with this choice, or ``None`` where it takes more bytes or more time, which shows early in most."""
        key = self.values_of(choice.dropped), self.values_of(choice.uncached)
        result = self._forecasts.get(key)
        if result is None:
            beyond = self._beyond.get(key)
            if beyond is not None and beyond[0] >= budget and beyond[1] >= seconds:
                return None
            at(f"choosing what to compute again, {len(self._forecasts)} choices tried")
            result = self._forecaster.forecast(*key, most_bytes=budget, most_seconds=seconds)
            # Of what was not played to its end no more is known.
            if result.seconds == float("inf"):
                self._beyond[key] = budget, seconds
                return None
            self._forecasts[key] = result
        is_within = result.peak <= budget and result.seconds <= seconds
        if is_within:
            return result
        return None

    def timeline(self, choice: Choice) -> np.ndarray:
        """Bytes at every event of the step with this choice; its forecast is known then as well."""
        key = self.values_of(choice.dropped), self.values_of(choice.uncached)
        at(f"choosing what to compute again, {len(self._forecasts)} choices tried")
        # The curve has a number for every event, and is not remembered.
        self._forecasts[key], curve = self._forecaster.timeline(*key)
        return curve

    @cached_property
    def relaxation(self) -> Relaxation:
        """What every choice must hold and must pay."""
        return Relaxation(self)

    @cached_property
    def droppable(self) -> tuple[int, ...]:
        """The units that may be dropped."""
        return tuple(index for index, unit in enumerate(self.units) if unit.droppable)

    @cached_property
    def forgettable(self) -> frozenset[int]:
        """The units that may be uncached; what is offloaded comes back in one way."""
        values = self.profile.values
        found = set[int]()
        for unit in self.droppable:
            if not any(values[index].offloaded for index in self.units[unit].values):
                found.add(unit)
        return frozenset(found)

    def is_nested(self, choice: Choice) -> bool:
        """Whether a unit that goes after every use is computed from another such one: little memory for much time."""
        return any(not choice.uncached.isdisjoint(self.units[unit].inputs) for unit in choice.uncached)

    @cached_property
    def unnested(self) -> frozenset[int]:
        """The forgettable units in order, without those computed from one taken before."""
        found = set[int]()
        # In the order of forward, so that inputs are decided about before what is computed from
        # them.
        for index in sorted(self.forgettable):
            if found.isdisjoint(self.units[index].inputs):
                found.add(index)
        return frozenset(found)

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """The last unit that is computed from each unit; the unit itself where there is none."""
        last = list(range(len(self.units)))
        for index, unit in enumerate(self.units):
            if unit.droppable:
                for source in unit.inputs:
                    last[source] = max(last[source], index)
        return tuple(last)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Units after which few bytes lead on: where a stretch that is computed again may well begin."""
        crossing = 0
        width = []
        leaving = [0] * (len(self.units) + 1)
        # Bytes that lead on are those of units from which later ones are computed. Where they are
        # fewest, little has to be kept for all that follows to be computed again.
        for index, unit in enumerate(self.units):
            if unit.droppable and self.last_use[index] > index:
                crossing += unit.num_bytes
                leaving[self.last_use[index]] += unit.num_bytes
            crossing -= leaving[index]
            width.append(crossing)
        found = []
        for index in range(len(width) - 1):
            before = width[max(0, index - 1)]
            after = width[index + 1]
            if width[index] <= before and width[index] <= after:
                found.append(index)
        return tuple(found)


class Planner(ABC):
    """Chooses what to drop.

    Attributes:
        name: By which it is known.
        replays: Whether it is asked about steps in which module calls are replayed as a whole, too.
    """

    name: str
    replays = False

    @abstractmethod
    def choose(self, problem: Problem, budget: int | None) -> Choice:
        """What to drop.

        Args:
            problem: What can be dropped.
            budget: Bytes of activations; ``None`` for as few as this planner can reach.

        Returns:
            The best choice within the budget, or the one with the lowest peak if none is.
        """


PLANNERS: Registry[Planner] = Registry("planner", Planner)


def register_planner(name: str) -> Callable[[P], P]:
    """A class decorator that makes a :class:`Planner` available as ``planner=name``.

    Args:
        name: Of the planner. A registered one of the same class may be registered again.

    Raises:
        ConfigurationError: ``name`` is no name, or belongs to another class already; or what is decorated is no
            subclass of ``Planner``.

    Examples:
        >>> from lightning_dpx.memory.plan.problem import Choice, Planner
        >>> @dpx.register_planner("keep_all")
        ... class KeepAll(Planner):
        ...     '''Computes nothing again.'''
        ...     def choose(self, problem, budget):
        ...         return Choice()
    """

    def add(planner: P) -> P:
        # Refuses what is no planner, before anything is written on it.
        PLANNERS.register(name)(planner)
        planner.name = name
        return planner

    return add


def best(problem: Problem, choices: Sequence[Choice], budget: int | None) -> Choice:
    """The fastest choice within the budget, else the smallest."""
    return min(choices, key=lambda choice: problem.forecast(choice).rank(budget))
