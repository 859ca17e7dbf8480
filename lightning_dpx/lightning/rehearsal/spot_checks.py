"""When a step that was checked is looked at again: in batches 2, 4, 8, ... of its stage, on other rows than before.

And where an epoch begins: many steps do something else from some epoch on.

The first rows may be alike by chance: a mean over the tokens is one over the rows until the first batch with padding.
What comes later (a second term of the loss, another kind of batch) is found in a batch not much later, and ever more
batches lie between two looks, so they cost nothing in the long run.
"""

from collections.abc import Sequence

from lightning_dpx.lightning.rehearsal.outcome import Key
from lightning_dpx.powers import is_power_of_two

_PARTS = (0.5, 0.0, 1.0, 0.25, 0.75)  # of the rows that are not taken, how many lie in front of those that are
_EPOCHS = 8  # the first ones, each of which begins with a look
_BETWEEN = 64  # batches, of which a look at the first of an epoch is a small part
# What else a step does, the first rehearsal judges: it runs a second step, which a look at some rows does not.
_TOLD = ("loss", "gradient", "new weight", "logged value", "output", "kept value")


class SpotChecks:
    """Those of a run: which batches are due, and what is news of what they show."""

    def __init__(self) -> None:
        self._batches: dict[Key, int] = {}
        self._looked: dict[Key, int] = {}  # the batch of the last look
        self._epochs: dict[Key, int] = {}
        self._warned: dict[Key, set[str]] = {}
        self._subjects: dict[Key, frozenset[str]] = {}

    def forget(self) -> None:
        """The run is over."""
        self._batches.clear()
        self._looked.clear()
        self._epochs.clear()
        self._warned.clear()
        self._subjects.clear()

    def is_due(self, key: Key, epoch: int = 0) -> bool:
        """Counts a batch after the first, and says whether its step is looked at again.

        Args:
            key: Of the step.
            epoch: The one that it is in.
        """
        # The first batch was rehearsed, which counts it.
        number = self._batches.get(key, 1) + 1
        self._batches[key] = number
        begins = epoch != self._epochs.get(key, 0)
        self._epochs[key] = epoch
        # A look takes as long as a small step or two, so short epochs have theirs ever more seldom.
        is_rare = is_power_of_two(epoch) or number - self._looked.get(key, 1) >= _BETWEEN
        is_due = is_power_of_two(number) or (begins and (is_rare or epoch < _EPOCHS))
        if is_due:
            self._looked[key] = number
        return is_due

    def part(self, key: Key) -> float:
        """Which rows are taken: of the others, the part in front of them, in [0, 1]."""
        return _PARTS[self._batches[key].bit_length() % len(_PARTS)]

    def is_told(self, key: Key, subjects: frozenset[str]) -> bool:
        """Whether all of that was told of this step before; it counts as told from now on."""
        told = self._subjects.get(key, frozenset())
        self._subjects[key] = told | subjects
        return subjects <= told

    def news(self, key: Key, differences: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of a kind that was not told of this step before; they count as told from now on."""
        told = self._warned.setdefault(key, set())
        new = [(kind, text) for kind, text in differences if kind in _TOLD and kind not in told]
        told.update(kind for kind, _ in differences)
        if "loss" in told:
            told.add("gradient")  # which follow from it
        return new
