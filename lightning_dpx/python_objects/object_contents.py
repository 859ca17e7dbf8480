"""What one object holds, as a tuple, and how it holds that again.

For every kind of object that a step can write to there is a reader and, where it can be put back, a writer: attributes
of modules, classes, globals, arrays, cells of closures, containers, instances with a ``__dict__`` or slots.
"""

import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.python_objects.object_graph import PLAIN, content_of, pairs_of
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.torch_compat import version_counter

# Callers compare and put back parameters and buffers by themselves, and hooks are code: what is
# left is what the author of a module keeps there.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}  # what compile() makes is code
# The inside of these is C, too, but a walk reads their items by itself.
BUILTIN = (
    object, list, tuple, dict, OrderedDict, set, frozenset, deque, BaseException, types.SimpleNamespace, *PLAIN,
)  # fmt: skip
# Stands for a name or a slot that holds nothing, as None may well be a value.
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Entry:
    """An object that can be written to.

    Attributes:
        path: How it was found.
        value: The object.
        read: Gives what it holds, as a tuple or a state that ``same`` compares.
        write: Makes it hold that again; ``None`` if that cannot be done.
    """

    path: str
    value: Any
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None] | None


def as_dict(held: tuple[Any, ...]) -> dict[Any, Any]:
    """Keys and values that stand one after the other in ``held``, as a dict."""
    half = len(held) // 2
    return dict(zip(held[:half], held[half:], strict=True))


def own_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the author of a module keeps there, with its names."""
    return ((name, value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE)


def attributes_of(module: nn.Module) -> tuple[Any, ...]:
    """The class of a module and what its author keeps there: names, then values."""
    own = list(own_values(module))
    # Names before values: tuples are compared in C, item by item.
    return (type(module), *(key for key, _ in own), *(value for _, value in own))


def write_attributes(module: nn.Module, held: tuple[Any, ...]) -> None:
    """The module has these attributes again, and no others."""
    if type(module) is not held[0]:
        return  # a lazy module has become another one, for good
    # Past setattr, with which a module would register tensors and modules anew.
    for key in [key for key in vars(module) if key not in OF_EVERY_MODULE]:
        del vars(module)[key]
    vars(module).update(as_dict(held[1:]))


def class_values(kind: type) -> tuple[Any, ...]:
    """What a class itself defines: names, then values."""
    # Python's own entries have such names, and some of them cannot be set again.
    held = [(key, value) for key, value in list(vars(kind).items()) if not key.startswith("__")]
    return (*(key for key, _ in held), *(value for _, value in held))


def write_class(kind: type, held: tuple[Any, ...]) -> None:
    """The class defines this again, and nothing else."""
    then = as_dict(held)
    for key in list(vars(kind)):
        if not key.startswith("__") and key not in then:
            # Past the metaclass: that of an enum, for one, refuses both.
            type.__delattr__(kind, key)
    for key, value in then.items():
        if vars(kind).get(key, _MISSING) is not value:
            type.__setattr__(kind, key, value)


@dataclass(frozen=True, slots=True)
class GlobalNames:
    """Some names of a file."""

    namespace: dict[str, Any]
    names: tuple[str, ...]

    def read(self) -> tuple[Any, ...]:
        return tuple([self.namespace.get(name, _MISSING) for name in self.names])

    def write(self, held: tuple[Any, ...]) -> None:
        for name, value in zip(self.names, held, strict=True):
            if value is _MISSING:
                self.namespace.pop(name, None)
            else:
                self.namespace[name] = value


def version_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How often the tensor was written to."""
    # Inference tensors count no writes, and raise when they are asked for their version.
    return (None if tensor.is_inference() else version_counter(tensor),)


def checksum_of(array: Any) -> tuple[Any, ...]:
    """Shape and checksum of an array or buffer."""
    # A view of an array may have gaps, which a checksum over its memory cannot skip.
    data: Any = np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array
    shape = array.shape if isinstance(array, np.ndarray) else ()
    # A memoryview without bytes refuses to be cast.
    return *shape, zlib.crc32(memoryview(data).cast("B") if memoryview(data).nbytes else b"")


def bytes_of_array(array: Any) -> tuple[Any, ...]:
    """A copy of what an array or buffer holds."""
    if isinstance(array, np.ndarray):
        return (array.copy(),)
    return (memoryview(array).tobytes(),)


def write_bytes(array: Any, held: tuple[Any, ...]) -> None:
    """The array or buffer holds this again, where it can be written to."""
    if isinstance(array, np.ndarray):
        # The run may have resized it, or made it read-only; then it stays as it is.
        if array.flags.writeable and array.shape == held[0].shape:
            np.copyto(array, held[0])
    elif isinstance(array, bytearray):
        # Assigned as a slice, a bytearray gets its old length back as well.
        array[:] = held[0]
    elif not memoryview(array).readonly:
        memoryview(array).cast("B")[:] = held[0]


def objects_of_array(array: np.ndarray) -> tuple[Any, ...]:
    """The objects in an array of objects."""
    return tuple(array.ravel().tolist())


def write_array(array: np.ndarray, held: tuple[Any, ...]) -> None:
    """The array of objects holds these again."""
    for place, value in enumerate(held):
        array.flat[place] = value


def cell_content(cell: types.CellType) -> tuple[Any, ...]:
    """What the cell of a closure holds."""
    return (content_of(cell),)


def write_cell(cell: types.CellType, held: tuple[Any, ...]) -> None:
    """The cell holds this again."""
    cell.cell_contents = held[0]


def pairs_held(held: dict[Any, Any]) -> tuple[Any, ...]:
    """What a dict holds: keys, then values."""
    pairs = pairs_of(held)
    return (*(key for key, _ in pairs), *(value for _, value in pairs))


def write_pairs(into: dict[Any, Any], held: tuple[Any, ...]) -> None:
    """The dict holds this again, in this order."""
    _write_items(into, as_dict(held).items())


def _write_items(into: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> None:
    # Past the methods of a subclass, whose own may do more than store, as may those of
    # lists and sets.
    base = OrderedDict if isinstance(into, OrderedDict) else dict
    base.clear(into)
    for key, value in pairs:
        base.__setitem__(into, key, value)


def _write_list(into: list[Any], held: tuple[Any, ...]) -> None:
    list.__setitem__(into, slice(None), held)


def _write_deque(into: deque[Any], held: tuple[Any, ...]) -> None:
    deque.clear(into)
    deque.extend(into, held)


def _write_set(into: set[Any], held: tuple[Any, ...]) -> None:
    set.clear(into)
    set.update(into, held)


CONTAINER_WRITERS: dict[type, Callable[[Any, Any], None]] = {list: _write_list, deque: _write_deque, set: _write_set}


def container_kind(value: Any) -> type:
    """Which of the kinds in ``CONTAINER_WRITERS`` a list, deque or set is."""
    return next(kind for kind in CONTAINER_WRITERS if isinstance(value, kind))


def refill(container: Any, content: Iterable[Any]) -> None:
    """A list, dict, set or deque holds this again.

    Args:
        container: Which.
        content: Its items; of a dict, pairs of keys and values.
    """
    if isinstance(container, dict):
        _write_items(container, content)
        return
    CONTAINER_WRITERS[container_kind(container)](container, tuple(content))


def fields_of(value: Any) -> tuple[Any, ...]:
    """What the slots and the ``__dict__`` of an object hold."""
    held = own_attributes(value) or {}
    slots = [slot.__get__(value) if is_set(slot, value) else _MISSING for slot in slots_of(value)]
    # Slots first: how many there are is known from the class, and so is where the rest begins.
    return (*slots, *held, *held.values())


def write_fields(value: Any, held: tuple[Any, ...]) -> None:
    """Slots and ``__dict__`` hold this again."""
    slots = slots_of(value)
    for slot, content in zip(slots, held, strict=False):
        # A member of a class that is written in C looks like a slot; what is read-only nobody has written.
        with suppress(AttributeError, TypeError):
            if content is not _MISSING:
                slot.__set__(value, content)
            elif is_set(slot, value):
                slot.__delete__(value)
    rest = held[len(slots) :]
    own = own_attributes(value)
    if own is not None:
        own.clear()
        own.update(as_dict(rest))


def is_set(slot: Any, value: Any) -> bool:
    """Whether that slot of an object holds anything."""
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def slot_contents(value: Any) -> list[tuple[str, Any]]:
    """What the slots of an object hold, with their names; nothing for those that are not set."""
    return [(slot.__name__, slot.__get__(value)) for slot in slots_of(value) if is_set(slot, value)]


def slots_of(value: Any) -> tuple[Any, ...]:
    """The slots that the class of an object has, and those that it inherits from."""
    return _slots(type(value))  # type: ignore[arg-type]


@cache
def _slots(kind: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for base in kind.__mro__:
        if base not in BUILTIN:
            found += [entry for entry in vars(base).values() if isinstance(entry, types.MemberDescriptorType)]
    return tuple(found)
