"""Which Python objects lead to a module or a tensor: only those are per replica, all others are shared.

The walk follows what an object refers to, as Python's garbage collector sees it, so that it knows containers, slots,
closures, partial functions and classes that were not registered. It stops at what is code or belongs to the
framework: classes, modules of Python, the globals of functions, and whatever the caller names.
"""

import functools
import gc
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

# Objects that hold nothing, or nothing that a replica could need a version of its own of.
ATOMS: frozenset[type] = frozenset(
    {
        bool, bytearray, bytes, complex, float, int, range, slice, str, type(None), type(Ellipsis),
        type(NotImplemented), type, property, types.BuiltinFunctionType, types.CodeType, torch.device, torch.dtype,
        torch.layout, torch.memory_format, torch.Size,
    }
)  # fmt: skip
# Those that nothing can change, and that are the same where they are equal.
PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None))
# Objects that are seen, but whose content is not looked at.
_OPAQUE = (types.ModuleType, types.MappingProxyType, types.FrameType, types.TracebackType, memoryview, torch.Generator)

_DICTS = frozenset({dict, OrderedDict})
MUTABLE: tuple[type, ...] = (list, dict, set, deque)
CONTAINERS: tuple[type, ...] = (*MUTABLE, tuple, frozenset)
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class CopiedEmpty:
    """Its copies, by deepcopy or pickle, refer to nothing: what it leads to is no part of what holds it."""


def children_of_object(value: Any) -> Iterable[Any]:
    """What ``value`` refers to, without classes, code and globals."""
    kind = type(value)
    # Exact types alone are iterated: a subclass may answer by code of its own, past which the
    # garbage collector sees.
    if kind in (list, tuple, set, frozenset, deque):
        items: Iterable[Any] = value
        return items
    if kind is dict:
        # Texts lead nowhere, and most dicts have no other keys.
        values: Iterable[Any] = value.values() if all(map(_is_text, value)) else [*value, *value.values()]
        return values
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, types.FunctionType):
        return _children_of_function(value)
    if isinstance(value, functools._lru_cache_wrapper):
        return [value.__wrapped__]
    if isinstance(value, _GENERATORS):
        return _locals_of_generator(value)
    if isinstance(value, _OPAQUE):
        return []
    return gc.get_referents(value)


def may_hold(value: Any) -> bool:
    """Whether anything can be behind ``value``: not the twenty dicts of hooks that nearly every module leaves empty."""
    kind = type(value)
    if kind in _DICTS:
        return len(value) > 0
    return kind not in ATOMS


def _is_text(key: object) -> bool:
    return type(key) is str


def _children_of_function(function: types.FunctionType) -> list[Any]:
    """Closure, defaults and attributes; not the globals, which lead everywhere."""
    found: list[Any] = [content_of(cell) for cell in function.__closure__ or ()]
    found.extend(function.__defaults__ or ())
    found.extend((function.__kwdefaults__ or {}).values())
    found.extend(vars(function).values())
    return found


# A generator that has ended has no frame.
def _locals_of_generator(generator: Any) -> list[Any]:
    frame = getattr(generator, "gi_frame", None)
    if frame is None:
        return []
    return list(frame.f_locals.values())


def pairs_of(held: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """What a dict holds now; not what its own ``items`` does, which in a library may import all of its models."""
    # An OrderedDict keeps its order beside that of the dict.
    base: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    return list(base.items(held))


def size_of(held: Any) -> int:
    """How many items a list, dict, set, tuple or deque holds now; not what its own ``__len__`` does."""
    base = _base_of(held)
    if base is None:
        return len(held)
    size: int = base.__len__(held)
    return size


def items_of(held: Any) -> list[Any]:
    """The items of one now, the values of a dict; not what its own ``__iter__`` or ``values`` does."""
    if isinstance(held, dict):
        return [value for _, value in pairs_of(held)]
    base = _base_of(held)
    if base is None:
        return list(held)
    return list(base.__iter__(held))


def _base_of(held: Any) -> Any:
    """The class of Python that stores what a subclass holds; ``None`` for an object of such a class itself."""
    kind = type(held)
    if kind in CONTAINERS:
        return None
    for base in CONTAINERS:
        if issubclass(kind, base):
            return base
    return None


def content_of(cell: types.CellType) -> Any:
    """What a closure captured; ``None`` for a cell that is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


class ObjectGraph:
    """What was seen by a walk from some roots: which objects lead to a target.

    Args:
        is_target: Whether the walk ends at an object because a replica needs its own.
        is_boundary: Whether the walk ends at an object because all replicas share it.
        descend: Of the targets, those whose own content is looked at, too.
        skips_data: Whether objects are left out that lead to nothing which Python's garbage collector tracks, such as
            tuples of numbers and texts; targets must be tracked, as tensors and modules are.
    """

    def __init__(
        self,
        is_target: Callable[[Any], bool],
        is_boundary: Callable[[Any], bool] = lambda value: False,
        descend: Callable[[Any], bool] = lambda value: False,
        *,
        skips_data: bool = False,
    ) -> None:
        self._is_target = is_target
        self._is_boundary = is_boundary
        self._descend = descend
        self._skips_data = skips_data
        self._parents: dict[int, list[int]] = {}
        self._targets: list[int] = []
        self.objects: dict[int, Any] = {}  # by id; holding them keeps their ids theirs

    def walk(self, roots: Iterable[Any]) -> None:
        """Visits everything that can be reached from ``roots``, each object once."""
        waiting: list[tuple[int | None, Any]] = [(None, root) for root in roots]
        while waiting:
            parent, value = waiting.pop()
            if type(value) in ATOMS or isinstance(value, (type, np.generic)):
                continue
            key = id(value)
            if parent is not None:
                # Noted also for an object that was met before: every way to a target leads to it.
                self._parents.setdefault(key, []).append(parent)
            if key in self.objects:
                continue
            self.objects[key] = value
            is_target = self._is_target(value)
            if is_target:
                self._targets.append(key)
            if (not is_target or self._descend(value)) and not self._is_boundary(value):
                children = children_of_object(value)
                # 200,000 pairs of a number and a text took 0.4 seconds, one after the other.
                if self._skips_data:
                    children = list(filter(_leads_on, children))
                if not _all_atoms(children):
                    waiting.extend((key, child) for child in children)

    def leading(self) -> set[int]:
        """The ids of all objects that are a target or lead to one."""
        found = set(self._targets)
        waiting = list(self._targets)
        while waiting:
            for parent in self._parents.get(waiting.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    waiting.append(parent)
        return found


def _leads_on(value: Any) -> bool:
    """Whether anything that the garbage collector tracks can be behind it."""
    # Lists are tracked whatever they hold.
    return gc.is_tracked(value) and not (type(value) is list and _all_atoms(value))


def _all_atoms(values: Iterable[Any]) -> bool:
    """Decided in C: a vocabulary of 200,000 words is one look at its values' types."""
    return isinstance(values, Collection) and ATOMS.issuperset(set(map(type, values)))


def is_tensor_or_module(value: Any) -> bool:
    """What a replica has a version of its own of."""
    return isinstance(value, (torch.Tensor, nn.Module))


def is_module_or_parameter(value: Any) -> bool:
    """What differs even between replicas on one device."""
    return isinstance(value, (nn.Parameter, nn.Module))
