"""Steps that call more of a module together than any step that memory is planned for.

Layers may be skipped by chance, and experts chosen: each call is known from some profile, and all of them together from
none. So calls are counted where profiles differ in them. When a forward is over whose calls no known step makes all of,
its step is put together from those that make some. Where that exceeds the budget, memory is planned for it, too.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from lightning_dpx.lightning.memory.seen_steps import SeenStep
from lightning_dpx.memory import AppliedPlan, MemoryPlan, Profile, forecast_plan
from lightning_dpx.memory.profile.joined_steps import calls_in, has_calls, join_steps, varying_paths

_UNNOTICED = 1.002  # times a budget
Kept = tuple[str, int, int]  # path of a module, number of its call, bytes

_MOST_REMEMBERED = 1024  # combinations of calls
_MOST_FORECASTS = 32  # after which only a step that keeps more than all of them is forecast


class JointCalls:
    """What the replicas on one device call together.

    Args:
        seen: The steps that memory is planned for, which were profiled or put together.
        plans: One for each device that a step runs on; they decide alike.
        devices: These devices.
        beyond: Calls of steps that were beyond the budget, by path, and how often each is made.

    Attributes:
        step: One that was made and is beyond the budget, with all others that were; ``None`` without one.
        device: The first device where its activations are too many.
        peak: Bytes that they take there.
        room: Bytes that they may take.
    """

    def __init__(
        self,
        seen: Sequence[SeenStep],
        plans: Sequence[MemoryPlan],
        devices: Sequence[torch.device],
        beyond: Mapping[str, int] | None = None,
    ) -> None:
        self.step: SeenStep | None = None
        self.device: torch.device = devices[0]
        self.peak: int = 0
        self.room: int = 0
        self.beyond: dict[str, int] = dict(beyond or {})
        self._plans = plans
        self._devices = devices
        self._seen = seen
        self._profiled = [step for step in seen if not step.is_joined]
        firsts = [step.profiles[0] for step in self._profiled]
        self._paths = varying_paths(firsts)
        self._kept = _kept_values(self._profiled, plans[0].dropped, self._paths)
        self._forecast = set[frozenset[tuple[str, int]]]()
        self._most_kept = 0
        # Where a step that makes all calls has room, any other one has.
        if self._paths and self._exceeds(self._joined(_most_calls(firsts, self._paths))) is None:
            self._paths = []

    @property
    def is_looking(self) -> bool:
        """Whether any step could exceed the budget, so that calls are counted."""
        return bool(self._paths)

    def count_in(self, applied: AppliedPlan) -> None:
        """Counts calls in the steps that follow this plan, if any could exceed the budget."""
        if self.is_looking:
            applied.count_calls(self._paths)

    def stop(self) -> None:
        """No plan keeps such steps within the budget: they are not looked for any more."""
        self._paths = []

    def look_at(self, applied: AppliedPlan) -> bool:
        """After a forward: whether its step is the first one that is beyond the budget since the plans were made."""
        new = applied.calls.found - self._forecast
        applied.calls.found.clear()
        before = self.step
        for found in new if self.is_looking else ():
            if len(self._forecast) < _MOST_REMEMBERED:
                self._forecast.add(found)
            calls = dict.fromkeys(self._paths, 0) | dict(found)
            kept = self._kept_by(calls)
            # To put a step together and to forecast it takes milliseconds, and of many layers each step
            # may call others.
            is_rarely_more = len(self._forecast) > _MOST_FORECASTS and kept <= self._most_kept
            if is_rarely_more or any(has_calls(step.profiles[0], calls) for step in self._seen):
                continue
            self._most_kept = max(kept, self._most_kept)
            step = self._joined(calls)
            index = self._exceeds(step)
            if index is None:
                continue
            # Not this step alone: one that makes the calls of several such steps would be beyond the budget again.
            for path, number in calls.items():
                self.beyond[path] = max(number, self.beyond.get(path, 0))
            self.step = self._joined(self.beyond)
            self.device = self._devices[index]
            self.peak = forecast_plan(step.profiles[index], self._plans[index]).peak
            self.room = self._plans[index].budget or 0
        return before is None and self.step is not None

    def _exceeds(self, step: SeenStep) -> int | None:
        """The number of the first device on which the step takes more than its plan allows."""
        for index, (profile, plan) in enumerate(zip(step.profiles, self._plans, strict=True)):
            if plan.budget is not None and forecast_plan(profile, plan).peak > plan.budget * _UNNOTICED:
                return index
        return None

    def _joined(self, calls: Mapping[str, int]) -> SeenStep:
        profiles = zip(*(step.profiles for step in self._profiled), strict=True)
        joined = tuple(join_steps(of_device, calls) for of_device in profiles)
        # Which parameters replicas share does not depend on the calls: the most that was seen holds.
        sharing = tuple(map(max, zip(*(step.sharing for step in self._profiled), strict=True)))
        return SeenStep(joined, sharing, is_joined=True)

    def _kept_by(self, calls: Mapping[str, int]) -> int:
        """Bytes that the calls keep, as far as they tell steps apart."""
        kept = 0
        for path, number, num_bytes in self._kept:
            if number <= calls.get(path, 0):
                kept += num_bytes
        return kept


def _kept_values(steps: Sequence[SeenStep], dropped: Collection[str], paths: Collection[str]) -> list[Kept]:
    """The values that stay, of calls of these modules: each once, as large as it is in any of the steps."""
    kept: dict[str, Kept] = {}
    for step in steps:
        for value in step.profiles[0].values:
            # ``path#2:0`` is the first value of the second call of ``path``.
            path, _, number = value.name.rpartition(":")[0].partition("#")
            before = kept.get(value.name, ("", 0, 0))[2]
            if path in paths and value.name not in dropped and value.num_bytes > before:
                kept[value.name] = path, int(number or 1), value.num_bytes
    return list(kept.values())


def _most_calls(profiles: Sequence[Profile], paths: Sequence[str]) -> dict[str, int]:
    counts = [calls_in(profile) for profile in profiles]
    return {path: max(calls.get(path, 0) for calls in counts) for path in paths}
