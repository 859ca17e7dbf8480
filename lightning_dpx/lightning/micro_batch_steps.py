"""The micro-batches of a training step: each runs forward and backward before the next one begins.

    slices --ReplicaCall, then its backward--> outputs without graphs --TrainingStep.merge--> one leaf loss
                                                                                              |
    Lightning: zero_grad, backward of the leaf --after_backward--> the step's gradients, handed in

What the backward of the leaf will begin with is expected (LossGradient), and made good if it was something else.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_dpx.lightning.expected_gradient import LossGradient
from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.lightning.two_pass_steps import TwoPassSteps
from lightning_dpx.replicas import BatchSlice

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class MicroBatchSteps:
    """Runs the micro-batches of a session's training steps.

    Args:
        session: Whose.

    Attributes:
        two_passes: Runs those whose loss needs the outputs of all.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._gradient = LossGradient(session)
        self._said_met = False
        self._is_first = True  # batch
        # By hand a step runs its own backwards, all of them before training_step_end.
        in_two_passes = session.end_hook("training_step") is not None and session.module.automatic_optimization
        self.two_passes: TwoPassSteps | None = TwoPassSteps(session) if in_two_passes else None

    def look_at_first(self, slices: list[BatchSlice]) -> None:
        """Says of the first batch, which counts as a full one, where a device has fewer rows than micro-batches."""
        if not self._is_first:
            return
        self._is_first = False
        replicas = self._session.replicas
        numbers = replicas.partition.numbers(training=True)
        rows = [0] * len(replicas.devices)
        for batch_slice in slices:
            rows[replicas.partition.device_of[batch_slice.replica.index]] += batch_slice.num_rows
        for device, number, count in zip(replicas.devices, numbers, rows, strict=True):
            if 0 < count < number:
                cut = f"{count} micro-batches of one row" if count > 1 else "one piece, M = 1"
                rank_zero_warn(
                    f"dpx: micro_batches={number} is more than the rows of a batch for {device}, {count}: its steps "
                    f"run in {cut}."
                )

    def run(self, slices: list[BatchSlice], call: Callable[[BatchSlice], Any]) -> list[Any]:
        """What the micro-batches return, without their graphs.

        Args:
            slices: The micro-batches.
            call: The user's step on one of them.
        """
        session = self._session
        gradient = self._gradient
        # Each backward runs before the loss is merged, so what that will give is expected here.
        outputs = session.step.run_early(
            slices,
            call,
            gradient.expected(),
            zeroed=gradient.zeroed(),
            shown=gradient.is_read_by_steps,
            last=session.training.sums_now,
        )
        if session.replicas.has_met and not self._said_met:
            self._said_met = True
            rank_zero_warn(
                "dpx: micro-batches wait for each other inside training_step (a collective, or a metric that is "
                "called as a function or computed there), so what all of them keep until then is held at once. A "
                "metric's update() does not wait."
            )
        return outputs
