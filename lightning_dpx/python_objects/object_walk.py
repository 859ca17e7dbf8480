"""Walks over everything behind the attributes of modules, and notes every object that a step may write to.

[Note: hidden state] Of some objects Python cannot see all that they hold: an iterator's position, a file's, the inside
of a compiled class. A type shows all of it if its instances take no more bytes than its slots, ``__dict__`` and weak
references explain. An object of any other type that is not known to be constant is *hidden*: it cannot be told whether
it was written to.
"""

import datetime
import decimal
import enum
import functools
import gc
import logging
import operator
import re
import threading
import types
import uuid
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.python_objects.object_contents import (
    BUILTIN,
    CONTAINER_WRITERS,
    OF_EVERY_MODULE,
    Entry,
    GlobalNames,
    attributes_of,
    bytes_of_array,
    cell_content,
    checksum_of,
    class_values,
    container_kind,
    fields_of,
    is_set,
    objects_of_array,
    pairs_held,
    slots_of,
    version_of,
    write_array,
    write_attributes,
    write_bytes,
    write_cell,
    write_class,
    write_fields,
    write_pairs,
)
from lightning_dpx.python_objects.object_graph import ATOMS, content_of, pairs_of, size_of
from lightning_dpx.python_objects.origin import is_installed, runs_steps
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.python_objects.preserve import GENERATOR_TYPES, is_generator, put_back, state_of
from lightning_dpx.python_objects.reachable import globals_of, is_plain_function
from lightning_dpx.torch_compat import COMPILER_TYPES, COMPOSABLE_STATE, OpOverload, OpOverloadPacket
from lightning_dpx.units import MIB

# A LightningModule keeps what runs it under these names, and behind a trainer lies the whole run.
_TRAINERS = ("_trainer", "_fabric")
# What holds nothing that a call could write, or nothing that anybody could tell: locks, logs, hooks, code.
# No replica needs a bytearray of its own, but a step may write into one.
_ATOMS = ATOMS - {bytearray}
_CONSTANT = (
    type, enum.Enum, types.CodeType, types.ModuleType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType,
    staticmethod, classmethod, property, functools._lru_cache_wrapper, operator.itemgetter, operator.attrgetter,
    operator.methodcaller, re.Pattern, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
    decimal.Decimal, uuid.UUID, logging.Logger, logging.Handler, np.generic, np.dtype, np.ufunc,
    type(threading.Lock()), type(threading.RLock()), threading.Condition, torch.Stream, torch.jit.ScriptFunction,
    torch.utils.hooks.RemovableHandle, *COMPILER_TYPES,
    OpOverload, OpOverloadPacket, torch.finfo, torch.iinfo,
)  # fmt: skip
_KNOWN = (
    *_CONSTANT, torch.Tensor, nn.Module, weakref.ref, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
    functools.partial, types.MappingProxyType, np.ndarray, bytearray, *GENERATOR_TYPES,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, bytearray)
_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_LARGEST_CONTAINER = 10_000  # that ``only_own`` looks into
MOST_OBJECTS = 20_000
_MOST_ITEMS = 100_000
_MOST_BYTES = 16 * MIB
_MOST_COPIED = 2**28
_MOST_COPIED_OF_OWN = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkOptions:
    """How far a walk goes.

    Attributes:
        follow_code: Also to what classes hold, and the globals that their code names; but not of installed packages,
            whose files are not written for one model.
        copies: Keep what arrays hold, to put it back; not only their checksums.
        only_own: Nothing behind objects whose class is of an installed package, or in large containers: other threads
            may be at work there.
        most: So many objects are looked at, the nearest ones first.
        sharding: Also to what ``fully_shard`` keeps of a module.
    """

    follow_code: bool = True
    copies: bool = False
    only_own: bool = False
    most: int = MOST_OBJECTS
    sharding: bool = True

    @property
    def most_copied(self) -> int:
        """Bytes of arrays that are kept at most."""
        if self.only_own:
            return _MOST_COPIED_OF_OWN
        return _MOST_COPIED


class ObjectWalk:
    """A walk through what modules and classes hold, object by object.

    Args:
        modules: Whose attributes; modules behind them that are not among these are an obstacle.
        classes: Also what these hold, and the globals that their code names.
        objects: Also what these hold, by path.
        options: How far it goes.

    Attributes:
        entries: The objects that can be written to.
        obstacle: Why it cannot be told whether something changes; empty if it can.
        outside: Modules that are not among ``modules``.
        caches: Functions that keep their results (``functools.lru_cache``), among what ``only_own`` looks at.
    """

    def __init__(
        self,
        modules: Collection[nn.Module],
        classes: Iterable[type],
        objects: Mapping[str, Any],
        options: WalkOptions,
    ) -> None:
        self._options = options
        self.entries: list[Entry] = []
        self.obstacle: str = ""
        self.outside: list[nn.Module] = []
        self.caches: list[Any] = []
        self._own = {id(module) for module in modules}
        # Callers look after these, wherever else a module holds them (the flat weights of an LSTM, a list of them).
        self._looked_after: set[int] = set()
        self._seen: dict[int, Any] = {}  # holds what was seen, so that ids stay theirs
        self._num_items = 0
        self._num_bytes = 0  # of arrays that are kept
        self._waiting: deque[tuple[str, Any]] = deque(objects.items())
        for module in modules:
            self._add_module(module)
        if options.follow_code:
            for kind in dict.fromkeys(chain(map(type, modules), classes)):
                self._add_class(kind)
        self._walk()

    def _add_module(self, module: nn.Module) -> None:
        name = type(module).__name__
        self.entries.append(Entry(name, module, attributes_of, write_attributes))
        self._looked_after.update(map(id, module.parameters(recurse=False)))
        self._looked_after.update(map(id, module.buffers(recurse=False)))
        for key, value in vars(module).items():
            if key in _TRAINERS:
                if value is not None:
                    self._stop(f"{name} belongs to a trainer")
            # A key may be any object.
            elif key not in OF_EVERY_MODULE and (self._options.sharding or not str(key).startswith(COMPOSABLE_STATE)):
                self._waiting.append((f"{name}.{key}", value))

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) not in self._seen and not is_installed(base.__module__):
                self._seen[id(base)] = base
                self.entries.append(Entry(base.__qualname__, base, class_values, write_class))
                for key, value in list(vars(base).items()):
                    self._add_known(f"{base.__qualname__}.{key}", value)
        self._add_globals(kind)

    def _add_globals(self, kind: type | types.FunctionType) -> None:
        if is_installed(kind.__module__):
            return
        for namespace, names in _globals_of(kind):
            path = f"a global of {kind.__module__}"
            self.entries.append(Entry(path, GlobalNames(namespace, names), GlobalNames.read, GlobalNames.write))
            for name in names:
                self._add_known(f"the global {name}", namespace.get(name))

    def _add_known(self, path: str, value: Any) -> None:
        """Something that a class or a file holds for all: of what is hidden there, only iterators are written to."""
        if not is_plain_function(value) and (not _is_hidden(value) or hasattr(value, "__next__")):
            self._waiting.append((path, value))

    def _walk(self) -> None:
        while self._waiting and len(self._seen) <= self._options.most and self._num_items <= _MOST_ITEMS:
            # First in, first out, so that what is near is found before what is far.
            path, value = self._waiting.popleft()
            if self._options.only_own and isinstance(value, functools._lru_cache_wrapper):
                self.caches.append(value)
                # Its results are no state of the step; callers empty it if it was empty before.
                value = value.__wrapped__
            if type(value) in _ATOMS or isinstance(value, _CONSTANT) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._look_at(path, value)
        if self._waiting:
            self._stop(f"{self._waiting[-1][0]} is among too many objects to watch")

    def _look_at(self, path: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            if id(value) not in self._own:
                self.outside.append(value)
                self._stop(f"{path} is a module outside of it")
        elif isinstance(value, torch.Tensor):
            if id(value) not in self._looked_after:
                self.entries.append(Entry(path, value, version_of, None))
        elif _belongs_to_the_run(value):
            self._stop(f"{path} is a {type(value).__name__}, which runs the step")
        elif isinstance(value, GENERATOR_TYPES):
            if is_generator(value):
                self.entries.append(Entry(path, value, state_of, put_back))
            # Two kinds come here: SystemRandom, which has no state to put back, and the process's
            # own generator, which is put back with those of devices.
            elif value is not torch.default_generator:
                self._stop(f"{path} draws random numbers that cannot be drawn again")
        elif self._options.only_own and not _is_own(value):
            self._stop(f"{path} is a {type(value).__name__}, which is not looked into")
        elif isinstance(value, np.ndarray | bytearray) or _is_buffer(value):
            self._add_array(path, value)
        elif isinstance(value, weakref.ref):
            self._waiting.append((path, value()))
        elif isinstance(value, types.FunctionType):
            self._add_function(path, value)
        elif isinstance(value, types.MethodType):
            # A method that is kept as a callback leads to its object, which it may write to.
            self._waiting += [(path, value.__self__), (path, value.__func__)]
        elif isinstance(value, types.BuiltinFunctionType):
            # A bound `list.append` leads to its list; of a plain function this is its
            # file, a constant.
            self._waiting.append((path, value.__self__))
        elif isinstance(value, functools.partial | types.MappingProxyType):
            # The garbage collector alone shows the dict behind a mapping proxy.
            self._waiting += [(path, one) for one in gc.get_referents(value) if not isinstance(one, type)]
        elif _is_hidden(value):
            self._stop(f"{path} is a {type(value).__name__}, whose state cannot be seen")
        else:
            self._add_object(path, value)

    def _stop(self, why: str) -> None:
        self.obstacle = self.obstacle or why

    def _add_array(self, path: str, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            # The bytes of such an array are addresses of objects, so a checksum of them
            # would tell little.
            self.entries.append(Entry(path, value, objects_of_array, write_array))
            self._waiting += [(path, one) for one in value.ravel().tolist()]
        elif self._options.copies and self._num_bytes + memoryview(value).nbytes <= self._options.most_copied:
            self._num_bytes += memoryview(value).nbytes
            self.entries.append(Entry(path, value, bytes_of_array, write_bytes))
        elif memoryview(value).nbytes > _MOST_BYTES:
            self._stop(f"{path} is an array of more than {_MOST_BYTES} bytes")
        else:
            self.entries.append(Entry(path, value, checksum_of, None))

    def _add_function(self, path: str, value: types.FunctionType) -> None:
        for cell in value.__closure__ or ():
            # Functions that are defined together share their cells.
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self.entries.append(Entry(path, cell, cell_content, write_cell))
                self._waiting.append((path, content_of(cell)))
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        self._waiting += [(path, one) for one in given]
        if vars(value):
            self._waiting.append((path, vars(value)))
        if self._options.follow_code:
            self._add_globals(value)

    def _add_object(self, path: str, value: Any) -> None:
        """A container, or an instance of a class that Python can see through; both, for a subclass of a container."""
        if isinstance(value, dict):
            self.entries.append(Entry(path, value, pairs_held, write_pairs))
            held = pairs_of(value)
            self._wait_for(path, [key for key, _ in held])
            self._wait_for(path, [one for _, one in held])
        elif isinstance(value, list | deque | set):
            self.entries.append(Entry(path, value, tuple, CONTAINER_WRITERS[container_kind(value)]))
            self._wait_for(path, value)
        elif isinstance(value, tuple | frozenset):
            self._wait_for(path, value)
        slots = slots_of(value)
        own = own_attributes(value)
        if slots or own is not None:
            self.entries.append(Entry(path, value, fields_of, write_fields))
            self._waiting += [(f"{path}.{key}", one) for key, one in (own or {}).items()]
            self._wait_for(path, [slot.__get__(value) for slot in slots if is_set(slot, value)])
        if self._options.follow_code:
            self._add_class(type(value))

    def _wait_for(self, path: str, values: Collection[Any]) -> None:
        self._num_items += len(values)
        # Decided in C: a long list of numbers is one look at its types, and no turns of its items.
        if not _ATOMS.issuperset(set(map(type, values))):
            self._waiting += [(path, one) for one in values]


def _belongs_to_the_run(value: Any) -> bool:
    """A trainer, a strategy, its loops, loggers and wrappers of optimizers; not the hyperparameters."""
    is_container = isinstance(value, dict | list | tuple | set)
    return not is_container and runs_steps(type(value))


def _is_own(value: Any) -> bool:
    """Whether ``value`` is of the user's own class, a function, or a container or array that is not large."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MOST_BYTES
    if isinstance(value, _CONTAINERS):
        return size_of(value) <= _LARGEST_CONTAINER
    return isinstance(value, _CALLED) or not is_installed(type(value).__module__)


def _globals_of(kind: type | types.FunctionType) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    if kind not in _known_globals:
        _known_globals[kind] = list(globals_of(kind))
    return _known_globals[kind]


_known_globals: weakref.WeakKeyDictionary[Any, list[tuple[dict[str, Any], tuple[str, ...]]]]
_known_globals = weakref.WeakKeyDictionary()  # a function may be a closure over very much


def _is_buffer(value: Any) -> bool:
    # The kinds that are met most are spared the exception, and bytes cannot be written to.
    if isinstance(value, bytes | tuple | list | dict):
        return False
    try:
        memoryview(value)
    except (TypeError, BufferError, ValueError):
        return False
    return True


def _is_hidden(value: Any) -> bool:
    return not isinstance(value, _KNOWN) and not _shows_all(type(value))  # type: ignore[arg-type]


@cache
def _shows_all(kind: Any) -> bool:
    """Whether Python sees all that instances hold; see the note above."""
    while kind not in BUILTIN:
        base = kind.__base__
        # Each slot is a pointer of 8 bytes, and so are the references to a dict and to weak
        # references. From Python 3.11 on the dict lies in front of the object, which a
        # negative offset says.
        fields = sum(isinstance(entry, types.MemberDescriptorType) for entry in vars(kind).values())
        fields += kind.__dictoffset__ > 0 and not base.__dictoffset__
        fields += kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__
        if kind.__basicsize__ - base.__basicsize__ > 8 * fields:
            return False
        kind = base
    return True
