"""The step in slices of unequal size, on replicas of a shadow: how it will run, on a few rows."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_dpx.devices import raises_out_of_memory
from lightning_dpx.lightning.logging import StepLog, path_of
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation
from lightning_dpx.lightning.rehearsal.few_rows import FewRows
from lightning_dpx.lightning.rehearsal.outcome import SlicesFail
from lightning_dpx.lightning.rehearsal.shadow import shared_parameters
from lightning_dpx.lightning.rehearsal.shadow_step import (
    ShadowStep,
    forget_gradients,
    frees_shadows,
    logged_value,
    recording,
)
from lightning_dpx.lightning.whole_batches import WholeBatches
from lightning_dpx.replicas import BatchSlice, MergeRules, ReplicaSet
from lightning_dpx.shifting import applied_shift, forget_shift, shift_like
from lightning_dpx.step import TrainingStep

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class SlicedRun:
    """Runs the step in slices, and finds the rules by which they give what one device does.

    Args:
        step: On a shadow.
        rows: Of the batch.

    Attributes:
        step: Likewise.
        gives_slices: Whether metrics that are called as functions give each micro-batch its own value.
        has_waited: Whether slices have waited for each other.
        metric_rules: How arguments of metrics are joined, as was learned.
    """

    def __init__(self, step: ShadowStep, rows: FewRows) -> None:
        self.step: ShadowStep = step
        self._rows = rows
        # To begin with, as micro-batches that need not wait for each other save most memory.
        self.gives_slices: bool = not step.by_hand and step.replicas.cuts_slices
        self.has_waited: Any = False
        # A copy: what a rehearsal learns counts only once it ends well.
        self.metric_rules: Any = copy.deepcopy(step.session.metrics.rules_by_path())

    @frees_shadows
    @raises_out_of_memory
    def observe(
        self,
        sizes: tuple[int, ...],
        whole: Observation,
        loss_reduction: str,
        unstable: frozenset[str] = frozenset(),
        earlier: Sequence[JudgingRules] = (),
    ) -> tuple[JudgingRules, Observation]:
        """What a step in slices does, after as many others as there are rules of ``earlier`` ones.

        Args:
            sizes: Rows of each slice.
            whole: What one device does with the same rows.
            loss_reduction: "auto", "mean" or "sum".
            unstable: What changes from run to run, as in :class:`JudgingRules`.
            earlier: Rules by which the slices of earlier steps are merged, a step each.

        Raises:
            SlicesFail: it cannot be run in slices.
        """
        step = self.step
        judge = self._judge(whole, loss_reduction, unstable)
        shadow = step.make_shadow()
        replicas = self._replicas_of(shadow)
        training = self._training_step(replicas)
        session = step.session.for_shadow(replicas, replicas.metrics, training)
        seen = Observation()
        # Once for all steps: the second one goes on with the moments and the learning rates of the first.
        optimizers = step.optimizers_for(shadow, session, seen)
        replicas.metrics.take_rules(self.metric_rules)
        with ExitStack() as stack:
            # First in and last out: replicas are closed and graphs let go
            # before anything is put back.
            stack.enter_context(step.sandbox.run(shadow))
            stack.callback(replicas.close)
            stack.callback(training.close)
            stack.callback(training.discard_forward)
            for replica in replicas.replicas:
                stack.callback(forget_gradients, list(replica.module.parameters()))  # also where the step raises
            for number, rules in enumerate((*earlier, judge)):
                # Arguments are learned from the step that is judged;
                # earlier ones only lead up to it.
                replicas.metrics.example = whole.metric_calls if rules is judge else None
                self._leave_gradients(replicas, training)
                training.rules = rules
                slices = session.slices.weighted(self._slices_of(replicas, sizes), shadow)
                with step.pointing_at(shadow, session, rules, optimizers):
                    self._observe_step(session, slices, seen, number)
        step.note_draws(seen)
        self.metric_rules = replicas.metrics.rules_by_path()
        # Over all runs of a rehearsal: one that waited is enough to hold all micro-batches at once.
        self.has_waited |= replicas.has_met
        return judge, seen

    def _judge(self, whole: Observation, loss_reduction: str, unstable: frozenset[str]) -> JudgingRules:
        """Rules that find out, as they merge slices, how these give what one device did."""
        judge = JudgingRules(
            whole,
            self.step.tolerance,
            decides_loss=loss_reduction == "auto" and not self.step.by_hand,
            loss_reduction="sum" if loss_reduction == "sum" else "mean",
            unstable=unstable,
        )
        # Every judge begins without findings, but this was decided for the whole rehearsal.
        judge.metrics_give_slices = self.gives_slices
        return judge

    def _leave_gradients(self, replicas: ReplicaSet, training: TrainingStep) -> None:
        """Gradients are as a real step finds them: on the owners alone, and of the step before."""
        for replica in replicas.replicas:
            forget_gradients(replica.module.parameters())
        self.step.leave_gradients(training.owner_parameters)

    def _observe_step(self, session: "Session", slices: list[BatchSlice], seen: Observation, number: int) -> None:
        """One step of ``observe``, by the rules that its training step has; ``seen`` is then of this step.

        Args:
            session: Of the shadow.
            slices: What the step gets.
            seen: What is seen of it.
            number: How many steps the run has done before it.

        Raises:
            SlicesFail: the step itself has found that it cannot be run in slices.
        """
        step = self.step
        training = session.step
        shadow = session.module
        num_rows = sum(one.num_rows for one in slices)
        merged_log = StepLog(replace(slices[0], num_rows=num_rows))
        # A batch of its own, which nothing but these writes has touched.
        writes = step.watch_batch(self._rows.whole(num_rows))
        session.batches.writes = writes
        with recording(merged_log, shadow):
            final = self._forward(session, slices, step.args_of(number))
        # Before anything is compared: what failed is a reason, and not a difference.
        self._check_left_whole(session.whole_batches)
        seen.logged = {path_of(key): logged_value(*entry) for key, entry in merged_log.entries.items()}
        step.note_writes(writes, session.replicas, training.rules, seen)
        step.finish(seen, final, shadow, training.owner_parameters, training)
        seen.kept_apart = step.kept_apart([one.replica.module for one in slices])

    def _replicas_of(self, shadow: Any) -> Any:
        """Replicas like the real ones: on their devices, cut into as many, shifted alike."""
        step = self.step
        forget_shift(shadow)  # of the first replica; each gets its own
        # By hand, optimizers write the parameters, so replicas of the shadow have their own.
        parameters = () if step.by_hand else shared_parameters(step.replicas, shadow)
        micro_batches = step.replicas.partition.micro_batches
        devices = list(step.replicas.devices)
        replicas = step.replicas_of(shadow, devices, existing=parameters, workload="even", micro_batches=micro_batches)
        if step.changes_settings:  # of optimizers or the process, which all replicas share
            for some in (replicas, step.replicas):
                some.order.note_shared_write(step.call.name)
        for real, copied in zip(step.replicas.replicas, replicas.replicas, strict=True):
            shift = applied_shift(real.module)
            if shift is not None:
                shift_like(copied.module, shift)
        return replicas

    def _training_step(self, replicas: ReplicaSet) -> TrainingStep:
        options = self.step.strategy.options
        # A reducer object is set up for the replicas of the real step.
        reducer = options.reducer if isinstance(options.reducer, str) else "auto"
        return TrainingStep(replicas, reducer, MergeRules(), options.wire_dtype, options.gradient_buckets, None)

    def _check_left_whole(self, found: WholeBatches) -> None:
        """Raises the reason against slices that the step itself has found, if there is one.

        Raises:
            SlicesFail: it is.
        """
        name = self.step.call.name
        reason = found.reason_for(name)
        if reason is not None:
            raise SlicesFail(reason, found.advice_for(name))

    def _slices_of(self, replicas: ReplicaSet, sizes: tuple[int, ...]) -> list[BatchSlice]:
        parts = self._rows.slices(sizes)
        slices: list[BatchSlice] = []
        # Fewer slices than in the run, where all of them would have too many rows.
        active = self.step.call.active[: len(sizes)]
        for index, size, part in zip(active, sizes, parts, strict=True):
            slices.append(BatchSlice(replicas.replicas[index], size, part))
        return slices

    def _forward(self, session: "Session", slices: list[BatchSlice], args: tuple[Any, ...]) -> Any:
        call = self.step.call
        if self.step.trains:
            return session.training.forward(slices, args, call.kwargs)
        return session.evaluation.forward(call.name, slices, args, call.kwargs)
