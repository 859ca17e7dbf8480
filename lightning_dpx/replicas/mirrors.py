"""Containers that hold tensors or submodules: each replica has its own, and what steps change in it comes together.

    root's container --sync, before a step--> replica's mirror --merge, after it--> root's container

A list of tensors cannot be one object for several devices. So a replica gets a mirror of it, in which submodules are
the replica's own and tensors are on its device (copied when first used). After a step, what it appended, set, added or
removed happens to the root's container, too, replica after replica: the order in which one device would have seen the
rows.
"""

import functools
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.object_contents import OF_EVERY_MODULE
from lightning_dpx.python_objects.object_graph import MUTABLE
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas.hidden_modules import HiddenModules
from lightning_dpx.torch_compat import submodules_of

Translate = Callable[[Any], Any]
Attribute = tuple[int, str]  # a submodule's place, and the name of the attribute
# They have a ``__dict__``, but are no containers of the user's.
_WITHOUT_STATE = (type, nn.Module, torch.Tensor, FunctionType, MethodType, ModuleType, functools.partial)


def mirrored_pairs(
    source: Any, copied: Any, is_hidden: Callable[[nn.Module], bool] | None = None
) -> Iterator[tuple[Any, Any]]:
    """All containers, and objects with attributes, that ``copied`` has in the place of those that ``source`` has.

    Args:
        source: The root's value.
        copied: An equal one.
        is_hidden: Which modules are looked into, and are among the pairs; none unless given.
    """
    waiting = [(source, copied)]
    seen: set[int] = set()
    while waiting:
        mine, other = waiting.pop()
        # What is shared needs no mirror; and containers may hold each other in a circle.
        if mine is other or type(mine) is not type(other) or id(mine) in seen:
            continue
        seen.add(id(mine))
        if isinstance(mine, (list, tuple, deque)):
            waiting.extend(zip(mine, other, strict=False))
        elif isinstance(mine, dict):
            waiting.extend((mine[key], other[key]) for key in mine if key in other)
        elif isinstance(mine, nn.Module):
            if is_hidden is None or not is_hidden(mine):
                continue
            waiting.extend(_inside(mine, other))
        elif not isinstance(mine, set):
            if not has_attributes(mine):
                continue
            theirs = vars(other)
            waiting.extend((value, theirs[key]) for key, value in vars(mine).items() if key in theirs)
        # A tuple is looked through, but never changes by itself.
        if not isinstance(mine, tuple):
            yield mine, other


def _inside(mine: nn.Module, other: nn.Module) -> Iterator[tuple[Any, Any]]:
    """The submodules of a hidden module, and what its own attributes hold, beside those of its copy."""
    theirs = {**vars(other), **submodules_of(other)}
    for name, value in {**vars(mine), **submodules_of(mine)}.items():
        # What torch keeps on every module is no container of the user's.
        if name not in OF_EVERY_MODULE and name in theirs:
            yield value, theirs[name]


def has_attributes(value: Any) -> bool:
    """Whether ``value`` is an object of a user's class whose attributes may change."""
    return own_attributes(value) is not None and not isinstance(value, _WITHOUT_STATE)


def make_mirror(source: Any) -> "Mirror":
    """The mirror of a container, by its kind."""
    if isinstance(source, (list, deque)):
        return SequenceMirror(source)
    if isinstance(source, set):
        return SetMirror(source)
    return MappingMirror(source)


class Mirror:
    """A container on the root, and its counterparts on other replicas.

    Attributes:
        source: The root's.
        copies: By the index of a replica.
        exchanged_containers: Whether, since it was made, the source got values that are containers themselves, or
            other values in the place of such; or got or lost modules.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.exchanged_containers = False
        self.copies: dict[int, Any] = {}
        self._seen: Any = self._items(source)
        self._expected: dict[int, Any] = {}

    def add(self, replica: int, copied: Any) -> None:
        """``copied`` is the counterpart on ``replica``, and equal to the source now."""
        self._seen = self._items(self.source)
        self.copies[replica] = copied
        self._expected[replica] = self._items(copied)

    def sync(self, replica: int, translate: Translate) -> None:
        """Makes the counterpart equal to the source, as both were last seen; see :meth:`note`."""
        copied = self.copies[replica]
        expected = self._expected[replica]
        # Two questions: what a hook did to the source since, and what a step did to the copy.
        if not self._is_same(self._items_of_source(), self._seen):
            expected = self._follow(expected, translate)
            self._expected[replica] = expected
        if not self._is_same(self._peek(copied), expected):
            self._fill(copied, expected)

    def note(self) -> None:
        """After all counterparts were synchronized: remembers what the source holds."""
        if not self._is_same(self._items_of_source(), self._seen):
            self._seen = self._items(self.source)

    @property
    def has_changed(self) -> bool:
        """Whether the source holds something else than it did when its counterparts were synchronized."""
        return not self._is_same(self._items_of_source(), self._seen)

    def merge(self, replica: int, translate_back: Translate) -> bool:
        """Does to the source what a step did to the counterpart on ``replica``; says whether there was anything."""
        copied = self.copies[replica]
        if self._is_same(self._peek(copied), self._expected[replica]):
            return False
        self._apply(self._expected[replica], self._peek(copied), translate_back)
        return True

    def _items_of_source(self) -> Any:
        return self._peek(self.source)

    # ---- by kind ----

    def _peek(self, container: Any) -> Any:
        """The container's items, without a copy where that is possible."""
        return container

    def _items(self, container: Any) -> Any:
        raise NotImplementedError

    def _is_same(self, now: Any, then: Any) -> bool:
        raise NotImplementedError

    def _follow(self, expected: Any, translate: Translate) -> Any:
        raise NotImplementedError

    def _fill(self, copied: Any, items: Any) -> None:
        raise NotImplementedError

    def _apply(self, before: Any, after: Any, translate_back: Translate) -> None:
        raise NotImplementedError


class SequenceMirror(Mirror):
    """The mirror of a list or a deque."""

    def _items(self, container: Any) -> list[Any]:
        return list(container)

    def _is_same(self, now: Any, then: Any) -> bool:
        return len(now) == len(then) and all(map(operator.is_, now, then))

    def _follow(self, expected: list[Any], translate: Translate) -> list[Any]:
        # The usual change: something was appended. What was there is not translated again, however long the list is.
        known = len(self._seen)
        if len(self.source) >= known and all(map(operator.is_, self._seen, self.source)):
            added = list(self.source)[known:]
            if any(isinstance(item, nn.Module) for item in added):
                self.exchanged_containers = True
            return [*expected[:known], *map(translate, added)]
        # In another order, or with items gone: what was known keeps its counterpart.
        pairs = {id(mine): theirs for mine, theirs in zip(self._seen, expected, strict=True)}
        # Lists in the place of others have no mirrors yet. What is only appended, as outputs are, needs none, nor does
        # a window on them: the whole attribute would be copied in every step.
        goes_on = _dropped_from_the_front(self._seen, self.source) < known
        is_window = getattr(self.source, "maxlen", None) is not None or goes_on
        if not is_window and any(_is_container(item) for item in self.source if id(item) not in pairs):
            self.exchanged_containers = True
        # Of a module all is followed that hooks do to it, and nothing of one that is gone, which would stay alive.
        if _exchanges_modules(self._seen, self.source):
            self.exchanged_containers = True
        return [pairs[id(item)] if id(item) in pairs else translate(item) for item in self.source]

    def _fill(self, copied: Any, items: list[Any]) -> None:
        copied.clear()
        copied.extend(items)

    def _apply(self, before: list[Any], after: Any, translate_back: Translate) -> None:
        now = list(after)
        dropped = _dropped_from_the_front(before, now)
        added = now[len(before) - dropped :]
        limit = getattr(self.source, "maxlen", None)
        if limit is None:  # a deque with a limit drops by itself
            for _ in range(min(dropped, len(self.source))):
                del self.source[0]
        self.source.extend(map(translate_back, added))


def _dropped_from_the_front(before: list[Any], after: Sequence[Any]) -> int:
    """How many items of ``before`` are gone, so that the rest of it is still in front of ``after``; all, if need be."""
    first = next(iter(after), None)
    for dropped, item in enumerate(before):
        # Only there can the rest begin: it is not copied at every place of a long list.
        if item is first:
            rest = before[dropped:]
            if len(rest) <= len(after) and all(map(operator.is_, rest, after)):
                return dropped
    return len(before)


class MappingMirror(Mirror):
    """The mirror of a dict of any kind, or of an object's attributes."""

    def _peek(self, container: Any) -> dict[Any, Any]:
        if isinstance(container, dict):
            return container
        attributes: dict[Any, Any] = vars(container)
        return attributes

    def _items(self, container: Any) -> dict[Any, Any]:
        return dict(self._peek(container))

    def _is_same(self, now: dict[Any, Any], then: dict[Any, Any]) -> bool:
        return (
            len(now) == len(then)
            and all(map(operator.is_, now, then))
            and all(map(operator.is_, now.values(), then.values()))
        )

    def _follow(self, expected: dict[Any, Any], translate: Translate) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, value in self._items_of_source().items():
            if key in expected and key in self._seen and self._seen[key] is value:
                result[key] = expected[key]
                continue
            result[key] = translate(value)
            # Where a container is gone there may be no tensors left: all replicas hold the same object again, and what
            # a step makes in its place is one for all.
            if _is_container(value) or _is_container(self._seen.get(key)):
                self.exchanged_containers = True
        if _exchanges_modules(self._seen.values(), self._items_of_source().values()):
            self.exchanged_containers = True
        return result

    def _fill(self, copied: Any, items: dict[Any, Any]) -> None:
        held = self._peek(copied)
        gone = [key for key in held if key not in items]
        for key in gone:
            del held[key]
        for key, value in items.items():
            held[key] = value

    def _apply(self, before: dict[Any, Any], after: dict[Any, Any], translate_back: Translate) -> None:
        if not isinstance(self.source, dict):  # attributes that a step rebinds: the first replica's
            return
        for key, value in after.items():
            if key not in before or before[key] is not value:
                self._set(key, value, is_new=key not in before, translate_back=translate_back)
        for key in before:
            if key not in after:
                self.source.pop(key, None)

    def _set(self, key: Any, value: Any, *, is_new: bool, translate_back: Translate) -> None:
        theirs = translate_back(value)
        mine = self.source.get(key)
        if is_new and _is_made_by_several(mine, theirs):
            _add_all(mine, theirs)
        elif not (is_new and key in self.source and isinstance(theirs, torch.Tensor)):
            self.source[key] = theirs  # of a cache that all replicas fill, the first one's entry stays


def _exchanges_modules(before: Collection[Any], after: Collection[Any]) -> bool:
    """Whether there is a module among the one and not among the other."""
    modules = [{id(item) for item in items if isinstance(item, nn.Module)} for items in (before, after)]
    return modules[0] != modules[1]


def _is_container(value: Any) -> bool:
    return isinstance(value, MUTABLE) or has_attributes(value)


def _is_made_by_several(mine: Any, theirs: Any) -> bool:
    """Whether several replicas have made a container in this step, each its own."""
    return any(isinstance(mine, kind) and isinstance(theirs, kind) for kind in (list, dict))


def _add_all(mine: Any, theirs: Any) -> None:
    """To what one replica has made, all that another one has in its place; of single values the first one's stays."""
    if isinstance(mine, list):
        mine.extend(theirs)
        return
    for key, value in theirs.items():
        if key not in mine:
            mine[key] = value
        elif _is_made_by_several(mine[key], value):
            _add_all(mine[key], value)


class SetMirror(Mirror):
    """The mirror of a set."""

    def _items(self, container: set[Any]) -> set[Any]:
        return set(container)

    def _is_same(self, now: set[Any], then: set[Any]) -> bool:
        # By equality, as a set itself tells its items apart.
        return now == then

    def _follow(self, expected: set[Any], translate: Translate) -> set[Any]:
        return set(map(translate, self.source))

    def _fill(self, copied: set[Any], items: set[Any]) -> None:
        copied.clear()
        copied.update(items)

    def _apply(self, before: set[Any], after: set[Any], translate_back: Translate) -> None:
        self.source.update(map(translate_back, after - before))
        self.source.difference_update(map(translate_back, before - after))


class Mirrors:
    """All mirrored containers of a module, each with the attribute that leads to it: a submodule's place and a name.

    Args:
        hidden: Looks after modules in them; those of none unless given.
    """

    def __init__(self, hidden: HiddenModules | None = None) -> None:
        self._hidden = HiddenModules() if hidden is None else hidden
        self._mirrors: dict[int, Mirror] = {}  # by the id of the root's container, which its mirror holds
        self._attribute_of: dict[int, Attribute] = {}
        self._of_attribute: dict[Attribute, set[int]] = {}

    def __len__(self) -> int:
        return len(self._mirrors) + len(self._hidden)

    def pair(self, attribute: Attribute, replica: int, source: Any, copied: Any) -> bool:
        """The containers in ``copied`` mirror those in ``source`` from here on; says whether there are any.

        Args:
            attribute: Which holds them.
            replica: The index of the replica that ``copied`` belongs to.
            source: The root's value.
            copied: An equal one.
        """
        found = False
        for mine, theirs in mirrored_pairs(source, copied, self._hidden.is_hidden):
            found = True
            if isinstance(mine, nn.Module):
                self._hidden.add(attribute, replica, mine, theirs)
                continue
            place = id(mine)
            # Two attributes may hold one container; its mirror is that of the last to pair it.
            self._attribute_of[place] = attribute
            self._of_attribute.setdefault(attribute, set()).add(place)
            if place not in self._mirrors:
                self._mirrors[place] = make_mirror(mine)
            self._mirrors[place].add(replica, theirs)
        return found

    def forget(self, attribute: Attribute) -> bool:
        """The attribute holds something else now; says whether it had mirrors."""
        found = self._hidden.forget(attribute)
        for place in self._of_attribute.pop(attribute, ()):
            if self._attribute_of.get(place) == attribute:
                found = True
                del self._attribute_of[place]
                del self._mirrors[place]
        return found

    def pairs(self, replica: int) -> Iterator[tuple[Any, Any]]:
        """The root's containers and those of one replica."""
        for mirror in self._mirrors.values():
            if replica in mirror.copies:
                yield mirror.source, mirror.copies[replica]
        yield from self._hidden.pairs(replica)

    def sync(self, replica: int, translate: Translate) -> None:
        """Before a step: what was done to the root's containers is done to those of a replica."""
        for mirror in list(self._mirrors.values()):
            if replica in mirror.copies:
                mirror.sync(replica, translate)
        self._hidden.sync(replica, translate)

    def note(self) -> list[Attribute]:
        """After all replicas had :meth:`sync`: attributes whose containers got or lost others since they were paired.

        Those are to be copied and paired anew.
        """
        restructured: dict[Attribute, None] = dict.fromkeys(self._hidden.note())
        for place, mirror in self._mirrors.items():
            mirror.note()
            if mirror.exchanged_containers:
                restructured[self._attribute_of[place]] = None
        return list(restructured)

    def changed(self) -> Iterator[Attribute]:
        """The attributes of containers that the root's own step has changed, since :meth:`note`."""
        for place, mirror in self._mirrors.items():
            if mirror.has_changed:
                yield self._attribute_of[place]

    def merge(self, replica: int, translate_back: Translate) -> Iterator[Attribute]:
        """After a step: does to the root's containers what was done to a replica's; yields the attributes of those."""
        for place, mirror in list(self._mirrors.items()):
            if replica in mirror.copies and mirror.merge(replica, translate_back):
                yield self._attribute_of[place]
