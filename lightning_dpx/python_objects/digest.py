"""A digest of what a run of a module depends on: its parts, their tensors, and the code and the values behind them.

Two runs with the same digest call the same code on tensors of the same shapes, as far as Python shows that: numbers in
tensors, files and the outside world do not count. So what is remembered of a run by its digest must be checked when it
is used.
"""

import enum
import functools
import hashlib
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_dpx.python_objects.code_map import raw_names
from lightning_dpx.python_objects.object_graph import content_of, items_of, pairs_of, size_of
from lightning_dpx.python_objects.origin import is_installed, runs_steps
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.torch_compat import key_of

_MOST_OBJECTS = 100_000
_MOST_ITEMS = 1_000  # of a container of numbers and texts: of a vocabulary the size is enough
_MOST_BYTES = 4_096  # of an array or a text
_NUMBERS = (bool, int, float, complex, type(None), type(Ellipsis))
_PLAIN = (torch.dtype, torch.layout, torch.memory_format, torch.Size, np.dtype, np.generic, range, slice)
_ATOMS = (*_NUMBERS, *_PLAIN, str, bytes)
_NOT_OF_THE_STEP = frozenset({"_trainer", "_fabric"})
_TENSORS = ("_parameters", "_buffers", "_modules")


class Digest:
    """Grows with everything that is added; equal ones were made from equal parts in the same order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._places: dict[int, int] = {}  # the order in which objects were met, by id
        self._met: list[Any] = []  # so that ids stay theirs
        # Devices and storages count by the order in which they are met: which tensors share one
        # matters to a step, its number or address does not.
        self._devices: dict[torch.device, int] = {}
        self._storages: dict[int, int] = {}
        self._waiting: list[Any] = []
        self._reads_numbers = True
        self.is_whole: bool = True

    def add(self, *values: Any) -> None:
        """Adds objects of any kind, with all that they lead to."""
        self._follow(values)

    def add_batch(self, batch: Any) -> None:
        """Adds data: numbers and texts count by their types, because every batch has others."""
        self._reads_numbers = False
        try:
            self._follow([batch])
        finally:
            self._reads_numbers = True

    def text(self) -> str:
        """The digest of all that was added, 32 letters."""
        return self._hash.hexdigest()[:32]

    # ---- the walk ----

    def _follow(self, values: Iterable[Any]) -> None:
        self._push(values)
        while self._waiting:
            if len(self._met) > _MOST_OBJECTS:
                self.is_whole = False
                self._waiting.clear()
                return
            self._look_at(self._waiting.pop())

    def _push(self, values: Iterable[Any]) -> None:
        # The stack is popped from its end, and parts shall be met in their own order.
        self._waiting += reversed(list(values))

    def _note(self, *tokens: object) -> None:
        # Texts may hold lone surrogates, as file names do, which UTF-8 cannot write.
        self._hash.update(repr(tokens).encode("utf-8", "backslashreplace"))

    def _look_at(self, value: Any) -> None:
        # A member of an IntEnum is a number, too, but counts by its name.
        if isinstance(value, _ATOMS) and not isinstance(value, enum.Enum):
            self._add_atom(value)
            return
        if isinstance(value, torch.device):
            self._note(value.type, self._devices.setdefault(value, len(self._devices)))
            return
        place = self._places.get(id(value))
        if place is not None:
            self._note("again", place)
            return
        self._places[id(value)] = len(self._met)
        self._met.append(value)
        self._add_object(value)

    def _add_atom(self, value: Any) -> None:
        # Flags, and parts of a batch that are missing, decide between branches of a step.
        if not self._reads_numbers and not isinstance(value, bool | None):
            self._note(type(value).__name__)
        elif isinstance(value, str | bytes) and len(value) > _MOST_BYTES:
            data = value.encode("utf-8", "backslashreplace") if isinstance(value, str) else value
            self._note(type(value).__name__, hashlib.sha256(data).hexdigest())
        else:
            self._note(type(value).__name__, repr(value))

    def _add_object(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, nn.Module):
            self._add_module(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, types.MethodType):
            self._note("method")
            # The object of a method of a trainer or a strategy leads to everything there is.
            self._push([value.__func__] if _is_of_the_run(value.__func__) else [value.__func__, value.__self__])
        elif isinstance(value, functools.partial):
            self._note("partial")
            self._push([value.func, value.args, value.keywords])
        elif isinstance(value, staticmethod | classmethod):
            self._note(type(value).__name__)
            self._push([value.__func__])
        elif isinstance(value, property):
            self._note("property")
            self._push([value.fget, value.fset])
        elif isinstance(value, np.ndarray):
            # Bytes of an array of objects are addresses, which are others in the next process.
            held = value.tobytes() if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject else b""
            self._note("array", value.shape, value.dtype.str, held if self._reads_numbers else b"")
        elif isinstance(value, enum.Enum):
            self._note(type(value).__qualname__, value.name)
        elif isinstance(value, types.ModuleType | weakref.ref) or _is_of_the_run(type(value)):
            self._note(type(value).__qualname__, getattr(value, "__name__", ""))
        else:
            self._add_content(value)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor):
            self.is_whole = False  # its shape comes with the first step
            return
        strided = tensor.layout is torch.strided and not tensor.is_nested
        storage = 0
        if strided:
            address = key_of(tensor.untyped_storage())
            # Only strided tensors have one storage to ask for.
            storage = self._storages.setdefault(address, len(self._storages))
        self._note(
            type(tensor).__qualname__, tuple(tensor.shape), str(tensor.dtype), str(tensor.layout), storage,
            tensor.stride() if strided else (), tensor.requires_grad, tensor.is_leaf,
            # A step that finds gradients adds to them, and takes other memory than one
            # that makes them.
            tensor.is_leaf and tensor.grad is not None,
        )  # fmt: skip
        self._push([tensor.device])

    def _add_module(self, module: nn.Module) -> None:
        held = vars(module)
        self._note("module", module.training)
        # Parts keep their order, as a step may iterate over them; that of other
        # attributes tells nothing.
        parts: list[tuple[str, Any]] = []
        for name in _TENSORS:
            parts += held.get(name, {}).items()
        others = sorted((key, one) for key, one in held.items() if key not in _TENSORS and _counts(key, one))
        self._push([type(module), *_flat(parts), *_flat(others)])

    def _add_class(self, kind: type) -> None:
        self._note("class", *(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__))
        # Of an installed class the version of its package is enough; it stands for all of its code.
        if not issubclass(kind, nn.Module) and (is_installed(kind.__module__) or _is_of_the_run(kind)):
            self._note(_version_of(kind.__module__))
            return
        for base in kind.__mro__:
            if base is nn.Module or _is_of_the_run(base) or (base is not kind and id(base) in self._places):
                continue
            if is_installed(base.__module__) and not issubclass(base, nn.Module):
                continue
            if base is not kind:
                self._push([base])
                continue
            held = sorted((key, one) for key, one in vars(base).items() if _is_of_class(key, one))
            self._push(_flat(held))

    def _add_function(self, function: types.FunctionType) -> None:
        self._note("function", function.__module__, function.__qualname__)
        if _is_of_the_run(function):
            return
        cells = [content_of(cell) for cell in function.__closure__ or ()]
        found = [function.__code__, function.__defaults__, function.__kwdefaults__, vars(function), cells]
        # Globals of installed code would lead through its whole package.
        if not is_installed(function.__module__):
            found += self._globals_of(function)
        self._push(found)

    def _globals_of(self, function: types.FunctionType) -> list[Any]:
        """What its code names in its file, and in others of the user's files."""
        found: list[Any] = []
        names = sorted(set(raw_names(function.__code__)))
        for name in names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            found += [name, value]
            if isinstance(value, types.ModuleType) and not is_installed(value.__name__):
                # What else the code names may be an attribute of this file, as in ``helpers.scale``.
                for one in names:
                    if one in vars(value):
                        found.append(vars(value)[one])
        return found

    # A file name or line numbers do not count: code that was only moved is the same.
    def _add_code(self, code: types.CodeType) -> None:
        self._note(
            code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount,
            code.co_flags,
        )  # fmt: skip
        # `x in {"a", "b"}` makes a frozenset, whose order depends on the hash seed of the process.
        constants: list[Any] = []
        for constant in code.co_consts:
            if isinstance(constant, frozenset):
                constant = sorted(constant, key=repr)
            constants.append(constant)
        self._push(constants)

    def _add_content(self, value: Any) -> None:
        """A container, or an object with attributes; of others the type."""
        self._note(type(value).__module__, type(value).__qualname__)
        found: list[Any] = []
        if isinstance(value, dict):
            found += self._items(value, _flat(pairs_of(value)))
        elif isinstance(value, list | tuple | deque):
            found += self._items(value, items_of(value))
        elif isinstance(value, set | frozenset):
            # Sorted for the same reason; a set of other objects has no order to rely on, and counts
            # by its size.
            items = items_of(value)
            found += self._items(value, sorted(items, key=repr) if all(isinstance(x, _ATOMS) for x in items) else [])
        if not is_installed(type(value).__module__):
            found.append(type(value))
        attributes = own_attributes(value)
        if attributes is not None:
            # By the text of their names: Python allows attributes by other keys, which have no order among them.
            for key in sorted(attributes, key=str):
                found += [key, attributes[key]]
        for kind in type(value).__mro__:
            for slot in vars(kind).values():
                if isinstance(slot, types.MemberDescriptorType) and not is_installed(kind.__module__):
                    found.append(getattr(value, slot.__name__, None))
        self._push(found)

    def _items(self, held: Any, items: list[Any]) -> list[Any]:
        self._note(size_of(held))
        if len(items) > _MOST_ITEMS and all(isinstance(item, _ATOMS) for item in items):
            return items[:_MOST_ITEMS]
        return items


def _flat(pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Keys and values in turn."""
    return list(chain.from_iterable(pairs))


def _counts(key: str, value: Any) -> bool:
    """Whether an attribute of a module takes part in a step; of its hooks those that are there."""
    if key in _NOT_OF_THE_STEP or key == "training":
        return False
    return not (isinstance(value, dict) and size_of(value) == 0 and not own_attributes(value))


def _is_of_class(key: str, value: Any) -> bool:
    is_code = isinstance(value, types.FunctionType | staticmethod | classmethod | property)
    return is_code or not (key.startswith("__") or isinstance(value, types.MemberDescriptorType))


def _is_of_the_run(value: Any) -> bool:
    """Whether it is code, or an object of a class, that runs steps: trainers, strategies, their hooks."""
    return isinstance(getattr(value, "__module__", None), str) and runs_steps(value)


def _version_of(name: str) -> str:
    return str(getattr(sys.modules.get(name.partition(".")[0]), "__version__", ""))
