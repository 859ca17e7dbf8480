"""The data flow of a validation, test or prediction step: as that of training, without a backward.

run       batch --slices--> slices --(rehearsal of the first)--> forward --> outputs for Lightning
  forward   slices --ReplicaCall of each--> outputs --MergeRules--> those of the whole batch, in sample order
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.replica_call import ReplicaCall
from lightning_dpx.lightning.run import step_context
from lightning_dpx.lightning.run_again import RunAgain, on_whole_batch
from lightning_dpx.replicas import BatchSlice, weights_of

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class EvaluationFlow:
    """The evaluation steps of a session.

    Args:
        session: What they are made of.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What one device's step would return for the whole batch.

        Args:
            name: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
            args: What Lightning calls it with: the batch, and perhaps indices of the batch and the loader.
            kwargs: The arguments that it gives by name.
        """
        session = self._session
        session.before_evaluation_batch()
        if not session.follow_structure(name):
            return session.strategy.session.evaluation.run(name, session.batch_of_one_device(args), kwargs)
        # To cut is to make replicas anew, which may fail and leave one device.
        is_cut = session.memory.choose_evaluation_micro_batches(name, args, kwargs)
        if is_cut and session.strategy.session is not session:
            return session.strategy.session.evaluation.run(name, session.batch_of_one_device(args), kwargs)
        slices = session.slices.of(name, args[0])
        is_known = False
        while session.verification.before_step(name, slices, args, kwargs, is_known=is_known):
            slices = session.slices.of(name, args[0])  # it may have to run whole, or in fewer slices
            is_known = True
        if len(slices) == 1 and not session.spans_processes:
            batch = session.batches.for_replica(slices[0], loader_index(args))
            with session.replicas.python_state.iterators_of_whole_batch():
                outputs = session.alone(name, (batch, *args[1:]), kwargs)
        else:
            again: RunAgain | None = None
            try:
                outputs = self.forward(name, slices, args, kwargs)
            except GatherError as error:
                again = on_whole_batch(session, name, error)
                if again is None:
                    raise
            # Not while it is handled, or an error of the whole batch would be told as one that came of it.
            if again is not None:
                return again.run_again(session, name, partial(self.run, name, args, kwargs))
        session.batches.end_step(name, args)
        return outputs

    def forward(self, name: str, slices: list[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Every replica's own step on its slice, and their results as one."""
        session = self._session
        dataloader_idx = loader_index(args)
        replicas = session.replicas
        rules = session.verification.rules(name, dataloader_idx)
        call = ReplicaCall(session, name, args[1:], kwargs, dataloader_idx=dataloader_idx)
        buffers = replicas.state.buffers
        try:
            with step_context(session.strategy.precision_plugin, name), call.effects_once(slices, rules):
                replicas.state.synchronize()
                # Always: that a step writes buffers may show when it has, and then it runs again whole.
                buffers.remember()
                outputs = replicas.run(name, slices, call)
                device = session.strategy.root_device
                merged = rules.merge_outputs(outputs, weights_of(slices), device, replicas.output_dim)
        except BaseException:
            buffers.restore()
            raise
        buffers.keep()
        if rules.decides_buffers:
            active = [batch_slice.replica for batch_slice in slices]
            rows = [batch_slice.num_rows for batch_slice in slices]
            buffers.collect(active, rows, rules.buffer_rule)
        return session.finished(name, merged)


def loader_index(args: tuple[Any, ...]) -> int:
    """Which of several loaders the batch of an evaluation step is from."""
    index: int = args[2] if len(args) > 2 else 0
    return index
