"""Steps that save what was planned for, and more of it, though their batches are no larger: they are planned for anew.

Only a step that has run shows it, so the first such step takes more than the plan allows. The next plan is for the most
that was seen, and leaves room for what may still come.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from lightning_dpx.lightning.memory.device_plans import DeviceDecision, DevicePlans
from lightning_dpx.lightning.memory.profiled_steps import SeenStep
from lightning_dpx.memory import AppliedPlan, applied_plan
from lightning_dpx.memory.execute.grown_values import GrownValues
from lightning_dpx.memory.profile.scaling import scaled
from lightning_dpx.replicas import ReplicaSet

_UNNOTICED = 1.002  # times a budget


class GrownSteps:
    """What steps have saved beside what they were planned with, by the device of their replicas."""

    def __init__(self) -> None:
        self._stopped: set[torch.device] = set()

    @staticmethod
    def expect(applied: AppliedPlan, decided: DeviceDecision) -> None:
        """Has growth told beside the step that a plan is there for: it may have been made for a smaller one, and kept.

        Args:
            applied: The plan on a replica.
            decided: What was decided for its device.
        """
        sizes = {decision.name: decision.num_bytes for decision in decided.plans[0].decisions}
        # The profile of a device knows nothing of how large a value on another one is.
        for profile in decided.worst_step(0).profiles:
            for value in profile.values:
                if value.name in sizes:
                    sizes[value.name] = max(sizes[value.name], value.num_bytes)
        applied.expect_sizes(sizes)

    def to_plan(self, replicas: ReplicaSet, devices: DevicePlans) -> dict[torch.device, SeenStep]:
        """By a replica's device, steps beyond the budget that were seen since the last plan.

        Args:
            replicas: Whose steps.
            devices: What was decided.
        """
        found = dict[torch.device, SeenStep]()
        for home, growth in _growth_by_home(replicas).items():
            decided = devices.decided.get(home)
            if decided is None or home in self._stopped:
                continue
            plan = decided.plans[0]
            allowed = plan.budget or 0
            if not allowed or (plan.peak or 0) * growth.most <= allowed * _UNNOTICED:
                continue
            # Of evenly spread sizes, a next step is as likely to be larger than all before as each of these was.
            factor = growth.most + (growth.most - 1.0) / max(1, growth.num_forwards)
            worst = decided.worst_step(0)
            # It is a step of as many rows, which were all profiled.
            profiles = tuple(replace(scaled(one, factor), scale=one.scale) for one in worst.profiles)
            found[home] = SeenStep(profiles, worst.sharing, worst.is_joined)
        return found

    def stop(self, homes: Iterable[torch.device]) -> None:
        """No plan keeps such steps within the budget: they are not looked for any more."""
        self._stopped.update(homes)

    def forget(self) -> None:
        """The next run begins."""
        self._stopped.clear()


def _growth_by_home(replicas: ReplicaSet) -> dict[torch.device, GrownValues]:
    """What grew most on every device, of its replicas."""
    most = dict[torch.device, GrownValues]()
    for replica in replicas.replicas:
        applied = applied_plan(replica.module)
        if applied is None or applied.growth is None:
            continue
        before = most.get(replica.device)
        if before is None or applied.growth.most > before.most:
            most[replica.device] = applied.growth
    return most
