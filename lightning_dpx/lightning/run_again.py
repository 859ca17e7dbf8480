"""Steps that run a second time on the whole batch, as what their slices did is no part of one device's step.

Raised from within slices, caught by the flows of training and evaluation once all slices have ended, which take back
what these have done and then do what the error says.
"""

import traceback
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeVar

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.whole_batches import ADVICE

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

T = TypeVar("T")


class RunAgain(GatherError):  # noqa: N818  the step goes on, whole
    """A step is to run again, and has an error of its own only where that is not possible."""

    @abstractmethod
    def run_again(self, session: "Session", name: str, run: Callable[[], T]) -> T:
        """What the step returns for the whole batch.

        Args:
            session: Of the step.
            name: Of the step.
            run: Runs the step on the same batch, anew.
        """

    def let_go(self) -> Self:
        """The same error, without what slices have computed, which the frames of the failed step still hold."""
        # The whole batch would need its memory beside what its slices hold: two steps at once.
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
        return self.with_traceback(None)


class StaysWhole(RunAgain):
    """A step can do on the whole batch alone what it does: this batch and all that follow stay whole.

    Args:
        reason: What it does, as a sentence.
        advice: What to do about it, in sentences.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self._reason = reason
        self._advice = advice

    def run_again(self, session: "Session", name: str, run: Callable[[], T]) -> T:
        """See :meth:`RunAgain.run_again`."""
        # Announced first, so that an error of the whole batch comes after the reason why it ran.
        session.whole_batches.give_whole(name, self._reason, self._advice)
        return run()


def on_whole_batch(session: "Session", name: str, error: GatherError) -> RunAgain | None:
    """How a step whose slices have ended with ``error`` runs again; ``None`` where it does not.

    Args:
        session: Of the step.
        name: Of the step.
        error: What was raised; what slices have computed is gone by then.
    """
    if isinstance(error, RunAgain):
        return error.let_go()
    # Results that do not fit together are those of slices: the whole batch has one.
    return StaysWhole(f"{error}", ADVICE) if session.can_repeat(name) else None
