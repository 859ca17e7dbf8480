"""What the steps of a stage do that its rehearsals have not seen: other values, other attributes, random draws."""

import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from lightning_dpx.replicas.merging.number_types import is_nonzero, is_numeric
from lightning_dpx.replicas.merging.rules import Rule

_TOO_OFTEN = 6  # batches
_OF_NO_NUMBERS = ("by type", "children", "items", "union", "equal")


class News:
    """What is new since the last rehearsal of a stage, as its real steps show it.

    Attributes:
        seen: Paths of all values that rehearsals have seen; ``None`` where there was none.
        seen_attributes: Those that rehearsals have seen change.
        undecided: Paths of values that were zero so far, which says nothing about how they are merged.
        unchecked: Paths of news that no later rehearsal has seen: what a step does now and then, such as a second loss
            in every fifth batch.
        is_pending: Whether a rehearsal would see more than the last one.
        batch: The number of the batch that is under way.
        num_lost: How many batches have run again, as slices gave nan.
        are_lost: Whether the last of them gave nan whole as well.
        lost_names: Of logged values that a rehearsal has seen to be nan on one device.
        last_batch: That of the last one in which a step did what no rehearsal has seen.
    """

    def __init__(self, undecided: frozenset[str] = frozenset()) -> None:
        self.seen: frozenset[str] | None = None
        self.seen_attributes: frozenset[str] = frozenset()
        self.undecided: frozenset[str] = undecided
        self.unchecked: frozenset[str] = frozenset()
        self.is_pending: bool = False
        self.batch: int = 0
        self.last_batch: int = 0
        self.num_lost: int = 0
        self.are_lost: bool = False
        self.lost_names: frozenset[str] = frozenset()
        self._paths: set[str] = set()
        self._times = Counter[str]()  # batches in which an attribute has changed unseen

    def watch(self, parts: Sequence[Any], path: str, rule: Rule | None) -> None:
        """Looks at a value that no rule was found for, or whose rule does not fit it.

        Args:
            parts: The values of the slices.
            path: Where they are.
            rule: The rule that does not fit.
        """
        was_number = rule is not None and rule.kind not in _OF_NO_NUMBERS
        # A rule of numbers says nothing of what has come in their place, so that is new as well.
        is_new = self.seen is not None and (path not in self.seen or (was_number and not is_numeric(parts[0])))
        # What is nothing on all slices is nothing on one device, too.
        if is_new and len(parts) > 1 and any(part is not None for part in parts):
            self.note(path)
        if len(parts) > 1 and (is_new or path in self.unchecked):
            self.last_batch = self.batch
        # Zeros fit every rule. The first other number is what a rehearsal can decide by.
        if path in self.undecided and any(map(is_nonzero, parts)):
            self.is_pending = True

    def note(self, path: str) -> None:
        """There is something new."""
        self._paths.add(path)
        self.is_pending = True

    def note_first_draws(self) -> None:
        """Slices have drawn random numbers each for itself, and no rehearsal has seen draws."""
        self.note("random draws")

    def note_changed(self, unseen: Collection[str], batch: int) -> None:
        """A step has changed attributes, on other replicas than the first one, that no rehearsal had seen change.

        Args:
            unseen: Their paths.
            batch: The number of its batch.
        """
        for path in unseen:
            self.note(f"self.{path}")
        self.last_batch = batch
        self._times.update(unseen)
        often = sorted(path for path in unseen if self._times[path] == _TOO_OFTEN)
        if often:
            warnings.warn(
                f"dpx: self.{', self.'.join(often)} changed in {_TOO_OFTEN} batches and in no check: of those it may "
                "hold what one slice made, or what each did. Change it in on_train_batch_end and its like, which see "
                "the whole batch.",
                stacklevel=2,
            )

    def note_changed_by_whole(self, unseen: Collection[str], batch: int) -> None:
        """The same of a step that runs again on the whole batch, so that nothing is put together unchecked.

        Args:
            unseen: Their paths.
            batch: The number of its batch.
        """
        self.unchecked = self.unchecked.union(f"self.{path}" for path in unseen)
        self.is_pending = True
        self.last_batch = batch
        self._times.update(unseen)

    def often_unseen(self, paths: Collection[str]) -> frozenset[str]:
        """Those of ``paths`` that have changed unseen so often that they were told, or are from now on."""
        return frozenset(path for path in paths if self._times[path] >= _TOO_OFTEN - 1)

    def take(self) -> frozenset[str]:
        """The paths of what is new, which is so once: whatever the next rehearsal sees of it."""
        taken = frozenset(self._paths)
        self._paths.clear()
        if taken:
            self.seen = (self.seen or frozenset()) | taken
        return taken

    def learn(
        self,
        values: Collection[str],
        attributes: Collection[str],
        *,
        undecided: frozenset[str],
        news: frozenset[str],
        checked: Collection[str],
    ) -> None:
        """A rehearsal has seen the step.

        Args:
            values: Paths of all values that it and earlier ones have seen.
            attributes: Paths of attributes that it has seen change.
            undecided: Paths of values that were zero in all of them.
            news: What was new before it.
            checked: Paths of the values that it has seen itself.
        """
        self.seen = (self.seen or frozenset()).union(values)
        # Another set, not a larger one: who compares with the last batch's has that.
        self.seen_attributes = self.seen_attributes.union(attributes)
        self.undecided = undecided
        changed = {f"self.{path}" for path in self.seen_attributes}
        self.unchecked = news.difference(changed, checked)
