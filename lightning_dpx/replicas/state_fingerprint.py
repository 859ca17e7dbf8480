"""What the Python state of a module holds, to see whether a step wrote it."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.python_objects.object_contents import own_values, slot_contents
from lightning_dpx.python_objects.object_graph import MUTABLE, ObjectGraph, is_tensor_or_module, pairs_of
from lightning_dpx.python_objects.origin import package_of
from lightning_dpx.replicas.copying.shared_objects import is_shared, modules_without
from lightning_dpx.replicas.hidden_arrays import arrays_of_hidden
from lightning_dpx.replicas.mirrors import has_attributes

_OWN_PACKAGE = package_of(__name__)


class StateFingerprint:
    """What all containers, objects and arrays behind the attributes of a module hold, to see whether a step wrote it.

    Looks at everything once; meant for the first step of a stage.
    """

    def __init__(self, module: nn.Module, keep: Sequence[object] = ()) -> None:
        self._module = module
        self._kept = {id(kept): kept for kept in keep}
        self._before = dict(self._marks())

    def _marks(self) -> Iterator[tuple[int, Any]]:
        graph = ObjectGraph(is_tensor_or_module, self._is_boundary)
        for child in modules_without(self._module, self._kept):
            graph.walk(value for _, value in own_values(child))
        # Attributes count as contents of their object. Python makes some of these dicts when first asked for them, so
        # by themselves they would be new.
        attributes = {id(vars(value)) for value in graph.objects.values() if has_attributes(value)}
        for key, value in graph.objects.items():
            if key in attributes:
                continue
            if (mark := _mark(value)) is not None:
                yield key, (value, mark)
        # All else that such modules hold each replica has for itself.
        for _, array in arrays_of_hidden(self._module, self._is_boundary):
            if id(array) not in graph.objects:
                yield id(array), (array, _mark(array))

    def _is_boundary(self, value: Any) -> bool:
        return is_boundary(value, self._kept)

    def compare(self) -> tuple[bool, bool]:
        """Whether something that was there has other contents now, and whether there is something new."""
        now = dict(self._marks())
        # What is not there any more may have been written before it was let go of: a dict that each step fills, and
        # replaces for the next one, is shared as long as it lives.
        changed = False
        for key, (value, before) in self._before.items():
            after = now[key][1] if key in now else _mark(value)
            changed = changed or after is None or after.identities != before.identities
        return changed, not now.keys() <= self._before.keys()


def is_boundary(value: Any, kept: Mapping[int, object]) -> bool:
    """Whether what ``value`` holds is no state of the user's module.

    Args:
        value: Anything.
        kept: By id, objects that are not looked into.
    """
    # What this package puts in a module for the time of a run leads to its own books.
    is_ours = package_of(type(value).__module__) == _OWN_PACKAGE
    return is_ours or is_shared(value, kept)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What an object held.

    Attributes:
        identities: Differ if it holds something else.
        kept: What they are those of, so that no id can be another object's by now.
    """

    identities: Any
    kept: list[Any]


def _mark(value: Any) -> _Mark | None:
    """What ``value`` holds; nothing if it can hold nothing."""
    if isinstance(value, np.ndarray):
        # Nothing counts the writes to an array, so all of it is read.
        return _Mark(zlib.crc32(value.tobytes()), [])
    contents = _contents(value)
    if contents is None:
        return None
    return _Mark(list(map(_identities, contents)), _kept_alive(contents))


def _contents(value: Any) -> list[Any] | None:
    """The items of a container that can change, and the attributes of an object, with those in slots."""
    # Classes, modules and tensors have slots of their own, which are nothing that a step counts in.
    slots = [] if isinstance(value, type | nn.Module | torch.Tensor) else slot_contents(value)
    attributes = vars(value) if has_attributes(value) else None
    if attributes is None and not slots and not isinstance(value, MUTABLE):
        return None
    contents = [*slots, *(attributes or {}).items()]
    if isinstance(value, dict):
        contents += pairs_of(value)
    elif isinstance(value, MUTABLE):
        items: Any = value
        contents += items
    return contents


def _kept_alive(contents: Iterable[Any]) -> list[Any]:
    """All but tensors, which may have a graph: what takes the place of a number must not get its id as well."""
    alive = []
    for item in contents:
        for part in item if isinstance(item, tuple) else (item,):
            if not isinstance(part, torch.Tensor):
                alive.append(part)
    return alive


def _identities(item: Any) -> Any:
    if isinstance(item, tuple):
        return tuple(map(id, item))
    return id(item)
