"""Random draws of a step that drew nothing when it was checked, as one that draws new features in every 1,000th batch.

Slices would each draw for themselves, and what they have drawn is in what they have kept. So that batch is run again
on one device, from the states that the generators had when it began; the next one is checked. A batch that its slices
have written (an augmentation in place) is none to begin with again.

The generators of a process are those of all its threads: one that loads batches in the background, or another run, may
have drawn meanwhile. When the step runs again it is seen whether it draws.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.lightning_api import rank_zero_info
from lightning_dpx.lightning.memory.batch_shapes import arrays_in
from lightning_dpx.python_objects.compiled import compiled_names
from lightning_dpx.replicas import BatchSlice, MergeRules, SeenGenerators, ThreadDraws
from lightning_dpx.torch_compat import version_counter

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

T = TypeVar("T")

_LARGEST_ARRAY = 2**16  # bytes, which are read in 30 us, before and after a step

REASON = (
    "It draws random numbers in this batch, and drew none when it was checked. Its slices had begun it: what it counts "
    "outside of the module, they did as well."
)
_OTHERS = (
    "dpx: another thread draws random numbers while steps run, from the generators that they share; from here on it is "
    "not noticed if a step that drew none begins to."
)


class DrawsAppear(GatherError):  # noqa: N818  the step goes on, whole
    """Random numbers were drawn while slices ran, for the first time: the step is to run again on the whole batch."""

    def __init__(self, draws: "FirstDraws") -> None:
        super().__init__(REASON)
        self._draws = draws

    def run_again(self, run: Callable[[], T]) -> T:
        """What the step gives for the whole batch; says so if it draws itself.

        Args:
            run: Runs the step on the batch, anew.
        """
        return self._draws.run_again(run)


class FirstDraws:
    """A step that drew nothing when it was checked, and may draw in the slices that run now.

    Args:
        session: Of the step.
        name: Of the step.
        slices: What runs; several.
        rules: Of the step.
    """

    def __init__(self, session: "Session", name: str, slices: Sequence[BatchSlice], rules: MergeRules) -> None:
        self._session = session
        self._name = name
        self._slices = slices
        self._rules = rules
        self._watch = session.replicas.traits.draws
        self._before = self._watch.now()
        self._after: SeenGenerators | None = None
        self._versions = _versions_of(slices)
        session.replicas.python_state.hold_tensors()

    def follow(self) -> None:
        """Has the whole batch draw where slices have each drawn for themselves; else it is told as unchecked.

        Raises:
            DrawsAppear: the step is to run again, on the whole batch.
        """
        if not self._watch.has_drawn(self._before):
            return
        if not self._is_untouched() or not self._session.can_repeat(self._name):
            self._rules.news.note_first_draws()
            return
        # One device draws from where the batch began.
        self._after = self._watch.now()
        self._before.put_back()
        raise DrawsAppear(self)

    def run_again(self, run: Callable[[], T]) -> T:
        """As :meth:`DrawsAppear.run_again`."""
        # Not announced yet: it may be another thread that has drawn.
        whole_batches = self._session.whole_batches
        whole_batches.keep_next_whole(self._name)
        own = ThreadDraws()
        # In a dispatch mode compiled code would run as it was written, and draw other numbers.
        is_compiled = bool(compiled_names(self._session.module))
        with nullcontext() if is_compiled else own:
            outputs = run()
        # Draws of Python and NumPy, as those of compiled code, show in the states alone.
        by_states = self._watch.has_drawn if is_compiled else self._watch.has_drawn_outside_torch
        if own.seen or by_states(self._before):
            whole_batches.announce_batch(self._name, REASON, "", REASON)
            self._rules.news.is_pending = True
            return outputs
        # Else that thread would draw again what it has drawn.
        if self._after is not None:
            self._after.put_back()
        # It would make every batch run twice.
        self._watch.is_of_others = True
        rank_zero_info(_OTHERS)
        return outputs

    def _is_untouched(self) -> bool:
        """Whether the batch still is what the loader gave, and what slices have left in the module can be put back."""
        if None in self._versions or _versions_of(self._slices) != self._versions:
            return False
        attributes = self._rules.attributes
        lists = [place.attribute.rpartition(".") for place in {*attributes.appended, *attributes.growing}]
        return self._session.replicas.python_state.can_put_back([(path, name) for path, _, name in lists])


def _versions_of(slices: Sequence[BatchSlice]) -> list[int | None]:
    """How often the tensors of the batch have been written, as the first slice tells: it has views of them.

    Arrays of NumPy count no writes. Small ones are read instead; ``None`` stands for a large one that may be written.
    """
    versions: list[int | None] = []
    # All slices run the same code, and views of one tensor count together: to ask each costs time in every step.
    for array in arrays_in(slices[0].batch):
        if isinstance(array, torch.Tensor):
            if not array.is_inference():
                versions.append(version_counter(array))
        elif array.flags.writeable:
            versions.append(zlib.crc32(array.tobytes()) if array.nbytes <= _LARGEST_ARRAY else None)
    return versions
