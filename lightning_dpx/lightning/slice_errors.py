"""Steps that raise an error on a slice of a batch, and none on the whole batch: one device would go on.

A score that needs both classes, or a scatter matrix of several rows, may have them in every slice for epochs, and then
be given a slice without. So such a batch runs again, whole. Where that fails as well, the error is that of the whole.
"""

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lightning_dpx.devices import is_out_of_memory
from lightning_dpx.errors import DPXError, GatherError
from lightning_dpx.lightning.rehearsal.outcome import in_one_line

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

_Outputs = TypeVar("_Outputs")


class SliceStepError(GatherError):
    """A step has failed on slices, all that these have done is taken back, and it is to run on the whole batch.

    Args:
        error: The first slice's.
    """

    def __init__(self, error: Exception) -> None:
        # Not the error itself: by its traceback it would hold what slices have computed, beside the whole batch.
        self.reason = in_one_line(error)
        super().__init__(self.reason)

    def let_go(self) -> None:
        """What slices have computed goes, which the frames of the failed step still hold."""
        waiting: list[BaseException | None] = [self]
        seen = set[int]()
        while waiting:
            error = waiting.pop()
            if error is None or id(error) in seen:
                continue
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            for frame, _ in traceback.walk_tb(error.__traceback__):
                # Until Python 3.13 a frame keeps locals that were read for a note, and forgets them when read again.
                frame.f_locals  # noqa: B018
            waiting += [error.__cause__, error.__context__]


def may_be_of_slices(error: Exception) -> bool:
    """Whether the whole batch may do without ``error``, which a step has raised on a slice of it."""
    # An error of this package has a remedy of its own, and what does not fit as slices fits less as a whole.
    return not isinstance(error, DPXError) and not is_out_of_memory(error)


def on_whole_batch(session: "Session", name: str, on_slices: str, run: Callable[[], _Outputs]) -> _Outputs:
    """What the step gives for the whole batch, from here on for every one, which is announced.

    An error of the whole batch is raised as it is: that is the one that one device would have raised, and a debugger
    finds in its frames what the step had.

    Args:
        session: Of the step.
        name: Of the step.
        on_slices: What its slices have raised, in one line.
        run: Runs the step again.
    """
    whole_batches = session.whole_batches
    whole_batches.keep_next_whole(name)
    try:
        outputs = run()
    except Exception as error:
        whole_batches.pop_next_whole(name)
        # Often it is the same one; another may have come of the larger batch, as where that does not fit.
        if in_one_line(error) != on_slices:
            error.add_note(f"Before, {name} had raised on a slice of this batch: {on_slices}")
        raise
    # Only the module, the generators and the batch are known to be as they were.
    reason = (
        f"It runs on the whole batch, but on a slice it raises {on_slices.removesuffix('.')}. Its slices had begun "
        "that batch: what it counts outside of the module, they did as well."
    )
    whole_batches.give_whole(name, reason, "For all devices to take part, let it run on any number of rows.")
    return outputs
