"""The steps that the plans of a run were made for: by the shapes of their batches, and by what they save."""

from collections.abc import Iterable, Sequence

from lightning_dpx.lightning.memory.batch_shapes import KnownShapes
from lightning_dpx.lightning.memory.profiled_steps import SeenStep
from lightning_dpx.lightning.memory.unplanned_steps import UnplannedSteps
from lightning_dpx.memory import applied_plan
from lightning_dpx.replicas import BatchSlice, ReplicaSet


class CoveredSteps:
    """Which steps follow the plans that there are, and which need plans of their own."""

    def __init__(self) -> None:
        self._shapes = KnownShapes()
        self._unplanned = UnplannedSteps()

    def add_slices(self, slices: Sequence[BatchSlice]) -> None:
        """From now on slices that are no larger than these follow the plans that there are."""
        for batch_slice in slices:
            self._shapes.add(batch_slice.batch)

    def has_slices(self, slices: Sequence[BatchSlice]) -> bool:
        """Whether plans were made for slices that are at least as large in every dim."""
        return all(self._shapes.covers(batch_slice.batch) for batch_slice in slices)

    @property
    def expects_others(self) -> bool:
        """Whether an earlier step was not one of those that were planned for, so that the next may be such a one."""
        return self._unplanned.expected

    def note_last_step(self, replicas: ReplicaSet) -> None:
        """Notes what the last step has saved that no profile shows: only steps that have run can tell."""
        # Of every replica: their slices may go other ways through the module.
        for replica in replicas.replicas:
            if (applied := applied_plan(replica.module)) is not None:
                self._unplanned.look_back(applied)

    def found_in(self, seen: Iterable[SeenStep]) -> bool:
        """Whether these profiles show what steps have saved that no earlier profile showed."""
        return self._unplanned.found_in(seen)

    def plan_for(self, steps: Iterable[SeenStep]) -> None:
        """Notes that these steps are planned for from now on."""
        self._unplanned.plan_for(steps)

    def forget_slices(self) -> None:
        """Slices of any shape need a plan again."""
        self._shapes = KnownShapes()

    def forget(self) -> None:
        """What was profiled and planned for is no step of this run any more."""
        self.forget_slices()
        self._unplanned = UnplannedSteps()
