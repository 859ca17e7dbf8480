"""What is done about memory round the steps of a session that has a budget, a plan, automatic shifts or ``on_oom``."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_dpx.lightning.loaded_batches import RewindableBatches, fetches_by_itself
from lightning_dpx.lightning.memory.evaluation_cuts import EvaluationCuts
from lightning_dpx.lightning.memory.first_step_shifts import FirstStepShifts
from lightning_dpx.lightning.memory.freed_gradients import FreedGradients
from lightning_dpx.lightning.memory.look_room import LookRoom
from lightning_dpx.lightning.memory.micro_batch_choice import MicroBatchChooser
from lightning_dpx.lightning.memory.out_of_memory import OutOfMemoryRecovery
from lightning_dpx.lightning.memory.plan_tightening import PlanTightening
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.shadow_run import StepInput
from lightning_dpx.lightning.memory.static_of_steps import StaticOfSteps
from lightning_dpx.lightning.memory.step_memory import Forward, StepMemory
from lightning_dpx.lightning.memory.step_planner import StepPlanner
from lightning_dpx.replicas import BatchSlice
from lightning_dpx.shifting import BetweenSteps

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class PlannedStepMemory(StepMemory):
    """Shifts and plans what must be before a step, and takes steps again that ran out of memory.

    Args:
        session: Whose steps.
        planning: Chooses and follows plans.
        out_of_memory: What happens when memory runs out.
        hooks_mode: What hooks run in, where parts are shifted.
    """

    is_on = True

    def __init__(
        self,
        session: "Session",
        planning: MemoryPlanning,
        out_of_memory: OutOfMemoryRecovery,
        hooks_mode: BetweenSteps | None,
    ) -> None:
        self._session = session
        self._planning = planning
        self._out_of_memory = out_of_memory
        self.repeats_steps: bool = out_of_memory.repeats_steps
        self._plans = planning.has_budget_or_plan or self.repeats_steps
        self._step: StepInput | None = None  # that can be taken again
        self._runs_step = False
        self._freed_gradients = FreedGradients(session)
        static = StaticOfSteps(session, self._freed_gradients)
        self._look_room = LookRoom(session, planning, static)
        self._shifts = FirstStepShifts(session, planning, hooks_mode)
        self._micro_batches = MicroBatchChooser(session, planning, static, self._freed_gradients)
        self._evaluation = EvaluationCuts(session, planning, static)
        self._planner = StepPlanner(session, planning, static, self._freed_gradients, self._micro_batches)
        self._tightening = PlanTightening(session, planning, static, self._micro_batches, self._planner)

    def begin_step(self) -> None:
        """Frees gradients that nothing needs, so that the room for a plan is looked at without them."""
        self._freed_gradients.free()

    def choose_micro_batches(self, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Chooses, of the first batch and of larger ones, into how many micro-batches every device's slice is cut.

        Raises:
            BudgetError: the budget cannot be met, whatever the number.
        """
        return self._micro_batches.choose(StepInput(slices, args, kwargs), self._planner.fits)

    def choose_evaluation_micro_batches(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Looks at the first batch of an evaluation, and at larger ones."""
        if self._session.options.memory_budget is None:
            return False
        return self._evaluation.cut(name, args, kwargs)

    def leave_micro_batches(self, name: str, reason: str) -> bool:
        """Takes back micro-batches that were chosen here; a number that the user gave stays."""
        if name == "training_step":
            return self._micro_batches.leave(reason)
        return self._evaluation.leave(name, reason)

    def bytes_too_many_for_look(self, slices: Sequence[BatchSlice]) -> int:
        """Asked where a step is about to be looked at again."""
        return self._look_room.bytes_too_many(slices)

    def rewindable(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, whose ``dataloader_iter`` gives every run of a step the same batches."""
        self._step = None  # with another batch: the last one is not to be there beside it
        # A dataloader_iter cannot be asked for the same batch twice.
        if self._plans and fetches_by_itself(args[0]):
            return RewindableBatches(args[0]), *args[1:]
        return args

    def begin_epoch(self) -> None:
        """Callbacks may have made copies, for which there is no room in a plan."""
        self._planning.room_checks.ask()

    def before_step(self, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decides, of the first batch and of larger ones, what is shifted and recomputed.

        Raises:
            PlanError: a budget cannot be met.
        """
        self._step = StepInput(slices, args, kwargs)
        # Shifts first: a plan is made for the parts that each device has by then.
        self._shifts.before_step(self._step)
        self._planner.before_step(self._step)
        self._planning.peaks.begin_step(self._planning.devices.plans)
        self._runs_step = True

    def end_step(self) -> None:
        """Hooks follow, whose backwards are of no step that can be planned."""
        self._runs_step = False
        self.has_planned_step = bool(self._planning.devices)

    # ---- steps that are taken again ----

    def guarded_forward(self, forward: Forward) -> Forward:
        """``forward``, run again where it runs out of memory, with a tighter plan."""

        def run(slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._out_of_memory.begin_step(self._session.replicas, self._session.strategy.ranks)

            def again() -> Any:
                # Asked when it runs again, not when it is made: a tighter plan may
                # have cut the step meanwhile.
                known = self._step or StepInput(slices, args, kwargs)  # whose slices may be cut further by then
                return forward(known.slices, args, kwargs)

            # By hand, optimizers may have stepped before memory ran out, which nothing takes back.
            repeat = again if self._session.module.automatic_optimization else None
            return self._out_of_memory.run_guarded(partial(forward, slices, args, kwargs), self._tighten, repeat)

        return run

    def run_guarded_backward(self, backward: Callable[[], None]) -> None:
        """Runs ``backward``; with the forward, once more where it runs out of memory."""
        session = self._session
        step = self._session.step
        known = self._step
        # Told before the backward, in which such a step exceeds the budget.
        self._planning.joint_calls.end_forward(session.replicas, self._planning.rooms.option())
        if self._runs_step or session.module.automatic_optimization:
            self._planning.without_loss.note_loss()
        # A backward that failed half-way leaves gradients that cannot be told from those of earlier batches.
        can_repeat = self.repeats_steps and not step.holds_gradients and session.module.automatic_optimization
        if known is None or not can_repeat:
            self._out_of_memory.run_guarded(backward, self._tighten, None)
            return
        # Read before the backward: the repetition merges anew, and its
        # leaves have no gradients yet.
        gradients = step.pending_gradients()

        def again() -> None:
            now = self._step or known
            # The failed backward has freed part of the graphs, so forward runs as well.
            session.training.repeat_forward(now.slices, now.args, now.kwargs)
            # All slices of a merged loss begin with its gradient, however many there are now.
            cut_further = now is not known
            step.take_gradients(gradients[:1] * step.num_pending if cut_further else gradients)
            backward()

        # Where a hook makes the loss, each slice begins with a gradient of its own outputs, which fits no other slice.
        tighten = partial(self._tighten, may_cut=session.end_hook("training_step") is None)
        self._out_of_memory.run_guarded(backward, tighten, again)

    def end_backward(self) -> None:
        """Compares what the step took with what was predicted."""
        self._planning.peaks.end_backward()
        self._look_at_idle()

    def end_update(self) -> None:
        """Compares what was there at a time with the budgets."""
        self._planning.peaks.end_update()
        # Hooks between the backward and the update may give gradients as well.
        self._look_at_idle()

    def _look_at_idle(self) -> None:
        # They were not counted, and neither was what an optimizer keeps for them.
        if not self._freed_gradients.idle.some_have_come():
            return
        self._planning.room_checks.ask()
        if self._step is not None:
            self._planner.tell_of_update(self._step.slices)

    def _tighten(self, *, may_cut: bool = True) -> str:
        """After a step that ran out of memory; says what the plans are now."""
        if self._step is None:
            return self._planning.advice()
        self._step = self._tightening.tighten(self._step, may_cut=may_cut)
        return self._planning.devices.describe()

    def plan_ahead(self) -> None:
        """At setup, before any data is loaded: a budget that cannot be met is refused, an example batch is planned.

        Raises:
            PlanError: the budget cannot be met.
        """
        # With shifts="auto" it is the first batch that decides which parts are where, so there is
        # no profile of any device before.
        if self._planning.rooms.is_given and not self._shifts.is_open:
            self._planner.plan_ahead()
