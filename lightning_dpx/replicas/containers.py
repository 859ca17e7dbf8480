"""What a batch or an output is made of: containers of named children, sequences, and values that belong to all rows.

A container is rebuilt as its own type, in its own order, with its attributes and without running its constructor.
"""

import copy
import copyreg
import dataclasses
import datetime
import enum
import numbers
import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from lightning_dpx.errors import SliceError
from lightning_dpx.python_objects.own_attributes import is_made_from_state, own_attributes
from lightning_dpx.torch_compat import pytree

PLAIN = (str, bytes, int, float, complex, bool, type(None))
_VALUES = (
    *PLAIN, numbers.Number, np.generic, enum.Enum, datetime.date, datetime.time, datetime.timedelta, PurePath,
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype,
)  # fmt: skip


def is_value(node: Any) -> bool:
    """Whether ``node`` is a number, a text or a setting: it has no rows, so every replica gets it."""
    # By class, which is looked up once: a list may have an item for each of thousands of rows.
    kind = type(node)
    if _is_kind_of_value(kind):  # type: ignore[arg-type]
        return True
    return (kind is torch.Tensor or isinstance(node, torch.Tensor | np.ndarray)) and node.ndim == 0


@lru_cache(maxsize=1024)
def _is_kind_of_value(kind: type) -> bool:
    return issubclass(kind, _VALUES)


def is_sequence(node: Any) -> bool:
    """Whether ``node`` holds unnamed items, which may be one per row: a list or tuple, but no named one."""
    if isinstance(node, tuple):
        named = hasattr(node, "_fields") or hasattr(type(node), "n_sequence_fields")  # torch.max() returns the latter
        return not named and not isinstance(node, torch.Size)
    return isinstance(node, list | deque | UserList)


def children_of(node: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container, or ``None`` for a leaf."""
    # They are tuples, but rebuilt from other items they would mean nothing.
    if isinstance(node, torch.nn.utils.rnn.PackedSequence | torch.Size):
        return None
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, list | tuple | deque | UserList):
        return [(str(index), value) for index, value in enumerate(node)]
    if (names := _attribute_names(node)) is not None:
        return [(name, getattr(node, name)) for name in names]
    # Classes that the user, or a library, has registered with torch.
    if type(node) in pytree.SUPPORTED_NODES:
        children, _ = pytree.SUPPORTED_NODES[type(node)].flatten_fn(node)
        return [(str(index), value) for index, value in enumerate(children)]
    return None


def members_of(node: Any) -> list[tuple[str, Any]] | None:
    """Named children of what a step returns: those of a container, or the attributes of a plain Python object.

    Results are put together from such parts, and what comes out is compared with the result of one device. A batch is
    not cut by attributes: nothing tells which of them have rows.
    """
    children = children_of(node)
    if children is None and _is_plain_object(node):
        return list(vars(node).items())
    return children


def _is_plain_object(node: Any) -> bool:
    """Whether ``node`` is an object of a Python class that is what its attributes are, and leads to no circle."""
    if is_value(node) or not _copies_by_attributes(type(node)):  # type: ignore[arg-type]
        return False
    try:
        # As pickle sees it: objects with parts in C refuse, or say more than attributes.
        reduced: Any = node.__reduce_ex__(4)
    except TypeError:
        return False
    # With slots the state is more than a dict.
    is_by_attributes = is_made_from_state(type(node), reduced) and isinstance(reduced[2], dict)
    return is_by_attributes and not _leads_to_circle(node, frozenset())


@lru_cache(maxsize=1024)
def _copies_by_attributes(kind: type) -> bool:
    """Whether objects of a class are copied by their attributes, and nothing is said of how else."""
    if issubclass(kind, type | torch.nn.Module | torch.Tensor) or kind in copyreg.dispatch_table:
        return False
    if any(hasattr(kind, name) for name in ("__copy__", "__deepcopy__", "__setstate__", "__getnewargs_ex__")):
        return False
    # Functions, and much else that is written in C, have no say in it either, but no attributes of the kind.
    as_usual = ("__reduce_ex__", "__reduce__", "__getstate__")
    return all(getattr(kind, name) is getattr(object, name) for name in as_usual)


def _leads_to_circle(node: Any, above: frozenset[int]) -> bool:
    """Whether attributes lead back to one of the objects that they are attributes of."""
    if id(node) in above:
        return True
    inner = above | {id(node)}
    children = children_of(node)
    held = own_attributes(node)
    if children is None and held is not None and _copies_by_attributes(type(node)):  # type: ignore[arg-type]
        children = list(held.items())
    return any(_leads_to_circle(child, inner) for _, child in children or () if not is_value(child))


def _attribute_names(node: Any) -> list[str] | None:
    """The fields of a dataclass or attrs object, and what else was set on it and may have rows."""
    # The class itself has the fields' names as well.
    if isinstance(node, type):
        return None
    if dataclasses.is_dataclass(node):
        declared = [field.name for field in dataclasses.fields(node)]
    elif hasattr(type(node), "__attrs_attrs__"):
        declared = [attribute.name for attribute in type(node).__attrs_attrs__]
    else:
        return None
    present = [name for name in declared if hasattr(node, name)]  # a field with init=False may not be set
    return list(dict.fromkeys([*present, *(own_attributes(node) or ())]))


def rebuild(node: Any, parts: Sequence[Any]) -> Any:
    """A container of ``node``'s type with other children, in ``node``'s order.

    Raises:
        SliceError: a mapping that is neither a dict nor made from one.
    """
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, parts)
    if isinstance(node, list | tuple | deque | UserList):
        return rebuild_sequence(node, parts)
    if (names := _attribute_names(node)) is not None:
        clone = copy.copy(node)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(clone, name, part)  # frozen ones too, and without a second __post_init__
        return clone
    if type(node) not in pytree.SUPPORTED_NODES:  # a plain object, of :func:`members_of`
        clone = copy.copy(node)
        vars(clone).update(zip(vars(node), parts, strict=True))
        return clone
    handler = pytree.SUPPORTED_NODES[type(node)]
    _, context = handler.flatten_fn(node)
    return handler.unflatten_fn(list(parts), context)


def rebuild_sequence(node: Any, items: Sequence[Any]) -> Any:
    """A sequence of ``node``'s type with other items, also another number of them."""
    if type(node) in (list, tuple):
        return type(node)(items)
    if isinstance(node, deque):
        return type(node)(items, node.maxlen)
    if isinstance(node, list | UserList):
        clone = copy.copy(node)  # constructors of subclasses may take anything
        clone[:] = items
        return clone
    if hasattr(type(node), "n_sequence_fields"):
        return type(node)(items)  # type: ignore[call-arg]
    made = tuple.__new__(type(node), items)
    if hasattr(node, "__dict__"):
        vars(made).update(vars(node))
    return made


def _rebuild_mapping(node: Mapping[Any, Any], parts: Sequence[Any]) -> Any:
    fresh = dict(zip(node.keys(), parts, strict=True))  # a tensordict iterates over its rows
    if type(node) is dict:
        return fresh
    if isinstance(node, dict | UserDict):
        clone = copy.copy(node)  # with its attributes; its constructor may take anything
        for key, part in fresh.items():
            clone[key] = part  # update() is refused by transformers' ModelOutput
        return clone
    try:
        made: Any = type(node)(fresh)  # type: ignore[call-arg]
    except TypeError as error:
        raise SliceError(f"{type(node).__name__} cannot be made from a dict: {error}") from error
    # Its constructor may sort or add keys; children are told apart by their order.
    if list(made.keys()) != list(fresh):
        raise SliceError(f"{type(node).__name__}, made from a dict, has other keys than it.")
    _set_batch_dims(made, node, parts)
    return made


def _set_batch_dims(made: Any, node: Any, parts: Sequence[Any]) -> None:
    """Of a tensordict, the dims that all its tensors begin with, which its constructor takes beside a dict."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is None or not parts or not tensordict.is_tensor_collection(node):
        return
    shape = node.batch_size
    # Parts of other rows than those of ``node`` have no dims that are known; a class of the user's may set its own.
    if made.batch_size == shape or any(part.shape[: len(shape)] != shape for part in parts if hasattr(part, "shape")):
        return
    made.batch_size = shape
    made.names = node.names


def map_leaves(function: Callable[[Any], Any], node: Any) -> Any:
    """``node`` with ``function`` of each of its leaves, which are no containers, in their place."""
    return _map_leaves(function, node, children_of)


def map_tensors(function: Callable[[torch.Tensor], Any], node: Any) -> Any:
    """``node`` with ``function`` of each of its tensors in their place."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, node)


def map_result(function: Callable[[torch.Tensor], Any], result: Any) -> Any:
    """What a step returns, with ``function`` of each of its tensors in their place, those of plain objects included."""
    return _map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, result, members_of)


def _map_leaves(function: Callable[[Any], Any], node: Any, parts_of: Callable[[Any], Any]) -> Any:
    parts = None if isinstance(node, torch.Tensor) else parts_of(node)
    if parts is None:
        return function(node)
    return rebuild(node, [_map_leaves(function, part, parts_of) for _, part in parts])


def named_nodes(node: Any, path: str = "") -> Iterator[str]:
    """The paths of all inputs of a batch, containers included."""
    if path:
        yield path
    if not isinstance(node, torch.Tensor) and not is_list_of_values(node):
        for name, child in children_of(node) or ():
            yield from named_nodes(child, join_path(path, name))


def is_list_of_values(node: Any) -> bool:
    """Whether ``node`` is a sequence of at least one item, all of them values."""
    return is_sequence(node) and len(node) > 0 and all(is_value(item) for item in node)


def join_path(path: str, name: str) -> str:
    """The path of a child."""
    if path:
        return f"{path}.{name}"
    return name
