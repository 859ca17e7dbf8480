"""Containers that hold no tensor, and so are the same object for all replicas.

A container with a tensor has a mirror on every replica (see ``mirrors``). One without is watched: for its first tensor,
for items of every slice, and to be put back where a step runs again.
"""

import operator
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_dpx.devices import device_beside
from lightning_dpx.python_objects.object_contents import refill
from lightning_dpx.python_objects.object_graph import (
    ATOMS,
    MUTABLE,
    ObjectGraph,
    is_tensor_or_module,
    items_of,
    pairs_of,
    size_of,
)
from lightning_dpx.python_objects.own_attributes import own_attributes

Attribute = tuple[int, str]  # the number of a submodule, and a name

_SMALL = 64  # items up to which a shared container is watched item by item; beyond, by its length
_MOST_WATCHED = 4096  # containers of one attribute that are watched


class SharedContainers:
    """Watches the containers behind attributes that hold no tensor yet.

    Args:
        is_boundary: Tells what is shared whatever it holds, and is not looked into.
        home: The first replica's device, if others are on other devices.
        was_asked: Tells whether the step that is under way, or was the last, has taken an item of an iterator.

    Attributes:
        home: As given.
    """

    def __init__(
        self,
        is_boundary: Callable[[Any], bool],
        home: torch.device | None = None,
        was_asked: Callable[[Any], bool] = lambda iterator: False,
    ) -> None:
        self._is_boundary = is_boundary
        self._was_asked = was_asked
        self.home: torch.device | None = home
        self._watched: dict[Attribute, list[tuple[Any, Any]]] = {}
        self._contents: dict[Attribute, list[Any]] = {}  # copies of what these hold, where that is little
        self._of_iterators: dict[Attribute, _OfIterators] = {}

    def watch(self, attribute: Attribute, value: Any) -> None:
        """Notes the containers behind ``value``, as they are now."""
        self.forget(attribute)
        # These are no containers; each replica has its own, or all have the same.
        if type(value) in ATOMS or isinstance(value, (torch.Tensor, nn.Module)):
            return
        graph = self._graph_of(value)
        # What leads to tensors is mirrored already. All else is one object for all replicas, and is
        # watched for its first tensor.
        leading = graph.leading()
        shared = [held for key, held in graph.objects.items() if isinstance(held, MUTABLE) and key not in leading]
        if shared:
            watched = shared[:_MOST_WATCHED]
            self._watched[attribute] = [(held, _mark(held)) for held in watched]
            self._contents[attribute] = list(map(_content_of, watched))
            of_iterators = self._of_iterators_alone(graph, value)
            if of_iterators.ids:
                self._of_iterators[attribute] = of_iterators

    def forget(self, attribute: Attribute) -> None:
        """The attribute is gone, or holds something else."""
        self._watched.pop(attribute, None)
        self._contents.pop(attribute, None)
        self._of_iterators.pop(attribute, None)

    def changed(self) -> list[Attribute]:
        """The attributes behind which a container has changed since it was noted."""
        found = []
        for attribute, entries in self._watched.items():
            if any(_mark(container) != mark for container, mark in entries):
                found.append(attribute)
        return found

    def has_changed(self) -> bool:
        """Whether any container has."""
        return any(_mark(container) != mark for container, mark in chain.from_iterable(self._watched.values()))

    def lead_to_tensors(self, attribute: Attribute, value: Any) -> bool:
        """Whether one of the containers that were noted for ``attribute`` leads to a tensor by now."""
        leading = self._graph_of(value).leading()
        return any(id(container) in leading for container, _ in self._watched[attribute])

    def grown(self) -> Iterator[Attribute]:
        """The attributes behind which a container has another number of items."""
        for attribute, entries in self._watched.items():
            # A call less in each step, of most modules.
            if attribute in self._of_iterators:
                left = self._left_to_iterators(attribute)
                entries = [entry for entry in entries if id(entry[0]) not in left]
            if any(map(_has_grown, entries)):
                yield attribute

    def can_put_back(self) -> bool:
        """Whether :meth:`put_back` would give all of them what they held: of large ones only lists that have grown."""
        for container, mark, content in self._to_put_back():
            if content is None and not isinstance(container, list) and _mark(container) != mark:
                return False
        return True

    def put_back(self) -> None:
        """All hold again what they held; of large ones only the length is known."""
        for container, mark, content in self._to_put_back():
            if _mark(container) != mark:
                _fill(container, mark, content)

    def _to_put_back(self) -> Iterator[tuple[Any, Any, Any]]:
        """Containers with what they held; but for those of iterators, which give their items once more instead.

        itertools.cycle has a list of what it has given, which means nothing without its place, and which no one can
        set: with that list put back it came to an end.
        """
        for attribute, entries in self._watched.items():
            left = self._left_to_iterators(attribute)
            for (container, mark), content in zip(entries, self._contents[attribute], strict=True):
                if id(container) not in left:
                    yield container, mark, content

    def _left_to_iterators(self, attribute: Attribute) -> Collection[int]:
        """The ids of containers of iterators, which have changed with what those have given."""
        of_iterators = self._of_iterators.get(attribute)
        if of_iterators is None:
            return ()
        for iterator in of_iterators.outermost:
            # Steps write to what an iterator of the user's own class holds, too, as to a list of notes beside its
            # items: that is the iterator's doing only where it was asked for one.
            if own_attributes(iterator) is None or self._was_asked(iterator):
                return of_iterators.ids
        return ()

    def _of_iterators_alone(self, graph: ObjectGraph, value: Any) -> "_OfIterators":
        """What is behind ``value``, and behind iterators only."""
        outermost: list[Any] = []
        if not any(isinstance(held, Iterator) for held in graph.objects.values()):
            return _OfIterators(outermost, set())

        def is_end(held: Any) -> bool:
            if isinstance(held, Iterator):
                outermost.append(held)
                return True
            return self._is_boundary(held)

        beside = ObjectGraph(is_tensor_or_module, is_end)
        beside.walk([value])
        return _OfIterators(outermost, graph.objects.keys() - beside.objects.keys())

    def bring_home(self) -> None:
        """Tensors that replicas on other devices have put into them are moved to the first one's."""
        home = self.home
        if home is None:
            return
        seen: set[int] = set()
        for entries in self._watched.values():
            for container, mark in entries:
                # Where nothing was changed, nothing of another device can have come.
                if _mark(container) != mark:
                    _on_device(container, home, seen)

    def _graph_of(self, value: Any) -> ObjectGraph:
        graph = ObjectGraph(is_tensor_or_module, self._is_boundary)
        graph.walk([value])
        return graph


class _OfIterators(NamedTuple):
    """Containers that nothing but iterators leads to.

    Attributes:
        outermost: Those iterators, but for what is in others.
        ids: Of the containers.
    """

    outermost: list[Any]
    ids: set[int]


def _mark(container: Any) -> Any:
    """Differs if a container was changed; beyond a few items, if their number was."""
    # Asked in every step: a list of thousands of losses must not be walked for it.
    size = size_of(container)
    if size > _SMALL:
        return size
    return list(map(id, items_of(container)))


def _content_of(container: Any) -> list[Any] | None:
    """What a small container holds, for :func:`_fill`."""
    if size_of(container) > _SMALL:
        return None
    if isinstance(container, dict):
        return pairs_of(container)
    return items_of(container)


def _fill(container: Any, mark: Any, content: list[Any] | None) -> None:
    """Gives a container what it held, or at least takes out of a list what was appended."""
    if content is None:
        if isinstance(container, list):
            del container[mark:]
        return
    refill(container, content)


def _has_grown(entry: tuple[Any, Any]) -> bool:
    """Whether a container has another number of items than its mark says."""
    container, mark = entry
    return size_of(container) != (mark if isinstance(mark, int) else len(mark))


def _on_device(value: Any, home: torch.device, seen: set[int]) -> Any:
    """``value`` with all tensors on ``home``, or on the host where a step has put them; containers stay themselves.

    Args:
        value: A tensor, or anything that may hold some.
        home: A device.
        seen: The ids of the containers that have been gone through.
    """
    if isinstance(value, torch.Tensor):
        if value.device == device_beside(value, home, home):
            return value
        return value.to(home)
    if type(value) is tuple:
        moved = [_on_device(item, home, seen) for item in value]
        if all(map(operator.is_, moved, value)):
            return value
        return tuple(moved)
    if not isinstance(value, MUTABLE) or id(value) in seen:
        return value
    seen.add(id(value))
    held: Any = value
    if isinstance(held, set):
        strange = [(item, moved) for item in held if (moved := _on_device(item, home, seen)) is not item]
        held.difference_update(item for item, _ in strange)
        held.update(moved for _, moved in strange)
        return value
    for key, item in pairs_of(held) if isinstance(held, dict) else enumerate(list(held)):
        moved = _on_device(item, home, seen)
        # Only then, as a class of its own may do something when an item is set.
        if moved is not item:
            held[key] = moved
    return value
