"""``memory_budget`` and ``plan`` of the strategy: profiles a step of one replica, and puts plans on all of them."""

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_dpx.errors import BudgetError, ConfigurationError
from lightning_dpx.lightning.lightning_api import rank_zero_info
from lightning_dpx.lightning.lightning_compat import trainer_of
from lightning_dpx.lightning.memory.covered_steps import CoveredSteps
from lightning_dpx.lightning.memory.device_plans import DeviceDecision, DevicePlans
from lightning_dpx.lightning.memory.device_rooms import DeviceRooms
from lightning_dpx.lightning.memory.given_plan import follow_given, load_given
from lightning_dpx.lightning.memory.grown_steps import GrownSteps
from lightning_dpx.lightning.memory.joint_calls import JointCallsOfDevices
from lightning_dpx.lightning.memory.loss_probe import leaves_graph, look_for_loss
from lightning_dpx.lightning.memory.peak_check import PeakCheck
from lightning_dpx.lightning.memory.plan_device import MicroBatchFigures, announcement, origin, plan_device
from lightning_dpx.lightning.memory.planning_cache import PlanningCache, shows_progress
from lightning_dpx.lightning.memory.profiled_steps import (
    KnownProfiles,
    SeenStep,
    StepToPlan,
    by_device,
    profiled_steps,
)
from lightning_dpx.lightning.memory.room_check_schedule import RoomCheckSchedule
from lightning_dpx.lightning.memory.rows_that_fit import RowsThatFit
from lightning_dpx.lightning.memory.shadow_slice import rows_of_slice
from lightning_dpx.lightning.memory.slice_loss import NoBackwardError, NoLossError
from lightning_dpx.lightning.memory.static import StaticMemory
from lightning_dpx.lightning.memory.steps_without_loss import StepsWithoutLoss
from lightning_dpx.memory import (
    MemoryPlan,
    Planner,
    applied_plan,
    apply_plan,
    make_planner,
    remove_plan,
)
from lightning_dpx.progress import shown
from lightning_dpx.replicas import BatchSlice, ReplicaSet, UncuttableBatch


class MemoryPlanning:
    """The plans of a run.

    Args:
        budget: What :func:`parse_budget` allows, for everything on a device.
        planner: Who decides.
        plan: What is decided already.
        plan_cache: Where plans of earlier runs are; see :class:`PlanCache`.

    Attributes:
        devices: What was decided for each device.
        rooms: The budgets, and what they leave for activations.
        micro_batches: What is known of those of the batch that is planned next.
        cache: What earlier runs have found.
        without_loss: Counts training steps that return no loss.
        room_checks: When to look whether devices still have the room that plans count on.
        peaks: What steps take, beside what was predicted.
        joint_calls: Steps that call more of the module together than any that was profiled.
        covered: The steps that the plans were made for.
        grown: Steps that save more than any that was profiled, of the same values.
        rows_that_fit: How many rows of a later batch are profiled at a time.

    Raises:
        ConfigurationError: an argument has a value that is not allowed, or both ``budget`` and ``plan`` are given.
        PlanError: ``plan`` is a file that holds none.
    """

    def __init__(
        self,
        budget: Any,
        planner: str | Planner = "auto",
        plan: MemoryPlan | str | None = None,
        plan_cache: bool | str | os.PathLike[str] = True,
    ) -> None:
        self.rooms: DeviceRooms = DeviceRooms(budget)
        self.planner: Planner = make_planner(planner)
        self.cache: PlanningCache = PlanningCache(plan_cache, "plan_cache")
        if budget is not None and plan is not None:
            raise ConfigurationError("Give memory_budget, to make a plan, or plan, to follow one; not both.")
        self._given = load_given(plan)
        self.devices: DevicePlans = DevicePlans()
        self.without_loss: StepsWithoutLoss = StepsWithoutLoss()
        self.micro_batches: MicroBatchFigures = MicroBatchFigures()
        self.covered: CoveredSteps = CoveredSteps()
        self.grown: GrownSteps = GrownSteps()
        self.rows_that_fit: RowsThatFit = RowsThatFit()
        self.room_checks: RoomCheckSchedule = RoomCheckSchedule()
        self.peaks: PeakCheck = PeakCheck(self.devices.forecast, self.rooms.option)
        self.joint_calls: JointCallsOfDevices = JointCallsOfDevices()

    @property
    def has_budget_or_plan(self) -> bool:
        """Whether anything is to be planned or followed."""
        return self.rooms.budgets.given is not None or self._given is not None

    @property
    def given_micro_batches(self) -> int:
        """Into how many micro-batches the plan that was given cuts every slice; 1 without one."""
        if self._given is None:
            return 1
        return self._given.micro_batches

    def follow_given(self, replicas: ReplicaSet) -> None:
        """Puts the plan that was given on every replica."""
        if self._given is None:
            return
        follow_given(self._given, replicas)
        for replica in replicas.replicas:
            self.devices.plans[replica.device] = self._given

    def note_trained_parameters(self, replicas: ReplicaSet) -> bool:
        """Whether parameters were unfrozen since the last plan; then known batch shapes no longer count."""
        if self.rooms.budgets.given is None:
            return False
        if not self.rooms.trained.note(replicas.root.parameters, replicas.root.module):
            return False
        self.covered.forget_slices()
        return True

    def expect_other_steps(self) -> None:
        """What was profiled and planned for is no step of this run any more."""
        self.covered.forget()
        self.joint_calls.forget_steps()
        self.devices.forget_decisions()

    def needs_plan(self, replicas: ReplicaSet, slices: Sequence[BatchSlice]) -> bool:
        """Whether these slices need a plan of their own: the first ones, or larger than any known one in some dim.

        Or an earlier step was not one of those that were planned for, and so may this one be.
        """
        if self.rooms.budgets.given is None:
            return False
        # Also where no profile is made now: what the step has saved is forgotten by the next one.
        self.covered.note_last_step(replicas)
        if self.without_loss.skips_profile:
            return False
        return not self.covered.has_slices(slices) or self.covered.expects_others

    def decide(self, step: StepToPlan, *, source: str = "") -> None:
        """Plans for the devices of a step's slices and puts the plans on their replicas.

        Batches of several shapes share one plan, that of the worst. A plan for each would recompute less where a batch
        is small, but would be exchanged, hooks and all, at every change of shape.

        Args:
            step: The next one.
            source: Where its slices come from, if they are not trained on.

        Raises:
            PlanError: a budget cannot be met; the plans of before hold.
        """
        trainer = trainer_of(step.replicas.root.module)
        with self.plans_taken_off(step.replicas):
            try:
                # The progress bar is the Trainer's to allow: planning a large step
                # takes long enough to need one.
                with shown("planning memory", enabled=shows_progress(trainer)):
                    self._decide(step, source)
                self.without_loss.note_loss()
            # Lightning lets a training step return None to skip a batch, so this is no error. What is not
            # known yet stays open; this step has no backward to plan for.
            except NoLossError as error:
                if self.without_loss.note_none(error) and not self._plans_forward(step, error):
                    self.without_loss.warn(error)

    def _plans_forward(self, step: StepToPlan, error: NoLossError) -> bool:
        """Whether steps that run no backward could be planned by their forward, in which nothing can be dropped.

        Their batches stay unknown, so that steps are still looked at now and then: they may run one later on.
        """
        # Without a loss nothing tells of a backward. Other processes may have seen other steps, and be past this.
        if not isinstance(error, NoBackwardError) or not step.is_of_one_process:
            return False
        # A backward that comes after the step is in no plan.
        if leaves_graph(step.replicas, step.slices[0], step.run):
            return False
        held = step.static_of(step.slices)
        seen = profiled_steps(step, held, self.cache, known_profiles={}, together=False, anew=False, by_forward=True)
        try:
            self.plan(step.replicas, step.slices, held, seen, self.without_loss.remark)
        except BudgetError:
            return False
        return True

    def _decide(self, step: StepToPlan, source: str) -> None:
        """Profiles a step, and plans unless the profile shows nothing new."""
        slices = step.slices
        if self.without_loss.was_last and step.is_of_one_process:
            look_for_loss(step.replicas, slices[0], step.run)
        # A step is profiled in the calling thread, and runs in others.
        step.replicas.take_workspaces()
        held = step.static_of(slices)
        # The cache looks a step up by the shapes of its batch, and by those
        # this step is a known one.
        anew = self.covered.expects_others
        if anew and self.cache.is_used:
            self._leave_cache()
        most_rows = self._most_rows(step, held)
        in_proportion = {} if anew else self._in_proportion(step, held, most_rows)
        seen = profiled_steps(
            step,
            held,
            self.cache,
            known_profiles=self.micro_batches.profiles or in_proportion,
            together=self.rooms.is_given,
            anew=anew,
            most_rows=most_rows,
        )
        # They are known by their number of rows alone, and the next batch may have other shapes.
        self.micro_batches.profiles = {}
        # A batch of a known shape is here because steps differ, or another process must plan; where
        # its profile shows nothing new, the plan stands.
        if not self.covered.has_slices(slices) or self._steps_differ(seen):
            reason = f"; made from {source}, before any batch" if source else ""
            if in_proportion:
                reason += (
                    "; in proportion to an earlier batch, as this one cannot be cut to be profiled within the budget"
                )
            self.plan(step.replicas, slices, held, seen, reason)
            self.covered.add_slices(slices)
            for home, here in by_device(slices).items():
                # Errors of one that was taken in proportion would grow from batch to batch.
                if home in seen and not in_proportion:
                    self.rows_that_fit.note(here[0], seen[home].profiles[0])
            for batch_slice in slices:
                self.joint_calls.note_size(batch_slice)
            self.room_checks.restart(before_batches=bool(source))
        elif most_rows:
            self.rows_that_fit.were_too_few()

    def _most_rows(self, step: StepToPlan, static: StaticMemory) -> dict[torch.device, int]:
        """By a replica's device, how many rows of this step are run without a plan, where all exceed the budget."""
        most = dict[torch.device, int]()
        # Processes that meet in a step run as many rows as each other. And where nothing is known, it is not asked what
        # there is room for: a budget without any is refused once it is known that the step has a backward.
        if not (step.is_of_one_process and self.rows_that_fit.knows_any):
            return most
        for home, here in by_device(step.slices).items():
            if home not in step.replicas.devices:
                continue
            room = self.rooms.room_of_replica(step.replicas, step.slices, static, home)
            rows = self.rows_that_fit.of(here[0], room)
            if rows is not None:
                most[home] = rows
        return most

    def _in_proportion(
        self, step: StepToPlan, static: StaticMemory, most_rows: Mapping[torch.device, int]
    ) -> KnownProfiles:
        """The profile of a batch that exceeds the budget without a plan, and cannot be cut, such as some of graphs."""
        largest = by_device(step.slices)
        # They are known by their rows alone, whatever the device.
        if len(largest) != 1 or not most_rows:
            return {}
        ((home, here),) = largest.items()
        if self._can_be_cut(step.replicas, here[0], most_rows[home]):
            return {}
        found = self.rows_that_fit.in_proportion(here[0])
        return {} if found is None else {(here[0].num_rows, static.accumulates): found}

    @staticmethod
    def _can_be_cut(replicas: ReplicaSet, batch_slice: BatchSlice, rows: int) -> bool:
        # What has no rows that could be told apart counts as one.
        if batch_slice.num_rows < 2:
            return False
        try:
            rows_of_slice(replicas, batch_slice, max(1, rows))
        except UncuttableBatch:
            return False
        return True

    def _steps_differ(self, seen: Mapping[torch.device, SeenStep]) -> bool:
        """Whether these profiles show what steps have saved that no earlier one showed."""
        found = self.covered.found_in(seen.values())
        if found:
            # The next run starts with a batch whose kind it cannot know, so a profile
            # of this one may mislead it.
            self.cache.forget()
        return found

    def _leave_cache(self) -> None:
        """Drops what came from the cache, which does not fit the steps of this run."""
        self.cache.leave()
        self.expect_other_steps()

    def plan(
        self,
        replicas: ReplicaSet,
        slices: Sequence[BatchSlice],
        static: StaticMemory,
        seen: Mapping[torch.device, SeenStep],
        reason: str = "",
    ) -> None:
        """Plans for all devices from the profiles in ``seen`` and those of before; puts nothing on the replicas.

        Args:
            replicas: The replicas.
            slices: Of the batch that is planned for.
            static: What a step of them needs beside activations.
            seen: By a replica's device, what is new.
            reason: Why there is another plan, for its announcement.

        Raises:
            BudgetError: a device cannot meet its budget; the plans of before stay.
        """
        # What the profiled steps, or a run before, have left in reference cycles is no reason to plan for less.
        gc.collect()
        decided = dict[torch.device, DeviceDecision]()
        for home, here in by_device(slices).items():
            before = self.devices.decided.get(home)
            known = () if before is None else before.seen
            steps = list(known)
            if home in seen:
                # One that was put together has the calls of all such that came before.
                steps = [step for step in known if not (step.is_joined and seen[home].is_joined)] + [seen[home]]
            # Where parts are shifted to, there are none; it is planned with the replicas that they belong to.
            if home in replicas.devices and steps:
                decided[home] = plan_device(
                    replicas,
                    here[0],
                    steps,
                    static,
                    rooms=self.rooms,
                    before=before,
                    cache=self.cache,
                    planner=self.planner,
                    micro_batches=self.micro_batches,
                )
        # Only once every device has a plan: if one of them is refused, the plans of before stay in force.
        self.devices.decide(decided)
        self.rooms.trained.are_planned_for()
        for one in decided.values():
            for device in one.devices:
                apart = 0 if static.frees_gradients else static.coming_gradients(device)
                self.peaks.passing[device] = apart + static.passing(device)
        # Of all steps that are remembered, not of the latest alone: the
        # others are planned for as well.
        self.covered.plan_for(self.devices.steps())
        self.joint_calls.plan_for(decided)
        self._announce(decided.values(), reason)

    def _announce(self, decided: Iterable[DeviceDecision], reason: str) -> None:
        for one in decided:
            for index, device in enumerate(one.devices):
                remark = reason + origin(one.worst_step(index).profiles[index], len(one.seen))
                limit, sharing = self.devices.limits[device]
                rank_zero_info(
                    announcement(device, self.devices.plans[device], one.held[index], limit, sharing, remark)
                )

    @contextmanager
    def plans_taken_off(self, replicas: ReplicaSet) -> Iterator[None]:
        """Takes all plans off the replicas for the time of the block; at its end those are on that there are then."""
        self._take_off(replicas)
        try:
            yield
        finally:
            self._put_on(replicas)

    def _put_on(self, replicas: ReplicaSet) -> None:
        """Has every replica follow the plan of its device."""
        for replica in replicas.replicas if self.devices.plans else ():  # also those without a slice today
            # A device without a slice of this batch has no plan of its own, and
            # may get a slice of the next.
            known_plan = self.devices.plans.get(replica.device) or next(iter(self.devices.plans.values()))
            # Watched, as only the steps themselves show that they save something
            # else than the profiled one.
            applied = apply_plan(replica.module, known_plan, watches=True)
            self.joint_calls.count_in(replica.device, applied)
            decided = self.devices.decided.get(replica.device)
            if decided is not None:
                self.grown.expect(applied, decided)

    def tighten(self, step: StepToPlan) -> None:
        """After this step ran out of memory: plans that take less, or the first ones.

        Raises:
            BudgetError: nothing takes less.
        """
        if not self.devices:
            # With on_oom="replan" and no budget, the first plan is made for what is free by now.
            self.rooms.allow_what_is_free()
            self.decide(step)
        else:
            # The replicas keep their plans if nothing takes less.
            self.devices.tighten(step.replicas.root.module, self.planner)
            self.joint_calls.plan_for(self.devices.decided)
            self._take_off(step.replicas)
            self._put_on(step.replicas)

    def advice(self) -> str:
        """Advice, in sentences, for a run that is out of memory."""
        return self.devices.advice(self.planner, is_repeated=not self.rooms.budgets.is_users)

    def _take_off(self, replicas: ReplicaSet) -> None:
        """Has no replica follow a plan any longer; the plans themselves stay known."""
        self.peaks.end_plan()
        for replica in replicas.replicas:
            if applied_plan(replica.module) is not None:
                remove_plan(replica.module)

    def remove(self, replicas: ReplicaSet) -> None:
        """Takes all plans off."""
        self._take_off(replicas)
        self.forget()

    def forget(self) -> None:
        """Forgets what was found and planned, so that the next run plans anew."""
        self.covered.forget()
        self.rooms.forget()
        self.without_loss = StepsWithoutLoss()
        self.peaks.end_plan()
        self.room_checks = RoomCheckSchedule()
        self.joint_calls.forget()
        self.grown.forget()
        self.rows_that_fit.forget()
        self.cache.start()
        self.micro_batches.cut_costs = {}
        self.devices.forget()
