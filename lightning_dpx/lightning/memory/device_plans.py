"""The plans of a run, device by device: what was decided for the replicas on each, and what is followed there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.memory.profiled_steps import SeenStep
from lightning_dpx.memory import MemoryPlan, Planner, Profile, plan_shapes, summary
from lightning_dpx.units import format_mib

_TIGHTER = 0.8  # of the activations of a plan that did not fit


@dataclass(frozen=True, slots=True)
class DeviceDecision:
    """What was decided for the replicas on one device.

    Attributes:
        devices: The devices that a step of theirs runs on.
        seen: Their steps, one of each shape.
        plans: One for each device; they decide alike.
        worst: For each device, which of the steps leaves least room there.
        limits: For each device, the bytes that everything on it may take.
        held: For each device, the bytes of that which are no activations.
        counted: For each device, bytes of gradients that are counted among activations, as they come within a step.
    """

    devices: tuple[torch.device, ...]
    seen: tuple[SeenStep, ...]
    plans: tuple[MemoryPlan, ...]
    worst: tuple[int, ...]
    limits: tuple[int, ...]
    held: tuple[int, ...]
    counted: tuple[int, ...]

    def worst_step(self, index: int) -> SeenStep:
        """The step that leaves least room on the device at ``index``."""
        return self.seen[self.worst[index]]


class DevicePlans:
    """What was decided, and what follows from it for each device.

    Attributes:
        plans: By device, what is followed.
        profiles: By device, the step that leaves least room there, of those that the plan was made for.
        limits: By device, the bytes that everything there may take, and the number of replicas that share it.
        counted: By device, bytes of gradients in the peak of its plan.
        decided: By a replica's device, what was decided there.
    """

    def __init__(self) -> None:
        self.plans: dict[torch.device, MemoryPlan] = {}
        self.profiles: dict[torch.device, Profile] = {}
        self.limits: dict[torch.device, tuple[int, int]] = {}
        self.counted: dict[torch.device, int] = {}
        self.decided: dict[torch.device, DeviceDecision] = {}

    def __bool__(self) -> bool:
        return bool(self.decided)

    def steps(self) -> Iterator[SeenStep]:
        """All steps that plans were made for."""
        # Of all shapes that were seen: one plan has to do for them.
        for one in self.decided.values():
            yield from one.seen

    def decide(self, decided: Mapping[torch.device, DeviceDecision]) -> None:
        """These are the plans from now on, by a replica's device; those of other devices stay."""
        self.decided.update(decided)
        # Of the latest plans: a device may have fewer replicas, or less room, than before.
        for one in decided.values():
            for index, device in enumerate(one.devices):
                self.limits[device] = (one.limits[index], one.worst_step(index).sharing[index])
                self.counted[device] = one.counted[index]
        self._list_plans()

    def forget_decisions(self) -> None:
        """The steps that plans were made for are not those of this run; until there are other plans these hold."""
        self.decided.clear()

    def forget(self) -> None:
        """There are no plans any more."""
        self.plans.clear()
        self.profiles.clear()
        self.decided.clear()

    def tighten(self, module: nn.Module, planner: Planner) -> None:
        """All plans take less from now on.

        Raises:
            BudgetError: nothing takes less.
        """
        self.decided = {home: _tighter(module, one, planner) for home, one in self.decided.items()}
        self._list_plans()

    def _list_plans(self) -> None:
        self.plans = {}
        self.profiles = {}
        for decided in self.decided.values():
            for index, (device, plan) in enumerate(zip(decided.devices, decided.plans, strict=True)):
                if device in self.plans and (self.plans[device].peak or 0) >= (plan.peak or 0):
                    continue  # several replicas are shifted there
                self.plans[device] = plan
                self.profiles[device] = decided.seen[decided.worst[index]].profiles[index]

    def plans_and_profiles(self) -> dict[torch.device, tuple[MemoryPlan, Profile | None]]:
        """By device, what is followed, and the step that leaves least room there, where one was profiled."""
        return {device: (plan, self.profiles.get(device)) for device, plan in self.plans.items()}

    def describe(self) -> str:
        """A summary of the plans, device by device, in words."""
        return "; ".join(f"on {device}, {summary(plan)}" for device, plan in self.plans.items())

    def forecast(self, device: torch.device) -> tuple[int, int]:
        """Bytes of activations on ``device`` at their peak, and the budget for everything there; 0 without.

        With the gradients that are counted among them.
        """
        plan = self.plans.get(device)
        if plan is None:
            return 0, 0
        limit, sharing = self.limits.get(device, (0, 1))
        return (plan.peak or 0) * sharing, limit

    def activations(self, device: torch.device) -> tuple[int, int]:
        """The same beside all gradients, whether they are there at that time or not."""
        # A monitor weighs gradients by themselves, and they would count twice.
        peak, limit = self.forecast(device)
        return max(0, peak - self.counted.get(device, 0)), limit

    def advice(self, planner: Planner, *, is_repeated: bool = False) -> str:
        """Advice, in sentences, for a run that is out of memory.

        Args:
            planner: Who decides.
            is_repeated: Whether the plans were made as a step ran out of memory, without a budget.
        """
        if not self.plans:
            return (
                "DPXStrategy(memory_budget='auto') computes again what does not fit; on_oom='replan' does so once it "
                "is needed. Otherwise use a smaller batch."
            )
        said = []
        for device, plan in self.plans.items():
            budget = f" for a budget of {format_mib(self.limits[device][0])}" if device in self.limits else ""
            said.append(f"The plan of {device}{budget} predicted {format_mib(plan.peak or 0)} of activations.")
            decided = next((one for one in self.decided.values() if device in one.devices), None)
            if decided is None:
                continue
            try:
                # An empty module does, as this plan is described and never followed.
                less = _tighter(nn.Module(), decided, planner).plans[decided.devices.index(device)]
            except BudgetError:
                said.append("No plan takes much less: use a smaller batch.")
                continue
            way = "lower memory_budget, or on_oom='replan'"
            if is_repeated:
                way = "give memory_budget, which plans for it before a step"
            said.append(
                f"One of {format_mib(less.peak or 0)} costs {(less.recompute_share or 0):.1%} of a step: {way}."
            )
        return " ".join(said)


def _tighter(module: nn.Module, decided: DeviceDecision, planner: Planner) -> DeviceDecision:
    """The same decision, planned anew for a part of the peak that each device has by its plan now.

    Raises:
        BudgetError: nothing takes so little.
    """
    steps = [step.profiles for step in decided.seen]
    now = [plan.peak or plan.unplanned_peak for plan in decided.plans]
    rooms = [int(peak * _TIGHTER) for peak in now]
    try:
        shared = plan_shapes(module, steps, [rooms] * len(steps), planner, decided.plans[0])
    except BudgetError as error:
        # With one device there is no other that could give more.
        if len(rooms) == 1:
            raise
        # Which of the devices ran out is not known: the other one gives more.
        rooms[error.device_index] = now[error.device_index]
        shared = plan_shapes(module, steps, [rooms] * len(steps), planner, decided.plans[0])
    return replace(decided, plans=shared.plans, worst=shared.worst)
