"""Random draws of a step that drew nothing when it was checked, as one that draws new features in every 1,000th batch.

Slices would each draw for themselves, and what they have drawn is in what they have kept. So that batch is run again
on one device, from the states that the generators had when it began; the next one is checked. A batch that its slices
have written (an augmentation in place) is none to begin with again.

The generators of a process are those of all its threads: one that loads batches in the background, or another run, may
have drawn meanwhile. When the step runs again it is seen whether it draws.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from lightning_dpx.lightning.lightning_api import rank_zero_info
from lightning_dpx.lightning.run_again import RunAgain
from lightning_dpx.lightning.step_beginning import StepBeginning
from lightning_dpx.python_objects.compiled import compiled_names
from lightning_dpx.replicas import MergeRules, ThreadDraws

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

T = TypeVar("T")

REASON = (
    "It draws random numbers in this batch, and drew none when it was checked. Its slices had begun it: what it counts "
    "outside of the module, they did as well."
)
_OTHERS = (
    "dpx: another thread draws random numbers while steps run, from the generators that they share; from here on it is "
    "not noticed if a step that drew none begins to."
)


class DrawsAppear(RunAgain):
    """Random numbers were drawn while slices ran, for the first time: the step is to run again on the whole batch.

    Args:
        draws: Of the step.
    """

    def __init__(self, draws: "FirstDraws") -> None:
        super().__init__(REASON)
        self._draws = draws

    def run_again(self, session: "Session", name: str, run: Callable[[], T]) -> T:
        """See :meth:`FirstDraws.run_again`."""
        return self._draws.run_again(run)


class FirstDraws:
    """A step that drew nothing when it was checked, and may draw in the slices that run now.

    Args:
        session: Of the step.
        name: Of the step.
        beginning: What the step has begun with.
        rules: Of the step.
    """

    def __init__(self, session: "Session", name: str, beginning: StepBeginning, rules: MergeRules) -> None:
        self._session = session
        self._name = name
        self._beginning = beginning
        self._rules = rules
        self._after = beginning.generators  # where the slices have left them

    def follow(self) -> None:
        """Has the whole batch draw where slices have each drawn for themselves; else it is told as unchecked.

        Raises:
            DrawsAppear: the step is to run again, on the whole batch.
        """
        watch = self._session.replicas.traits.draws
        on_host = not watch.is_of_others and watch.has_drawn(self._beginning.generators)
        # Other threads mostly draw on the host, and one that draws on a device is seen when the step runs again.
        if not on_host and not self._beginning.has_drawn_on_devices():
            return
        if not self._beginning.can_begin_again():
            self._rules.news.note_first_draws()
            return
        # One device draws from where the batch began.
        self._after = watch.now()
        self._beginning.put_back()
        raise DrawsAppear(self)

    def run_again(self, run: Callable[[], T]) -> T:
        """What the step gives for the whole batch; says so if it draws itself.

        Args:
            run: Runs the step on the batch, anew.
        """
        watch = self._session.replicas.traits.draws
        # Not announced yet: it may be another thread that has drawn.
        whole_batches = self._session.whole_batches
        whole_batches.keep_next_whole(self._name)
        own = ThreadDraws()
        # In a dispatch mode compiled code would run as it was written, and draw other numbers.
        is_compiled = bool(compiled_names(self._session.module))
        with nullcontext() if is_compiled else own:
            outputs = run()
        # Draws of Python and NumPy, as those of compiled code, show in the states alone.
        by_states = watch.has_drawn if is_compiled else watch.has_drawn_outside_torch
        is_own = own.seen or by_states(self._beginning.generators)
        # A step that seeds a generator leaves it where its slices have.
        is_own = is_own or self._beginning.has_drawn_on_devices()
        is_own = is_own or (watch.has_drawn(self._beginning.generators) and not watch.has_drawn(self._after))
        if is_own:
            whole_batches.announce_batch(self._name, REASON, "", REASON)
            self._rules.news.is_pending = True
            return outputs
        # Else that thread would draw again what it has drawn.
        self._after.put_back()
        # It would make every batch run twice.
        watch.is_of_others = True
        rank_zero_info(_OTHERS)
        return outputs
