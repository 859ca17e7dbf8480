"""Plans memory for the step that a session is about to take: on a shadow, before the step allocates anything."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.lightning_api import is_param_in_hook_signature, rank_zero_warn
from lightning_dpx.lightning.lightning_compat import before_batch_transfer
from lightning_dpx.lightning.memory.example_input import profile_example
from lightning_dpx.lightning.memory.feasibility import check_feasible
from lightning_dpx.lightning.memory.freed_gradients import FreedGradients
from lightning_dpx.lightning.memory.micro_batch_choice import MicroBatchChooser
from lightning_dpx.lightning.memory.peak_check import is_worth_telling
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.profiled_steps import SeenStep, StepToPlan
from lightning_dpx.lightning.memory.room_check import RoomCheck
from lightning_dpx.lightning.memory.shadow_run import ShadowRun, StepInput
from lightning_dpx.lightning.memory.static_of_steps import StaticOfSteps
from lightning_dpx.lightning.memory.update_memory import bytes_of_update
from lightning_dpx.memory.profile import timing_effort
from lightning_dpx.replicas import BatchSlice, Replica
from lightning_dpx.replicas.batch_norm import batch_norms_by_slice
from lightning_dpx.replicas.shared_iterators import iterators_peeked
from lightning_dpx.units import format_mib

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class StepPlanner:
    """Has the steps of a session planned where they need it.

    Args:
        session: Whose steps.
        planning: Makes plans from profiles, and has those that are followed.
        static: What a step needs beside its activations.
        freed_gradients: Looks at the step that is planned.
        micro_batches: Chooses them for an example batch, and says after a plan why slices stay whole.
    """

    def __init__(
        self,
        session: "Session",
        planning: MemoryPlanning,
        static: StaticOfSteps,
        freed_gradients: FreedGradients,
        micro_batches: MicroBatchChooser,
    ) -> None:
        self._session = session
        self._planning = planning
        self._static = static
        self._freed_gradients = freed_gradients
        self._micro_batches = micro_batches
        self._room_check = RoomCheck(session, planning, static)
        self._has_told_of_update = False

    def before_step(self, step: StepInput) -> None:
        """Plans what no earlier batch has shown, and looks whether the plans still have their room.

        Raises:
            PlanError: a budget cannot be met.
        """
        replicas = self._session.replicas
        accumulates_otherwise = self._freed_gradients.accumulation_changes()
        if accumulates_otherwise:
            self._planning.expect_other_steps()
        if self._needs_plan(step.slices):
            # As the step itself would begin, so that a profile takes the same branches.
            replicas.python_state.share()
            try:
                self.plan(step)
            except BudgetError as error:
                if not accumulates_otherwise:
                    raise
                # A run that has trained is not ended by that.
                self._planning.covered.add_slices(step.slices)
                rank_zero_warn(
                    "dpx: accumulate_grad_batches has changed since memory was planned, so steps may exceed "
                    f"{self._planning.rooms.option()}: {error}"
                )
        self._plan_joint_calls(step.slices)
        self._plan_grown(step.slices)
        self._room_check.before_step(step.slices)

    def fits(self, step: StepInput) -> bool:
        """Whether a step is planned within the budget, and computes no greater share of itself again than those before.

        Its plan is followed from then on.
        """
        before = self._most_again()
        # As the step itself would begin, so that a profile takes the same branches.
        self._session.replicas.python_state.share()
        try:
            self.plan(step)
        except BudgetError:
            return False
        return self._most_again() <= before + timing_effort.uncertainty()

    def _most_again(self) -> float:
        """The largest share of a step that a plan has computed again."""
        return max((plan.recompute_share or 0.0 for plan in self._planning.devices.plans.values()), default=0.0)

    def _needs_plan(self, slices: Sequence[BatchSlice]) -> bool:
        """Of several processes all plan if one must: a step may meet the others', and so may its rehearsal."""
        mine = self._planning.needs_plan(self._session.replicas, slices)
        # Then only a process that ran out of memory plans, which the others know
        # nothing of and cannot answer.
        if not self._planning.rooms.is_given:
            return mine
        return self._session.strategy.reduce_boolean_decision(mine, all=False)

    def plan(self, step: StepInput, source: str = "") -> None:
        """Profiles the step on a shadow, before it allocates anything, and plans its memory.

        Args:
            step: What it runs on.
            source: Where that comes from, if it is no batch of the run.
        """
        replicas = self._session.replicas
        cut = self._session.micro_batches
        # A share of the step's time, which the plan is announced with.
        self._planning.micro_batches.run_forward_twice = (
            cut is not None and cut.two_passes is not None and replicas.cuts_slices
        )
        with iterators_peeked(replicas.root.module) as peeked:
            run = ShadowRun(self._session, step, peeked)
            self._freed_gradients.look(step.slices[0], run)
            to_plan = StepToPlan(replicas=replicas, slices=step.slices, run=run, static_of=self._static.of)
            try:
                self._planning.decide(to_plan, source=source)
            except BudgetError as error:
                self._micro_batches.explain(error)
                raise
        self._micro_batches.say_why_whole(self._planning.devices.plans.values())
        self.tell_of_update(step.slices)

    def _plan_joint_calls(self, slices: Sequence[BatchSlice]) -> None:
        """Plans for steps that have called more together than any that was profiled, once they were seen."""
        planning = self._planning
        seen = planning.joint_calls.to_plan(self._session.replicas, slices, planning.rooms.option())
        what = "no plan keeps a step that calls as much of the module together"
        # Before the plans of before are put on again: no calls are counted for them any more.
        self._plan_seen(slices, seen, what, planning.joint_calls.stop)

    def _plan_grown(self, slices: Sequence[BatchSlice]) -> None:
        """Plans for steps that have saved more than any that was profiled, once they were seen."""
        planning = self._planning
        seen = planning.grown.to_plan(self._session.replicas, planning.devices)
        reason = "; steps save more than the profiled one, and may save more still"
        what = "steps save more than the profiled one, and no plan keeps them"
        # As much is dropped as before, and the same would be found after every step.
        self._plan_seen(slices, seen, what, planning.grown.stop, reason)

    def _plan_seen(
        self,
        slices: Sequence[BatchSlice],
        seen: Mapping[torch.device, SeenStep],
        what: str,
        stop: Callable[[Iterable[torch.device]], None],
        reason: str = "",
    ) -> None:
        """Plans for steps that only a run has shown; where no plan is within the budget, it says so and goes on.

        Args:
            slices: Of the step that comes.
            seen: By a replica's device, what was seen; perhaps nothing.
            what: Is not possible then, in words.
            stop: Has such steps not looked for any more.
            reason: Why there is another plan, for its announcement.
        """
        planning = self._planning
        replicas = self._session.replicas
        if not seen:
            return
        with planning.plans_taken_off(replicas):
            try:
                planning.plan(replicas, slices, self._static.of(slices), seen, reason)
            except BudgetError as error:
                stop(seen)
                rank_zero_warn(f"dpx: {what} within {planning.rooms.option()}: {error} Such a step exceeds it.")

    def tell_of_update(self, slices: Sequence[BatchSlice]) -> None:
        """Says once where a step of an optimizer takes the host beyond its budget: there nothing measures it later.

        Args:
            slices: Of the step.
        """
        on_host = [device for device in self._planning.devices.plans if is_host(device)]
        if self._has_told_of_update or not on_host:
            return
        taken = bytes_of_update(self._session.strategy.optimizers, self._freed_gradients.idle.ids)
        static = self._static.of(slices)
        for device in on_host:
            _, limit = self._planning.devices.forecast(device)
            needed = static.between_steps(device) + taken
            if limit and is_worth_telling(needed, limit):
                self._has_told_of_update = True
                rank_zero_warn(
                    f"dpx: a step of the optimizer takes {format_mib(taken)} on {device} while it runs: with "
                    f"parameters, gradients and states that is {format_mib(needed)}, where "
                    f"{self._planning.rooms.option()} allows "
                    f"{format_mib(limit)}. Least is taken with fused=True or foreach=False."
                )

    # ---- at setup ----

    def plan_ahead(self) -> None:
        """Before any data is loaded: a budget that cannot be met is refused, an example batch is planned.

        Raises:
            PlanError: the budget cannot be met.
        """
        example = self._session.options.example_batch
        replicas = self._session.replicas
        precision = self._session.strategy.precision_plugin

        def profiles_of(replica: Replica) -> Any:
            if example is not None:
                return []
            counts = self._freed_gradients.are_freed
            return profile_example(replicas, replica, precision, counts_gradients=counts)

        rooms = self._planning.rooms
        may_be_idle = self._freed_gradients.may_tell_idle
        check_feasible(rooms, self._planning.planner, replicas, self._static.of, profiles_of, may_be_idle=may_be_idle)
        if example is None:
            return
        batch = before_batch_transfer(self._session.module, precision.convert_input(example))
        try:
            self._plan_example_batch(batch)
        except BaseException as error:
            error.add_note(
                "It happened at setup, where memory is planned from example_batch, before on_fit_start and "
                "on_train_start; without it the first batch is planned."
            )
            raise
        finally:
            # An example batch is no batch of the run: a first batch that is smaller must
            # not count as a short one.
            replicas.partition.forget_usual_rows()

    def _plan_example_batch(self, batch: Any) -> None:
        session = self._session
        # As Lightning calls it: a step that takes no index gets none.
        index = (0,) if is_param_in_hook_signature(session.module.training_step, "batch_idx", min_args=2) else ()
        args = (batch, *index)
        norms = batch_norms_by_slice(session.replicas.root.module)
        if norms:  # nothing is rehearsed before the first batch, and that is what its rehearsal would find
            self._micro_batches.stay_whole(f"{', '.join(norms[:3])} would normalize by micro-batch.")
        slices = session.slices.of("training_step", batch)
        if self._micro_batches.choose(StepInput(slices, args, {}), self.fits):
            slices = session.slices.of("training_step", batch)
        self.plan(StepInput(slices, args, {}), "example_batch")
