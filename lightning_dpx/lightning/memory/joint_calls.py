"""Steps that call more of a module together than any step that memory is planned for.

Layers may be skipped by chance, and experts chosen: each call is known from some profile, and all of them together from
none. So calls are counted where profiles differ in them. When a forward is over whose calls no known step makes all of,
its step is put together from those that make some. Where that exceeds the budget, memory is planned for it, too.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.lightning.memory.device_plans import DeviceDecision
from lightning_dpx.lightning.memory.profiled_steps import SeenStep, by_device
from lightning_dpx.memory import AppliedPlan, MemoryPlan, Profile, applied_plan, forecast_plan
from lightning_dpx.memory.call_names import call_of
from lightning_dpx.memory.profile.joining.call_counts import calls_in, has_calls, varying_paths
from lightning_dpx.memory.profile.joining.join_steps import join_steps
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from lightning_dpx.units import format_mib

_UNNOTICED = 1.002  # times a budget
_FULL = 0.9  # of the bytes of a slice
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


class JointCallsOfDevices:
    """What the replicas on every device call together, step by step."""

    def __init__(self) -> None:
        self._by_home: dict[torch.device, JointCalls] = {}  # by a replica's device
        self._largest: dict[torch.device, int] = {}  # bytes of the largest slice that was planned for, likewise
        self._full: set[torch.device] = set()  # devices of replicas whose slices in this step are as large
        self._has_warned = False

    def forget(self) -> None:
        """The next run begins."""
        self._by_home.clear()
        self._largest.clear()
        self._has_warned = False

    def forget_steps(self) -> None:
        """Drops what is known of steps, which are not those of this run."""
        self._by_home.clear()

    def plan_for(self, decided: Mapping[torch.device, DeviceDecision]) -> None:
        """Looks for steps that call more together than these, by a replica's device."""
        for home, one in decided.items():
            beyond = None
            if home in self._by_home:
                beyond = self._by_home[home].beyond
            self._by_home[home] = JointCalls(one.seen, one.plans, one.devices, beyond)

    def note_size(self, batch_slice: BatchSlice) -> None:
        """Plans are made for slices as large as this one."""
        home = batch_slice.replica.device
        self._largest[home] = max(bytes_of_tensors(batch_slice.batch), self._largest.get(home, 0))

    def count_in(self, home: torch.device, applied: AppliedPlan) -> None:
        """Counts calls in the steps of a replica on ``home``, if any could exceed the budget."""
        if home in self._by_home:
            self._by_home[home].count_in(applied)

    def end_forward(self, replicas: ReplicaSet, option: str) -> None:
        """Tells once if the steps that now begin their backward will exceed the budget, as they call more together.

        Args:
            replicas: Whose steps they are.
            option: What has led to the budget, as a user writes it.
        """
        for replica in replicas.replicas:
            joint = self._by_home.get(replica.device)
            applied = applied_plan(replica.module)
            if joint is None or applied is None:
                continue
            # Profiles are of full slices: what a smaller one takes they do not tell.
            if replica.device not in self._full:
                applied.calls.found.clear()
                continue
            if not joint.look_at(applied) or self._has_warned:
                continue
            self._has_warned = True
            rank_zero_warn(
                f"dpx: a step calls more of {type(replica.module).__name__} together than any that memory was planned "
                f"for: its activations take about {format_mib(joint.peak)}, where {option} leaves "
                f"{format_mib(joint.room)} on {joint.device}. From the "
                "next step on memory is planned for all that such steps have called."
            )

    def to_plan(self, replicas: ReplicaSet, slices: Sequence[BatchSlice], option: str) -> dict[torch.device, SeenStep]:
        """By a replica's device, steps beyond the budget that were seen since, and are of the size of ``slices``."""
        # Asked before every step, and the layers of most models are called in all of them.
        if not any(joint.is_looking for joint in self._by_home.values()):
            return {}
        self.end_forward(replicas, option)  # of steps by hand, whose backwards are not announced
        self._full = self._homes_with_full_slices(slices)
        # A smaller batch leaves more room than the plan may count on; the others wait for one of their size.
        seen: dict[torch.device, SeenStep] = {}
        for home, joint in self._by_home.items():
            if joint.step is not None and home in self._full:
                seen[home] = joint.step
                joint.step = None
        return seen

    def stop(self, homes: Iterable[torch.device]) -> None:
        """No plan keeps such steps within the budget: they are not looked for any more."""
        for home in homes:
            self._by_home[home].stop()

    def _homes_with_full_slices(self, slices: Sequence[BatchSlice]) -> set[torch.device]:
        """The replicas' devices whose slices are about as large as those that memory was planned for."""
        full = set[torch.device]()
        for home, here in by_device(slices).items():
            if bytes_of_tensors(here[0].batch) >= _FULL * self._largest.get(home, 0):
                full.add(home)
        return full


def _kept_values(steps: Sequence[SeenStep], dropped: Collection[str], paths: Collection[str]) -> list[Kept]:
    """The values that stay, of calls of these modules: each once, as large as it is in any of the steps."""
    kept: dict[str, Kept] = {}
    for step in steps:
        for value in step.profiles[0].values:
            path, number = call_of(value.name)
            before = kept.get(value.name, ("", 0, 0))[2]
            if path in paths and value.name not in dropped and value.num_bytes > before:
                kept[value.name] = path, number, value.num_bytes
    return list(kept.values())


def _most_calls(profiles: Sequence[Profile], paths: Sequence[str]) -> dict[str, int]:
    counts = [calls_in(profile) for profile in profiles]
    return {path: max(calls.get(path, 0) for calls in counts) for path in paths}
