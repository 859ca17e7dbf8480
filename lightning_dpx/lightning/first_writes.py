"""What a step writes for the first time in a later batch: how slices bring it together is not known yet.

A flag that is set from the third epoch on, or an average that begins after a warm-up, was a constant when the step was
checked; a list to which every third step appends stayed as it was. The batch runs again whole, as one in which a step
draws for the first time, and the next one is checked.
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


class FirstWritesError(RunAgain):
    """Slices have written buffers or lists for the first time: the step is to run again on the whole batch.

    Args:
        names: Theirs.
        rules: Of the step.
    """

    def __init__(self, names: Sequence[str], rules: MergeRules) -> None:
        self._rules = rules
        self._reason = (
            f"It writes {some_of(names)} in this batch, and wrote nothing there when it was checked. Its slices had "
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
    session: "Session", slices: Sequence[BatchSlice], rules: MergeRules, beginning: StepBeginning
) -> None:
    """Has the whole batch write what slices have each begun to write; where that cannot be, it is told as unchecked.

    Args:
        session: Of the step.
        slices: What has run.
        rules: Of the step.
        beginning: What the step has begun with.

    Raises:
        FirstWritesError: the step is to run again.
    """
    _follow_containers(session, rules, beginning)
    written = session.replicas.state.buffers.written([batch_slice.replica for batch_slice in slices])
    if not written:
        return
    # Once each: what a check cannot see written would have every batch run twice.
    rules.written_buffers = rules.written_buffers.union(written)
    if beginning.can_begin_again():
        raise FirstWritesError([f"self.{path}" for path in written], rules)
    for path in written:
        rules.news.note(f"self.{path}")


def _follow_containers(session: "Session", rules: MergeRules, beginning: StepBeginning) -> None:
    """The same of lists, sets and dicts, which get items of every slice where one device would give them one.

    Raises:
        FirstWritesError: the step is to run again.
    """
    news = rules.news
    grown = session.replicas.python_state.grown_containers() - news.seen_attributes
    # What changes unseen again and again is told, and would have many batches run twice.
    grown -= news.often_unseen(grown)
    if grown and beginning.can_begin_again():
        # A step may do so in every so many batches, of which the next one is checked.
        news.note_changed_by_whole(grown, news.batch)
        raise FirstWritesError([f"self.{path}" for path in sorted(grown)], rules)
