"""Buffers that a step writes for the first time in a later batch: how slices bring them together is not known yet.

A flag that is set from the third epoch on, or an average that begins after a warm-up, was a constant when the step was
checked. The batch runs again whole, as one in which a step draws for the first time, and the next one is checked.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from lightning_dpx.errors import some_of
from lightning_dpx.lightning.run_again import RunAgain
from lightning_dpx.lightning.step_beginning import StepBeginning
from lightning_dpx.replicas import BatchSlice, MergeRules

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

T = TypeVar("T")


class BuffersWrittenError(RunAgain):
    """Slices have written buffers for the first time: the step is to run again on the whole batch.

    Args:
        buffers: Their names.
        rules: Of the step.
    """

    def __init__(self, buffers: Sequence[str], rules: MergeRules) -> None:
        self._rules = rules
        self._reason = (
            f"It writes {some_of(buffers)} in this batch, and wrote nothing there when it was checked. Its slices had "
            "begun it: what it counts outside of the module, they did as well."
        )
        super().__init__(self._reason)

    def run_again(self, session: "Session", name: str, run: Callable[[], T]) -> T:
        """See :meth:`RunAgain.run_again`."""
        session.whole_batches.give_next_whole(name, self._reason)
        # The next batch is checked with what this one has begun.
        self._rules.news.is_pending = True
        return run()


def follow_first_writes(
    session: "Session", name: str, slices: Sequence[BatchSlice], rules: MergeRules, beginning: StepBeginning
) -> None:
    """Has the whole batch write what slices have each begun to write; where that cannot be, it is told as unchecked.

    Args:
        session: Of the step.
        name: Of the step.
        slices: What has run.
        rules: Of the step.
        beginning: What the step has begun with.

    Raises:
        BuffersWrittenError: the step is to run again.
    """
    written = session.replicas.state.buffers.written([batch_slice.replica for batch_slice in slices])
    if not written:
        return
    # Once each: what a check cannot see written would have every batch run twice.
    rules.written_buffers = rules.written_buffers.union(written)
    # In an evaluation nothing is kept that buffers could be put back from.
    if name == "training_step" and beginning.can_begin_again():
        raise BuffersWrittenError([f"self.{path}" for path in written], rules)
    for path in written:
        rules.news.note(f"self.{path}")
