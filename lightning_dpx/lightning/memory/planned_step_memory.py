"""What is done about memory round the steps of a session that has a budget, a plan, automatic shifts or ``on_oom``."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_dpx.devices import is_host
from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning.lightning_api import is_param_in_hook_signature, rank_zero_warn
from lightning_dpx.lightning.lightning_compat import before_batch_transfer
from lightning_dpx.lightning.memory.auto_shift import note_shifts, shift_what_does_not_fit
from lightning_dpx.lightning.memory.evaluation_cuts import EvaluationCuts
from lightning_dpx.lightning.memory.example_input import profile_example
from lightning_dpx.lightning.memory.freed_gradients import FreedGradients
from lightning_dpx.lightning.memory.micro_batch_choice import MicroBatchChooser
from lightning_dpx.lightning.memory.out_of_memory import OutOfMemory
from lightning_dpx.lightning.memory.peak_check import is_worth_telling
from lightning_dpx.lightning.memory.plan_tightening import PlanTightening
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.memory.shadow_run import ShadowRun, StepInput
from lightning_dpx.lightning.memory.static_of_steps import StaticOfSteps
from lightning_dpx.lightning.memory.step_memory import Forward, StepMemory
from lightning_dpx.lightning.memory.update_memory import bytes_of_update
from lightning_dpx.lightning.whole_batches import RewindableBatches, fetches_by_itself
from lightning_dpx.replicas import BatchSlice, Replica
from lightning_dpx.replicas.batch_norm import batch_norms_by_slice
from lightning_dpx.replicas.shared_iterators import iterators_peeked
from lightning_dpx.shifting import BetweenSteps
from lightning_dpx.units import format_mib

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

_NO_BOUND = (
    "dpx: memory no longer bounds the batch: a larger one is cut into more micro-batches. What looks for the largest "
    "batch that fits (BatchSizeFinder) ends at its max_trials or max_val, or at the size of the data set."
)


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
        out_of_memory: OutOfMemory,
        hooks_mode: BetweenSteps | None,
    ) -> None:
        self._session = session
        self._planning = planning
        self._out_of_memory = out_of_memory
        self._hooks_mode = hooks_mode
        self.repeats_steps: bool = out_of_memory.repeats_steps
        self._plans = planning.wanted or self.repeats_steps
        self._shifts_open = session.options.chooses_shifts  # the first batch decides
        self._step: StepInput | None = None  # that can be taken again
        self._runs_step = False
        self._has_told_of_update = False
        self._micro_batches = MicroBatchChooser(session)
        self._evaluation = EvaluationCuts(session, planning)
        self._freed_gradients = FreedGradients(session)
        self._static = StaticOfSteps(session, self._freed_gradients)
        self._tightening = PlanTightening(session, planning, self._static, self._micro_batches, self._plan)

    def begin_step(self) -> None:
        """Frees gradients that nothing needs, so that the room for a plan is looked at without them."""
        self._freed_gradients.free()

    def choose_micro_batches(self, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Chooses, of the first batch and of larger ones, into how many micro-batches every device's slice is cut.

        Chosen again where parameters were unfrozen. A larger batch never has fewer: what was chosen before is needed
        for the smaller ones.

        Returns:
            Whether there are more from this step on; replicas were then made for them.

        Raises:
            BudgetError: the budget cannot be met, whatever the number.
        """
        chooser = self._micro_batches
        session = self._session
        self._planning.without_loss.begin_step()
        trains_more = self._planning.note_trained_parameters(session.replicas)
        grows = chooser.has_chosen_for_less(slices)
        is_undecided = (chooser.is_open or grows) and not self._planning.without_loss.skips_profile
        if not session.options.chooses_micro_batches or not is_undecided:
            return False
        self._planning.end_plan()  # the profiles of a choice take more than any plan allows
        replicas = session.replicas
        # What is there in reference cycles only is no reason for more micro-batches.
        self._planning.rooms.free_what_counts(replicas, slices)
        # The choice is among numbers for whole slices, and these are parts of an earlier choice.
        if replicas.cuts_slices:
            slices = chooser.slices_in_one_piece(args[0])
        replicas.python_state.share()  # as the step itself would begin: every replica is profiled as it is by then
        with iterators_peeked(replicas.root.module) as peeked:
            run = ShadowRun(session, StepInput(slices, args, kwargs), peeked)
            self._freed_gradients.look(slices[0], run)
            static = self._static.of(slices)
            numbers = chooser.numbers(
                slices,
                run,
                partial(self._planning.rooms.room_of_replica, replicas, slices, static),
                self._planning.planner,
                partial(self._static.beside_micro_batches, slices, static),
                partial(self._planning.rooms.explain_micro_batches, replicas, slices, static),
                counts_gradients=static.frees_gradients,
            )
        present = replicas.partition.numbers(training=True)
        numbers = list(map(max, numbers, present))
        is_cut = numbers != list(present) and session.cut_slices(numbers)
        # The plan that follows needs these very profiles; without them every
        # step would run once more.
        self._planning.micro_batches.tried = chooser.tried
        if not is_cut:
            return False
        # After the cut: making replicas anew removes the plans, and forgets
        # the costs along with them.
        self._planning.micro_batches.cut_costs = {
            device: choice.cut_share for device, choice in chooser.choices.items()
        }
        if grows and not trains_more:
            session.strategy.announce(_NO_BOUND)
        return True

    def choose_evaluation_micro_batches(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Looks at the first batch of an evaluation, and at larger ones."""
        if self._session.options.memory_budget is None:
            return False
        return self._evaluation.cut(name, args, kwargs, self._static.of)

    def leave_micro_batches(self, name: str, reason: str) -> bool:
        """Takes back micro-batches that were chosen here; a number that the user gave stays."""
        cuts = self._micro_batches if name == "training_step" else self._evaluation
        return cuts.leave(name, reason)

    def rewindable(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, whose ``dataloader_iter`` gives every run of a step the same batches."""
        self._step = None  # with another batch: the last one is not to be there beside it
        # A dataloader_iter cannot be asked for the same batch twice.
        if self._plans and fetches_by_itself(args[0]):
            return RewindableBatches(args[0]), *args[1:]
        return args

    def begin_epoch(self) -> None:
        """Callbacks may have made copies, for which there is no room in a plan."""
        self._planning.begin_epoch()

    def before_step(self, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decides, of the first batch and of larger ones, what is shifted and recomputed.

        Raises:
            PlanError: a budget cannot be met.
        """
        self._step = StepInput(slices, args, kwargs)
        # Shifts first: a plan is made for the parts that each device has by then.
        if self._shifts_open:
            self._shift_what_does_not_fit(self._step)
        accumulates_otherwise = self._freed_gradients.accumulation_changes()
        if accumulates_otherwise:
            self._planning.expect_other_steps()
        if self._needs_plan(slices):
            # As the step itself would begin, so that a profile takes the same branches.
            self._session.replicas.python_state.share()
            try:
                self._plan(self._step)
            except BudgetError as error:
                if not accumulates_otherwise:
                    raise
                # A run that has trained is not ended by that.
                self._planning.keep_plan_for(slices)
                rank_zero_warn(
                    "dpx: accumulate_grad_batches has changed since memory was planned, so steps may exceed "
                    f"{self._planning.budgets.option}: {error}"
                )
        self._planning.plan_joint_calls(self._session.replicas, slices, self._static.of)
        self._planning.confirm(self._session.replicas, slices, self._static.of)
        self._planning.begin_step()
        self._runs_step = True

    def end_step(self) -> None:
        """Hooks follow, whose backwards are of no step that can be planned."""
        self._runs_step = False

    # ---- steps that are taken again ----

    def guarded(self, forward: Forward) -> Forward:
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
            return self._out_of_memory.guarded(partial(forward, slices, args, kwargs), self._tighten, repeat)

        return run

    def guard_backward(self, backward: Callable[[], None]) -> None:
        """Runs ``backward``; with the forward, once more where it runs out of memory."""
        session = self._session
        step = self._session.step
        known = self._step
        self._planning.end_forward(session.replicas)
        if self._runs_step or session.module.automatic_optimization:
            self._planning.without_loss.note_loss()
        # A backward that failed half-way leaves gradients that cannot be told from those of earlier batches.
        can_repeat = self.repeats_steps and not step.holds_gradients and session.module.automatic_optimization
        if known is None or not can_repeat:
            self._out_of_memory.guarded(backward, self._tighten, None)
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

        self._out_of_memory.guarded(backward, self._tighten, again)

    def end_backward(self) -> None:
        """Compares what the step took with what was predicted."""
        self._planning.end_backward()

    def end_update(self) -> None:
        """Compares what was there at a time with the budgets."""
        self._planning.end_update()

    def _tighten(self) -> str:
        """After a step that ran out of memory; says what the plans are now."""
        if self._step is None:
            return self._planning.advice()
        self._step = self._tightening.tighten(self._step)
        return self._planning.describe()

    # ---- what the first batch decides ----

    def _shift_what_does_not_fit(self, step: StepInput) -> None:
        """Decides ``shifts="auto"`` by what the first step would keep, before it runs."""
        session = self._session
        replicas = session.replicas
        self._shifts_open = False
        session.step.close()  # its hooks hold on to where the parameters were
        with iterators_peeked(replicas.root.module) as peeked:
            run = ShadowRun(session, step, peeked)
            budgets = self._planning.budgets
            shift_what_does_not_fit(replicas, step.slices, run, session.strategy.optimizers, budgets)
        # Hooks between steps were entered at launch, before anything was known of these shifts.
        note_shifts(replicas.replicas, self._hooks_mode)

    def _needs_plan(self, slices: Sequence[BatchSlice]) -> bool:
        """Of several processes all plan if one must: a step may meet the others', and so may its rehearsal."""
        # Noted by all, also by those that need no plan.
        self._planning.note_last_step(self._session.replicas)
        mine = self._planning.needs_plan(slices)
        # Then only a process that ran out of memory plans, which the others know
        # nothing of and cannot answer.
        if not self._planning.rooms.is_given:
            return mine
        return self._session.strategy.reduce_boolean_decision(mine, all=False)

    def _plan(self, step: StepInput, source: str = "") -> None:
        """Profiles the step on a shadow, before it allocates anything, and plans its memory."""
        replicas = self._session.replicas
        cut = self._session.micro_batches
        # A share of the step's time, which the plan is announced with.
        self._planning.micro_batches.run_forward_twice = (
            cut is not None and cut.two_passes is not None and replicas.cuts_slices
        )
        with iterators_peeked(replicas.root.module) as peeked:
            run = ShadowRun(self._session, step, peeked)
            self._freed_gradients.look(step.slices[0], run)
            self._planning.decide(replicas, step.slices, run, self._static.of, source=source)
        self._micro_batches.say_why_whole(self._planning.plans.values())
        self._tell_of_update(step.slices)

    def _tell_of_update(self, slices: Sequence[BatchSlice]) -> None:
        """Says once where a step of an optimizer takes the host beyond its budget: there nothing measures it later."""
        on_host = [device for device in self._planning.plans if is_host(device)]
        if self._has_told_of_update or not on_host:
            return
        taken = bytes_of_update(self._session.strategy.optimizers)
        static = self._static.of(slices)
        for device in on_host:
            _, limit = self._planning.forecast(device)
            needed = static.between_steps(device) + taken
            if limit and is_worth_telling(needed, limit):
                self._has_told_of_update = True
                rank_zero_warn(
                    f"dpx: a step of the optimizer takes {format_mib(taken)} on {device} while it runs: with "
                    f"parameters, gradients and states that is {format_mib(needed)}, where "
                    f"{self._planning.budgets.option} allows "
                    f"{format_mib(limit)}. Least is taken with fused=True or foreach=False."
                )

    def plan_ahead(self) -> None:
        """At setup, before any data is loaded: a budget that cannot be met is refused, an example batch is planned.

        Raises:
            PlanError: the budget cannot be met.
        """
        # With shifts="auto" it is the first batch that decides which parts are where, so there is
        # no profile of any device before.
        if not self._planning.rooms.is_given or self._shifts_open:
            return
        session = self._session
        example = self._session.options.example_batch
        replicas = session.replicas
        module = session.module
        precision = session.strategy.precision_plugin

        def profiles_of(replica: Replica) -> Any:
            if example is not None:
                return []
            counts = self._freed_gradients.are_freed
            return profile_example(replicas, replica, precision, counts_gradients=counts)

        self._planning.check_feasible(replicas, self._static.of, profiles_of)
        if example is None:
            return
        batch = before_batch_transfer(module, precision.convert_input(example))
        # As Lightning calls it: a step that takes no index gets none.
        index = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
        try:
            args = (batch, *index)
            norms = batch_norms_by_slice(replicas.root.module)
            if norms:  # nothing is rehearsed before the first batch, and that is what its rehearsal would find
                self._micro_batches.stay_whole(f"{', '.join(norms[:3])} would normalize by micro-batch.")
            slices = session.slices.of("training_step", batch)
            if self.choose_micro_batches(slices, args, {}):
                slices = session.slices.of("training_step", batch)
            self._plan(StepInput(slices, args, {}), "example_batch")
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
