"""Steps that raise an error on a slice of a batch, and none on the whole batch: one device would go on.

A score that needs both classes, or a scatter matrix of several rows, may have them in every slice for epochs, and then
be given a slice without. So such a batch runs again, whole. Where that fails as well, the error is the slices'.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lightning_dpx.devices import is_out_of_memory
from lightning_dpx.errors import DPXError, GatherError
from lightning_dpx.lightning.rehearsal.outcome import in_one_line

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

_Outputs = TypeVar("_Outputs")


class SliceError(GatherError):
    """A step has failed on slices, all that these have done is taken back, and it is to run on the whole batch.

    Args:
        error: The first slice's.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(in_one_line(error))


def may_be_of_slices(error: Exception) -> bool:
    """Whether the whole batch may do without ``error``, which a step has raised on a slice of it."""
    # An error of this package has a remedy of its own, and what does not fit as slices fits less as a whole.
    return not isinstance(error, DPXError) and not is_out_of_memory(error)


def on_whole_batch(session: "Session", name: str, failed: SliceError, run: Callable[[], _Outputs]) -> _Outputs:
    """What the step gives for the whole batch, from here on for every one, which is announced.

    Args:
        session: Of the step.
        name: Of the step.
        failed: What became of its slices.
        run: Runs the step again.

    Raises:
        Exception: that of the slices; the whole batch fails, too.
    """
    whole_batches = session.whole_batches
    whole_batches.keep_next_whole(name)
    outputs: list[_Outputs] = []
    try:
        outputs.append(run())
    except Exception:  # noqa: BLE001  of the two errors, that of the slices says where it was
        whole_batches.pop_next_whole(name)
    if not outputs:
        raise failed.error
    reason = f"It runs on the whole batch, but on a slice it raises {in_one_line(failed.error).removesuffix('.')}."
    whole_batches.give_whole(name, reason, "For all devices to take part, let it run on any number of rows.")
    return outputs[0]
