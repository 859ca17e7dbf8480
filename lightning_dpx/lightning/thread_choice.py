"""Whether replicas on one host take their slices as one, or each in a thread: the first step is timed both ways."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.errors import some_of
from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.lightning.transfers import Transfer
from lightning_dpx.python_objects.compiled import compiled_names
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.replicas import BatchSlice, Trial, first_loss

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class ThreadChoice:
    """The choice of a session, which is made once.

    Args:
        session: Whose replicas.

    Attributes:
        is_open: Whether the first step decides; nothing is tried otherwise.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.is_open: bool = False

    def consider(self) -> None:
        """Whether the first step is worth a trial; says why not where one replica does the work of all."""
        session = self._session
        module = session.module
        replicas = session.replicas
        compiled = compiled_names(module)
        # Each of these a trial would do twice, could not watch, or could not judge by
        # losses of slices.
        if not module.automatic_optimization:
            reason = "it optimizes by hand"
        elif session.metrics:
            reason = "it has metric objects"
        elif session.end_hook("training_step") is not None:
            reason = "its loss sees the whole batch"
        elif compiled:
            reason = f"compiled code cannot be watched ({some_of(compiled)})"
        elif replicas.partition.may_train_apart:
            self.is_open = True
            return
        else:
            reason = replicas.partition.why_one_slice
        if replicas.partition.is_one_slice:
            session.announce_replicas(f"take their slices as one: {reason}")

    def choose(self, batch_slice: BatchSlice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One device's step, watched, to choose between one slice for all and a thread per replica from then on.

        Args:
            batch_slice: The whole batch.
            args: What Lightning calls the step with.
            kwargs: The arguments that it gives by name.
        """
        self.is_open = False
        session = self._session
        replicas = self._session.replicas
        trial = Trial(replicas.root.module, len(replicas.replicas))
        with session.context(session.module), replicas.python_state.iterators_shared() as iterators:

            def alone() -> Any:
                batch = session.batches.for_replica(batch_slice)
                return session.step_without_end_hook("training_step", (batch, *args[1:]), kwargs)

            output = trial.watch(alone)
            # The step on slices takes the same items as the one that was watched.
            iterators.rewind()
            verdict = trial.verdict(first_loss(output), self._loss_of_slices(args, kwargs))
        replicas.choose(threads=verdict.threads)
        how = "run in threads" if verdict.threads else "take their slices as one"
        session.announce_replicas(f"{how}: {verdict.reason}")
        return output

    def _loss_of_slices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """The loss of the same step in threads, which is tried on copies and forgotten."""
        session = self._session
        step = self._session.step
        replicas = self._session.replicas
        transfer = Transfer(session.trainer, session.module, 0)

        def run(batch_slice: BatchSlice) -> Any:
            module: Any = batch_slice.replica.module
            with StepLog(batch_slice).recording(module):
                return module.training_step(transfer.to_replica(batch_slice), *args[1:], **kwargs)

        def loss() -> Any:
            replicas.choose(threads=True)
            # The user's own module takes no part: the trial is forgotten, and must leave no
            # trace on it.
            copies = [replicas.replicas[max(1, index)] for index in range(len(replicas.replicas))]
            slices = [
                replace(batch_slice, replica=copies[batch_slice.replica.index])
                for batch_slice in replicas.slices(args[0])
            ]
            replicas.python_state.share()
            try:
                # The run goes on with the numbers that one step has left, not two.
                preserved = preserve_rng_state(replicas.devices, [replicas.root.module])
                with preserved, torch.no_grad(), session.strategy.precision_plugin.train_step_context():
                    step.begin()
                    return first_loss(step.merge(slices, replicas.run("training_step", slices, run)))
            finally:
                step.discard()

        return loss
