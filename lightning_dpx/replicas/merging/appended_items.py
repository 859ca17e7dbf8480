"""Lists that steps append to: what the slices of a batch append comes together as one device would have appended it.

    self.losses = [..., 0.7]      one device appends       1 item:  0.6
                                  two slices append        2 items: 0.5, 0.9
                                  their mean by rows is    1 item:  0.6

Since Lightning 2.0 steps keep what an epoch's end needs in lists of their own. An epoch's end that stacks the items, or
takes their mean, gives other numbers where there is one item for every slice. Which lists a step appends to, and how
the items of slices become one, is found by a rehearsal.
"""

import operator
from collections import ChainMap, UserDict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.object_graph import pairs_of
from lightning_dpx.python_objects.origin import is_library
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas.mirrors import has_attributes
from lightning_dpx.torch_compat import tree_map_only

# Bounds of the search, which is part of a rehearsal: what steps append to lies near the module.
_DEEPEST = 4
_MOST = 2_000  # containers and objects that are looked into
_LONGEST = 64  # items of a list that are looked into, from its front: lists by loader, or by stage
_LARGEST = 1_024  # keys of a mapping; a vocabulary has more
_MOST_NOTED = 1_024  # items of a list that are noted one by one: a window, or a pool, but no epoch's outputs
_MOST_SIBLINGS = 8  # lists beside a known one, such as one for each epoch: the newest of them

# Those that Python itself has. Any other answers by code of its own, as a configuration that fills in its references
# and refuses the values that are missing; what it keeps lies in its attributes.
_MAPPINGS = (dict, MappingProxyType)


@dataclass(frozen=True, slots=True)
class ListPlace:
    """The place of a list: the attribute that leads to it, and the keys from there on.

    Attributes:
        attribute: The attribute that leads to it, with the path of its submodule.
        keys: From there on: keys of mappings, indices of lists, names of attributes of objects.
    """

    attribute: str
    keys: tuple[Hashable, ...] = ()

    def __str__(self) -> str:
        return ".".join(["self", self.attribute, *map(str, self.keys)])

    def siblings(self, module: nn.Module) -> "list[ListPlace]":
        """Lists beside this one under other numbers: those of other epochs, say, or of other loaders."""
        if not self.keys or type(self.keys[-1]) is not int:
            return []
        outer = ListPlace(self.attribute, self.keys[:-1]).find(module)
        keys: list[Any] = []
        if isinstance(outer, _MAPPINGS):
            keys = [key for key in outer if type(key) is int]
        elif isinstance(outer, list | tuple | deque):
            keys = list(range(len(outer)))
        found: list[ListPlace] = []
        for key in keys[-_MOST_SIBLINGS:]:
            place = ListPlace(self.attribute, (*self.keys[:-1], key))
            if key != self.keys[-1] and isinstance(place.find(module), list | deque):
                found.append(place)
        return found

    def find(self, module: nn.Module) -> Any:
        """What ``module`` has at this place now; ``None`` if nothing is there."""
        path, _, name = self.attribute.rpartition(".")
        child = module.get_submodule(path)
        held = vars(child)
        value = held[name] if name in held else _on_class(type(child)).get(name)
        for key in self.keys:
            value = _item(value, key)
        return value


def held_by_classes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Containers that submodules have of their classes, by path: ``losses = []`` in a class body."""
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in _on_class(type(child)).items():
            # What the object has itself hides what its class has.
            if name not in vars(child):
                yield prefix + name, value


def find_lists(attributes: Iterable[tuple[str, Any]]) -> dict[ListPlace, Any]:
    """All lists, and deques, that attributes hold or lead to.

    Args:
        attributes: Values by path.
    """
    found: dict[ListPlace, Any] = {}
    seen: set[int] = set()
    waiting = deque((ListPlace(path), value) for path, value in attributes)
    # Breadth first, so that a bound cuts off what lies deepest.
    while waiting and len(seen) < _MOST:
        place, value = waiting.popleft()
        # Objects may be in reference cycles.
        if id(value) in seen or not _is_looked_into(value):
            continue
        seen.add(id(value))
        if isinstance(value, list | deque):
            found[place] = value
        if len(place.keys) < _DEEPEST:
            waiting.extend((ListPlace(place.attribute, (*place.keys, key)), item) for key, item in _items(value))
    return found


class ListWatch:
    """Sees what is appended to lists from now on.

    Args:
        modules: Those of the replicas, the user's first: its attributes lead to the lists, and to what others append
            as well; but of a list that is not there yet every replica makes its own.
        places: Where they are, or may be once the step has run.
    """

    def __init__(self, modules: Sequence[nn.Module], places: Iterable[ListPlace]) -> None:
        self._module = modules[0]
        self._others = modules[1:]
        self._before = {place: _Noted.of(place.find(self._module)) for place in places}
        for place in list(self._before):
            for sibling in place.siblings(self._module):
                self._before.setdefault(sibling, _Noted.of(sibling.find(self._module)))

    def siblings(self, place: ListPlace) -> list[ListPlace]:
        """The lists beside the one at ``place`` that are there now."""
        return place.siblings(self._module)

    def has_lost_items(self, place: ListPlace) -> bool:
        """Whether items have been taken out of a list, or another list was put in its place without them.

        A deque with a limit drops its items in the order in which they came, whichever replica appends.
        """
        before = self._before.get(place, _NOTHING)
        now = place.find(self._module)
        if isinstance(now, deque) and now.maxlen is not None:
            return False
        if before.length == 0 or not isinstance(now, list | deque):
            return before.length > 0
        if before.items is not None:
            return len(now) < before.length or not all(map(operator.is_, before.items, now))
        return len(now) < before.length or now[0] is not before.first

    def appended(self, place: ListPlace, expected: int = 0) -> list[Any]:
        """What has been; nothing where the list was exchanged, or items were taken from it.

        Args:
            place: Where the list is.
            expected: So many items of all replicas; where the user's list has them, those of others are among them.
        """
        now = place.find(self._module)
        before = self._before.get(place, _NOTHING)
        if not isinstance(now, list | deque):
            return []
        # Another list in its place is none that grew: nothing is known of what it should hold.
        if before.container is not None:
            if before.container is now:
                return before.added(now)
            return []
        # It has the items of all: the others' lists are mirrors of it, which hold their own as
        # well.
        if len(now) == expected:
            return list(now)
        # By identity: where several replicas have one list, its items count once.
        made = {id(now): list(now)}
        for module in self._others:
            theirs = place.find(module)
            if isinstance(theirs, list | deque):
                made.setdefault(id(theirs), list(theirs))
        return list(chain.from_iterable(made.values()))

    def grown(self, places: Iterable[ListPlace]) -> dict[ListPlace, list[Any]]:
        """What has been appended to those of the lists that have got something, but for lists inside of new items."""
        found: dict[ListPlace, list[Any]] = {}
        for place in places:
            items = self.appended(place)
            if items and not self._is_in_new_item(place):
                found[place] = items
        return found

    def _is_in_new_item(self, place: ListPlace) -> bool:
        for depth, key in enumerate(place.keys):
            # A list inside of a new item comes together with the item that holds it.
            outer = ListPlace(place.attribute, place.keys[:depth])
            length = self._before.get(outer, _NOTHING).length
            if isinstance(key, int) and isinstance(outer.find(self._module), list | deque) and key >= length:
                return True
        return False

    def put_back(self) -> None:
        """Takes out what has been appended."""
        for place, before in self._before.items():
            now = place.find(self._module)
            if isinstance(now, list | deque) and (before.container is None or before.container is now):
                self.replace(place, [])

    def replace(self, place: ListPlace, items: list[Any]) -> None:
        """Puts other items in the place of what was appended."""
        now = place.find(self._module)
        before = self._before.get(place, _NOTHING)
        added = before.added(now)
        if before.items is None:
            for _ in added:
                now.pop()
            now.extend(items)
            return
        # A list with a limit has dropped items for what came, which one device would have kept: the limit is a deque's
        # own, or the length at which the step has taken items out.
        together = [*before.items, *items]
        has_limit = before.length + len(added) > len(now)
        length = len(now)
        now.clear()
        now.extend(together[-length:] if has_limit else together)


@dataclass(frozen=True, slots=True)
class _Noted:
    """A list as it was before the step.

    Attributes:
        container: The list itself, or what was in its place; ``None`` if nothing was.
        length: Of it.
        items: All of them, where there are not too many: items may be dropped at the other end.
        first: The first one.
    """

    container: Any
    length: int
    items: list[Any] | None = None
    first: Any = None

    @classmethod
    def of(cls, container: Any) -> "_Noted":
        if not isinstance(container, list | deque):
            if container is None:
                return _NOTHING
            return cls(container, 0)
        # An epoch's list of outputs may be long, and is appended to only.
        is_limited = isinstance(container, deque) and container.maxlen is not None
        items = list(container) if is_limited or len(container) <= _MOST_NOTED else None
        return cls(container, len(container), items, container[0] if container else None)

    def added(self, now: Any) -> list[Any]:
        if self.items is None:
            return [now[index] for index in range(self.length, len(now))]
        # The last items of before are the first ones of now. As many as possible: the same item
        # may have been appended again.
        for kept in range(len(self.items), -1, -1):
            rest = self.items[len(self.items) - kept :]
            if kept <= len(now) and all(map(operator.is_, rest, now)):
                if self._has_set_fewer(now, len(now) - kept):
                    return []
                return list(now)[kept:]
        return []

    def _has_set_fewer(self, now: Any, num_added: int) -> bool:
        """Whether the list is as before but for fewer items than it would have got: those were set, as counters are."""
        if self.items is None or len(now) != len(self.items):
            return False
        return sum(map(operator.is_not, self.items, now)) < num_added


_NOTHING = _Noted(None, 0)


def without_graphs(items: list[Any]) -> list[Any]:
    """The same items, whose tensors keep no graph alive."""
    detached: list[Any] = tree_map_only(torch.Tensor, torch.Tensor.detach, items)
    return detached


def _on_class(kind: type) -> dict[str, Any]:
    """The containers that the user's classes define, as an object of ``kind`` would find them."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        # Those of torch and Lightning are tables of their own, which no step appends to.
        if is_library(base):
            continue
        for name, value in vars(base).items():
            if name.startswith("__"):
                continue
            # Also what is no container hides that of a class below.
            found.pop(name, None)
            if isinstance(value, list | tuple | deque | dict):
                found[name] = value
    return found


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, (list, tuple, deque, UserDict, ChainMap, *_MAPPINGS)):
        return True
    kind = type(value)
    return has_attributes(value) and not is_library(kind)


def _items(value: Any) -> Iterator[tuple[Hashable, Any]]:
    if isinstance(value, dict):
        return islice(pairs_of(value), _LARGEST)
    if isinstance(value, _MAPPINGS):
        return iter(list(islice(value.items(), _LARGEST)))
    if isinstance(value, list | tuple | deque):
        return enumerate(list(islice(value, _LONGEST)))
    return iter(list(vars(value).items()))


def _item(value: Any, key: Hashable) -> Any:
    if isinstance(value, _MAPPINGS):
        return value.get(key)
    if isinstance(value, list | tuple | deque):
        if isinstance(key, int) and key < len(value):
            return value[key]
        return None
    held: Mapping[Any, Any] = own_attributes(value) or {}
    return held.get(key)
