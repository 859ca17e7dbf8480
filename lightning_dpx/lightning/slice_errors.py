"""Steps that raise an error on a slice of a batch, and none on the whole batch: one device would go on.

A score that needs both classes, or a scatter matrix of several rows, may have them in every slice for epochs, and then
be given a slice without. So such a batch runs again, whole. Where that fails as well, the error is that of the whole.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lightning_dpx.devices import is_out_of_memory
from lightning_dpx.errors import DPXError
from lightning_dpx.lightning.rehearsal.outcome import in_one_line
from lightning_dpx.lightning.run_again import RunAgain

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

T = TypeVar("T")


class SliceStepError(RunAgain):
    """A step has failed on slices, all that these have done is taken back, and it is to run on the whole batch.

    Args:
        error: The first slice's.
    """

    def __init__(self, error: Exception) -> None:
        # Not the error itself: by its traceback it would hold what slices have computed, beside the whole batch.
        self.reason = in_one_line(error)
        super().__init__(self.reason)

    def run_again(self, session: "Session", name: str, run: Callable[[], T]) -> T:
        """What the step gives for the whole batch, from here on for every one, which is announced.

        An error of the whole batch is raised as it is: that is the one that one device would have raised, and a
        debugger finds in its frames what the step had.

        Args:
            session: Of the step.
            name: Of the step.
            run: Runs the step again.
        """
        whole_batches = session.whole_batches
        whole_batches.keep_next_whole(name)
        try:
            outputs = run()
        except Exception as error:
            whole_batches.pop_next_whole(name)
            # Often it is the same one; another may have come of the larger batch, as where that does not fit.
            if in_one_line(error) != self.reason:
                error.add_note(f"Before, {name} had raised on a slice of this batch: {self.reason}")
            raise
        # Only the module, the generators and the batch are known to be as they were.
        reason = (
            f"It runs on the whole batch, but on a slice it raises {self.reason.removesuffix('.')}. Its slices had "
            "begun that batch: what it counts outside of the module, they did as well."
        )
        whole_batches.give_whole(name, reason, "For all devices to take part, let it run on any number of rows.")
        return outputs


class SomeStopError(RunAgain):
    """Some slices have set ``trainer.should_stop``, and others have not: the whole batch is to say whether it does.

    Args:
        name: Of the step.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} has set trainer.should_stop on some of its slices, and not on all.")

    def run_again(self, session: "Session", name: str, run: Callable[[], T]) -> T:
        """See :meth:`RunAgain.run_again`."""
        # This batch alone: the next ones may agree.
        session.whole_batches.give_next_whole(
            name,
            "It sets trainer.should_stop on some of its slices, and not on all. Its slices had begun it: what it "
            "counts outside of the module, they did as well.",
            "For all devices to take part, decide it in on_train_batch_end and its like, which see the whole batch.",
        )
        return run()


def may_be_of_slices(error: Exception) -> bool:
    """Whether the whole batch may do without ``error``, which a step has raised on a slice of it."""
    # An error of this package has a remedy of its own, and what does not fit as slices fits less as a whole.
    return not isinstance(error, DPXError) and not is_out_of_memory(error)
