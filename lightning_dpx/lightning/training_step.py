"""The data flow of a training step, from the batch that Lightning gives to the gradients that its optimizer finds.

    run             batch --slices--> slices --(rehearsal, plan: of the first)--> forward --> the loss for Lightning
      forward         slices --ReplicaCall of each--> outputs --TrainingStep.merge--> one leaf loss   (step.py)
                                   |
                                   +-- slice to its device -> the user's own training_step -> what it logged

        micro-batches: every ReplicaCall with its own backward, see MicroBatchSteps

    after_backward  the leaf's gradient --TrainingStep.backward--> gradients of every replica            (step.py)
                                        --TrainingStep.reduce---> their sums on the owners

A batch that one replica gets whole, with no other process to wait for, takes the way of one device: see Run.alone in
run.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.devices import is_out_of_memory
from lightning_dpx.errors import CollectiveError, GatherError, WholeBatchError
from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.lightning.lightning_compat import skips_backward
from lightning_dpx.lightning.manual.manual import ManualOptimization
from lightning_dpx.lightning.replica_call import ReplicaCall
from lightning_dpx.lightning.run_again import RunAgain, StaysWhole, on_whole_batch
from lightning_dpx.lightning.whole_batches import ADVICE
from lightning_dpx.replicas import BatchSlice
from lightning_dpx.replicas.shared_iterators import put_iterators_back

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

NAME = "training_step"
Modes = tuple[tuple[bool, ...], tuple[bool, ...]]


class TrainingFlow:
    """The training steps of a session.

    Args:
        session: What they are made of.

    Attributes:
        accumulates: Whether gradients stay on the replicas, to be summed after a later batch.
        manual: What replicas do together in steps by hand; ``None`` before the first of them.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.accumulates = False
        self.manual: ManualOptimization | None = None
        self._ran_as_one_slice = False  # the last one
        self._was_by_hand = not session.module.automatic_optimization
        self._modes: Modes | None = None  # in which the epoch began

    def begin_epoch(self) -> None:
        """Callbacks may have frozen or unfrozen parts: the step is another one then, and is checked anew."""
        modes = _modes_of(self._session.module)
        if self._modes is not None and modes != self._modes:
            self._session.verification.reopen(NAME)
        self._modes = modes
        self._session.memory.begin_epoch()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What one device's training step would return for the whole batch.

        Args:
            args: What Lightning calls the step with: the batch, and perhaps its index.
            kwargs: The arguments that it gives by name.
        """
        session = self._session
        # The backward comes later, from the precision plugin, and must know which way
        # this step took.
        self._ran_as_one_slice = self._is_one_slice()
        if self._ran_as_one_slice:
            return self._run_one_slice(args, kwargs)
        if not session.follow_structure(NAME):
            # The replicas were given up just now, and the strategy has the session of one device.
            return session.strategy.session.training.run(session.batch_of_one_device(args), kwargs)
        self._follow_optimization()
        # What hooks write through .data no version tells, and a step by hand, or one within a window of accumulation,
        # is not followed by an optimizer that has all replicas get everything.
        if session.gradient_hooks.between_steps:
            session.replicas.state.parameters.mark_changed()
        session.memory.begin_step()
        args = session.memory.rewindable(args)
        slices = self._slices_to_run(args, kwargs)
        if session.strategy.session is not session:
            return session.strategy.session.training.run(session.batch_of_one_device(args), kwargs)
        session.memory.before_step(slices, args, kwargs)
        if self.runs_alone(slices):
            outputs = self._run_alone(slices[0], args, kwargs)
        else:
            session.replicas.claim_cores()
            # With the whole batch a step may write parameters, as on one device, also where others own them.
            session.replicas.state.parameters.unseen.by_step = session.step.has_other_owners and len(slices) == 1
            forward = session.memory.guarded_forward(self.forward)
            again: RunAgain | None = None
            try:
                outputs = forward(slices, args, kwargs)
            except BaseException as error:
                self._discard(error)
                again = self._again(error)
                if again is None:
                    raise
            # Not while it is handled, or an error of the whole batch would be told as one that came of it.
            if again is not None:
                return again.run_again(session, NAME, partial(self.run, args, kwargs))
            if session.gradient_hooks.before_backward_of_step:
                session.step.show_buffers()
        put_iterators_back(session.module)
        session.memory.end_step()
        has_backward = session.module.automatic_optimization and not skips_backward(session.trainer)
        # Hooks in between may look at a batch that one at its start has kept.
        waits = has_backward and outputs is not None and not session.gradient_hooks.before_backward_of_step
        session.batches.end_step(NAME, args, backward_follows=waits)
        return outputs

    def _slices_to_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[BatchSlice]:
        """The slices of a batch, rehearsed and cut to fit; the strategy may have the session of one device then."""
        session = self._session
        slices = self.rehearsed(session.slices.of(NAME, args[0]), args, kwargs)
        # To cut otherwise is to make replicas anew, which may fail.
        if session.strategy.session is not session:
            return slices
        # Micro-batches are other slices than those that were rehearsed, so they are
        # rehearsed as well.
        if session.memory.choose_micro_batches(slices, args, kwargs):
            return self.rehearsed(session.slices.of(NAME, args[0]), args, kwargs, is_known=True)
        return slices

    def rehearsed(
        self, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_known: bool = False
    ) -> list[BatchSlice]:
        """The slices after a rehearsal, which may have found that the batch must stay whole."""
        if self._session.verification.before_step(NAME, slices, args, kwargs, is_known=is_known):
            return self._session.slices.of(NAME, args[0])
        return slices

    def _follow_optimization(self) -> None:
        """Rechecks the step if a hook switched between automatic and manual optimization."""
        session = self._session
        by_hand = not session.module.automatic_optimization
        if by_hand == self._was_by_hand:
            return
        self._was_by_hand = by_hand
        session.verification.reopen(NAME)
        if self.manual is not None and not by_hand:
            self.manual.gradients.leave()
        # By hand micro-batches are replicas of their own, and replicas were made for the other kind of step.
        if by_hand and session.replicas.cuts_slices:
            session.replicas.partition.stop_cutting_slices(training=True)
            rank_zero_warn(
                f"dpx: {NAME} has its slices in one piece from here on, not in micro-batches: it optimizes by hand "
                "now, and did not when the run began. For micro-batches, begin with automatic_optimization = False."
            )

    def _is_one_slice(self) -> bool:
        """Whether replicas on one device take every batch as one, and nothing else is asked of them."""
        session = self._session
        replicas = session.replicas
        # A step that is timed, or tried in threads, is one that every replica takes part in.
        is_plain = replicas.partition.is_one_slice and replicas.times is None and not session.threads.is_open
        if not is_plain or session.shifts or session.memory.is_on:
            return False
        alone = not session.spans_processes and not session.step.has_other_owners
        return alone and session.module.automatic_optimization

    def _run_one_slice(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step of one device."""
        # Idle replicas follow the module's structure once there is something to do for them: to ask for it,
        # for slices and for a rehearsal took 40 us of 470 of an empty step.
        session = self._session
        session.replicas.release_cores()  # threads may have been given up just before
        if not session.batches.is_in_place(args[0]):
            whole = session.replicas.whole_slice(args[0], 1)
            args = (session.batches.for_replica(whole), *args[1:])
        outputs = session.alone(NAME, args, kwargs)
        put_iterators_back(session.module)
        session.batches.end_step(NAME, args)
        return outputs

    def runs_alone(self, slices: Sequence[BatchSlice]) -> bool:
        """Whether the first replica has the whole batch, and nothing of it concerns the others or other processes."""
        session = self._session
        if len(slices) > 1 or session.spans_processes or session.memory.repeats_steps or session.step.has_other_owners:
            return False
        # By hand, a step of one active replica still concerns the gradients of the others.
        return session.module.automatic_optimization or session.replicas.partition.is_one_slice

    def _run_alone(self, batch_slice: BatchSlice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._session
        session.replicas.release_cores()
        if session.threads.is_open:
            return session.threads.choose(batch_slice, args, kwargs)
        args = (session.batches.for_replica(batch_slice), *args[1:])
        with session.replicas.python_state.iterators_of_whole_batch():
            return session.alone(NAME, args, kwargs)

    def forward(self, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Every replica's own step on its slice, and their results as one."""
        session = self._session
        step = self._session.step
        finish = session.end_hook(NAME)
        by_hand = not session.module.automatic_optimization
        # With training_step_end a step may return anything, and by hand Lightning wants no loss.
        call = ReplicaCall(session, NAME, args[1:], kwargs, checks_loss=not by_hand and finish is None)
        try:
            # Entered once and carried into the workers: some of these contexts change the whole process.
            with session.strategy.precision_plugin.train_step_context(), call.effects_once(slices, step.rules):
                if by_hand:
                    return session.finished(NAME, self._run_by_hand(slices, call))
                step.begin()
                # What the second pass of a micro-batch logs is dropped, as this call has no logs
                # of its own.
                again = ReplicaCall(session, NAME, args[1:], kwargs) if finish is not None else call
                outputs = self._runner(again)(slices, call)
                return step.merge(slices, outputs, finish)
        except BaseException:
            # Whatever has failed, buffers are put back and no pending loss is left for
            # a later backward.
            step.discard_forward()
            raise

    def repeat_forward(self, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """For another backward of the same step: nothing is logged or counted twice."""
        session = self._session
        call = ReplicaCall(session, NAME, args[1:], kwargs)
        # As in forward(), but for what outlasts a step: metrics and settings are put back.
        context = session.strategy.precision_plugin.train_step_context()
        with context, session.metrics.kept(slices), session.settings.kept():
            session.step.begin()
            call.share_draws(session.step.rules)
            outputs = self._runner(call)(slices, call)
            session.step.merge(slices, outputs, session.end_hook(NAME))

    def _runner(self, again: ReplicaCall) -> Callable[[list[BatchSlice], ReplicaCall], list[Any]]:
        """What runs the user's step on slices: on whole ones, or on micro-batches, whose outputs have no graphs.

        Returned, and not called here: one frame fewer above the user's code in a traceback.

        Args:
            again: The user's step for a second pass.
        """
        session = self._session
        micro_batches = session.micro_batches
        if micro_batches is None or (micro_batches.two_passes is not None and not session.replicas.cuts_slices):
            return partial(session.replicas.run, NAME)
        if micro_batches.two_passes is not None:
            return partial(micro_batches.two_passes.first, again=again)
        return micro_batches.run

    def _run_by_hand(self, slices: list[BatchSlice], call: ReplicaCall) -> Any:
        """The user drives backward and optimizers, and the replicas meet in them."""
        session = self._session
        if self.manual is None:
            strategy = session.strategy
            # Kept over steps: it remembers which gradients hooks have written between them.
            self.manual = ManualOptimization(strategy, session.replicas, session.step, strategy.dpx_precision)
        manual = self.manual

        def with_meetings(batch_slice: BatchSlice) -> Any:
            with manual.on(batch_slice):
                return call(batch_slice)

        with manual.running(slices):
            return session.step.forward_manual(slices, with_meetings, self._on_unmergeable)

    def _on_unmergeable(self, error: GatherError) -> None:
        """By hand, the step has trained on its batch, and only what it returns is of slices."""
        if self._session.spans_processes:
            raise error
        what = f"{error} Of this batch, on_train_batch_end gets what the first slice returned."
        self._session.whole_batches.give_whole(NAME, what, ADVICE)

    def _again(self, error: BaseException) -> RunAgain | None:
        """How a step that failed on slices runs again; ``None`` where it does not."""
        if isinstance(error, GatherError):
            return on_whole_batch(self._session, NAME, error)
        manual = self.manual
        if manual is None:
            return None
        # What slices cannot do by hand shows when they do it. Of the first such step there
        # is a snapshot; later ones cannot be undone.
        if isinstance(error, WholeBatchError) and manual.undo_first_step():
            return StaysWhole(error.reason, error.advice)
        if isinstance(error, CollectiveError) and error.is_disagreement and manual.begin_anew():
            return StaysWhole(
                "Its slices do not agree on what to do, as by a branch on a loss.",
                "For all devices to take part, decide by a value of the whole batch (self.all_gather).",
            )
        return None

    def _discard(self, error: BaseException) -> None:
        """Drops the failed step's gradients; those of earlier batches stay where they can be told apart."""
        # Where some replicas have added theirs, no gradient is that of earlier batches alone; else all stay that
        # one device would still have.
        is_partial = isinstance(error, CollectiveError | WholeBatchError) or is_out_of_memory(error)
        if isinstance(error, Exception) and not is_partial:
            self._session.step.keep_earlier_batches()
        else:
            self._session.step.discard()

    @property
    def sums_now(self) -> bool:
        """Whether this step's gradients are summed; not if they only accumulate.

        But hooks that look at gradients in the middle of an accumulation window must find those of one device.
        """
        return not self.accumulates or self._session.gradient_hooks.within_window

    def after_backward(self) -> None:
        """After Lightning's backward of the merged loss: every replica's own, and the sums of their gradients."""
        if self._ran_as_one_slice:
            return  # that was all of it
        self._session.memory.run_guarded_backward(self._backward)
        # A step by hand runs its backwards itself, and goes on after them.
        if self._session.module.automatic_optimization:
            self._session.batches.move()

    def _backward(self) -> None:
        session = self._session
        step = self._session.step
        hooks = session.gradient_hooks
        sums_now = self.sums_now
        try:
            # Copies of gradients on the user's module would otherwise be added to by this backward.
            hooks.before_backward()
            step.backward(last=sums_now)
            session.memory.end_backward()
            # Until then gradients wait on the replicas: to sum them for every batch of a window
            # would cost a reduction each.
            if sums_now:
                step.reduce()
                hooks.after_backward()
        except BaseException:
            step.discard()
            raise


def _modes_of(module: torch.nn.Module) -> Modes:
    """Which parts are in training mode, and which parameters are trained."""
    parts = tuple(part.training for part in module.modules())
    return parts, tuple(parameter.requires_grad for parameter in module.parameters())
