"""The training step that a run is about to take, by a shadow module: tried before it happens, for its memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.lightning.rehearsal.manual_shadow_step import ManualSandbox
from lightning_dpx.lightning.transfers import Transfer
from lightning_dpx.replicas import BatchSlice, Replica
from lightning_dpx.replicas.error_notes import FirstNaN, annotate
from lightning_dpx.replicas.shared_iterators import PeekedIterator

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a step is about to run on.

    Attributes:
        slices: The slices of the batch.
        args: What Lightning calls the step with.
        kwargs: The arguments that it gives by name.
    """

    slices: list[BatchSlice]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ShadowRun:
    """Runs the user's step on rows, as often as a profile asks for it; what it logs is not read.

    Args:
        session: Whose step.
        step: What it is about to run on.
        peeked: The iterators that it takes items from.
    """

    def __init__(self, session: "Session", step: StepInput, peeked: Sequence[PeekedIterator]) -> None:
        self._session = session
        self._step = step
        self._peeked = peeked
        # Optimizers hold the owners' parameters, which with
        # reducer="colocate" are spread over devices.
        self._sandbox = ManualSandbox(
            session.strategy, session.module, session.step.owner_parameters, session.replicas.devices
        )

    def __call__(self, module: Any, rows: Any, num_rows: int) -> Any:
        """What the step of ``module``, a shadow, returns for a batch of ``num_rows`` rows."""
        for iterator in self._peeked:
            # Every profile of the same step gets the same items, and the
            # step itself gets them again.
            iterator.rewind(is_tried=True)
        batch_slice = BatchSlice(Replica(0, module.device, module), num_rows, rows)
        try:
            if module.automatic_optimization:
                return self._run_step(module, batch_slice)
            with self._sandbox.opened(module):
                return self._run_step(module, batch_slice)
        except BaseException as error:
            # A tried step may be the first to fail, and its error ends the run: it
            # gets the notes of a real one.
            annotate(error, module, module.device, FirstNaN())
            raise

    def _run_step(self, module: Any, batch_slice: BatchSlice) -> Any:
        session = self._session
        transfer = Transfer(session.trainer, session.module, 0)
        context = session.context(module)
        precision = session.strategy.precision_plugin.train_step_context()
        with StepLog(batch_slice).recording_alone(module), precision, context:
            return module.training_step(transfer.to_replica(batch_slice), *self._step.args[1:], **self._step.kwargs)
