"""What the Python objects behind the attributes of modules hold, to be compared, or put back.

A module may keep state anywhere: in an attribute, a list in a dict, an array, an object with slots, the closure of a
function, a generator of random numbers, a class, or a global of the file that defines it. :class:`ObjectState` walks
over all of that once and notes, for every object that can be written to, what it holds.

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
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.python_objects.object_graph import ATOMS, content_of, pairs_of, size_of
from lightning_dpx.python_objects.origin import is_installed, runs_steps
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.python_objects.preserve import GENERATOR_TYPES, is_generator, put_back, same_state, state_of
from lightning_dpx.python_objects.reachable import globals_of, is_plain_function
from lightning_dpx.torch_compat import OpOverload, OpOverloadPacket, version_counter
from lightning_dpx.units import MIB

# Callers compare and put back parameters and buffers by themselves, and hooks are code: what is
# left is what the author of a module keeps there.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}  # what compile() makes is code
# A LightningModule keeps what runs it under these names, and behind a trainer lies the whole run.
_TRAINERS = ("_trainer", "_fabric")
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
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
    torch.utils.hooks.RemovableHandle,
    OpOverload, OpOverloadPacket, torch.finfo, torch.iinfo,
)  # fmt: skip
# The inside of these is C, too, but the walk reads their items by itself.
_BUILTIN = (
    object, list, tuple, dict, OrderedDict, set, frozenset, deque, BaseException, types.SimpleNamespace, *_NUMBERS,
)  # fmt: skip
_KNOWN = (
    *_CONSTANT, torch.Tensor, nn.Module, weakref.ref, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
    functools.partial, types.MappingProxyType, np.ndarray, bytearray, *GENERATOR_TYPES,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, bytearray)
_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_LARGEST_CONTAINER = 10_000  # that ``only_own`` looks into
_MOST_OBJECTS = 20_000
_MOST_ITEMS = 100_000
_MOST_BYTES = 16 * MIB
_MOST_COPIED = 2**28
_MOST_COPIED_OF_OWN = 2**26
# Stands for a name or a slot that holds nothing, as None may well be a value.
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Entry:
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


class ObjectState:
    """What everything behind the attributes of some modules holds.

    The tensors among it count by identity and version, those of ``_parameters`` and ``_buffers`` not at all. Loggers
    and locks do not count; a trainer that a module belongs to is an obstacle.

    Args:
        modules: Whose attributes; modules behind them that are not among these are an obstacle.
        follow_code: Also what their classes hold, and the globals that the code of these names; but not of installed
            packages, whose files are not written for one model.
        copies: Keep what arrays hold, to put it back; not only their checksums.
        classes: Also what these hold, and the globals that their code names.
        only_own: Nothing behind objects whose class is of an installed package, or in large containers: other threads
            may be at work there.
        objects: Also what these hold, by path.
        most: So many objects are looked at, the nearest ones first.

    Attributes:
        obstacle: Why it cannot be told whether something changed; empty if it can.
        outside: Modules that are not among ``modules``.
        caches: Functions that keep their results (``functools.lru_cache``), among what ``only_own`` looks at.
    """

    def __init__(
        self,
        modules: Collection[nn.Module],
        *,
        follow_code: bool = True,
        copies: bool = False,
        classes: Iterable[type] = (),
        only_own: bool = False,
        objects: Mapping[str, Any] = types.MappingProxyType({}),
        most: int = _MOST_OBJECTS,
    ) -> None:
        self.obstacle: str = ""
        self.outside: list[nn.Module] = []
        self.caches: list[Any] = []
        self._follow_code = follow_code
        self._copies = copies
        self._only_own = only_own
        self._most_copied = _MOST_COPIED_OF_OWN if only_own else _MOST_COPIED
        self._entries: list[_Entry] = []
        self._own = {id(module) for module in modules}
        self._seen: dict[int, Any] = {}  # holds what was seen, so that ids stay theirs
        self._num_items = 0
        self._num_bytes = 0  # of arrays that are kept
        self._most = most
        self._waiting: deque[tuple[str, Any]] = deque(objects.items())
        for module in modules:
            self._add_module(module)
        if follow_code:
            for kind in dict.fromkeys(chain(map(type, modules), classes)):
                self._add_class(kind)
        self._walk()
        # Entries hold the objects that count; what the walk only passed is not kept alive by it.
        self._seen.clear()
        self._attributes = _SameAttributes([e.value for e in self._entries if e.read is _attributes])
        self._last = [entry.read(entry.value) for entry in self._entries]
        self._others = [(at, entry) for at, entry in enumerate(self._entries) if entry.read is not _attributes]

    @property
    def paths(self) -> list[str]:
        """Where what is looked at was found, as ``module.attribute[key]``."""
        return [entry.path for entry in self._entries]

    def tensors(self) -> list[torch.Tensor]:
        """Those among what the attributes hold."""
        return [entry.value for entry in self._entries if isinstance(entry.value, torch.Tensor)]

    def marks(self) -> list[Any]:
        """What each object holds now; of modules the same tuples again, as long as nothing was set there."""
        if not self._attributes.are_same():
            self._attributes.note()
            self._last = [entry.read(entry.value) for entry in self._entries]
            return self._last
        found = self._last
        for at, entry in self._others:
            now = entry.read(entry.value)
            if not _is_same(found[at], now):
                # The list was handed out before, and must go on to say what was held then.
                if found is self._last:
                    found = list(found)
                found[at] = now
        self._last = found
        return found

    def difference(self, before: list[Any], after: list[Any]) -> str:
        """The path of an object that holds something else; empty if none does. Random generators move on as ever."""
        if before is after:
            return ""
        for entry, old, new in zip(self._entries, before, after, strict=True):
            if old is not new and entry.write is not put_back and not _is_same(old, new):
                return _name_of(entry, old, new)
        return ""

    def put_back(self, marks: list[Any], now: list[Any] | None = None) -> str:
        """Makes every object hold again what it held; the path of one for which that cannot be done, or nothing.

        Args:
            marks: What they held.
            now: What they hold, where that is known already.
        """
        left = ""
        now = self.marks() if now is None else now
        if now is marks:
            return left
        for entry, old, new in zip(self._entries, marks, now, strict=True):
            if old is not new and not _is_same(old, new):
                if entry.write is None:
                    # The others are put back all the same: one object that cannot be
                    # costs itself alone.
                    left = left or entry.path
                else:
                    entry.write(entry.value, old)
        return left

    # ---- the walk ----

    def _add_module(self, module: nn.Module) -> None:
        name = type(module).__name__
        self._entries.append(_Entry(name, module, _attributes, _write_attributes))
        for key, value in vars(module).items():
            if key in _TRAINERS:
                if value is not None:
                    self._stop(f"{name} belongs to a trainer")
            elif key not in OF_EVERY_MODULE:
                self._waiting.append((f"{name}.{key}", value))

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) not in self._seen and not is_installed(base.__module__):
                self._seen[id(base)] = base
                self._entries.append(_Entry(base.__qualname__, base, _class_values, _write_class))
                for key, value in list(vars(base).items()):
                    self._add_known(f"{base.__qualname__}.{key}", value)
        self._add_globals(kind)

    def _add_globals(self, kind: type | types.FunctionType) -> None:
        if is_installed(kind.__module__):
            return
        for namespace, names in _globals_of(kind):
            path = f"a global of {kind.__module__}"
            self._entries.append(_Entry(path, _Globals(namespace, names), _Globals.read, _Globals.write))
            for name in names:
                self._add_known(f"the global {name}", namespace.get(name))

    def _add_known(self, path: str, value: Any) -> None:
        """Something that a class or a file holds for all: of what is hidden there, only iterators are written to."""
        if not is_plain_function(value) and (not _is_hidden(value) or hasattr(value, "__next__")):
            self._waiting.append((path, value))

    def _walk(self) -> None:
        while self._waiting and len(self._seen) <= self._most and self._num_items <= _MOST_ITEMS:
            # First in, first out, so that what is near is found before what is far.
            path, value = self._waiting.popleft()
            if self._only_own and isinstance(value, functools._lru_cache_wrapper):
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
            self._entries.append(_Entry(path, value, _version, None))
        elif _belongs_to_the_run(value):
            self._stop(f"{path} is a {type(value).__name__}, which runs the step")
        elif isinstance(value, GENERATOR_TYPES):
            if is_generator(value):
                self._entries.append(_Entry(path, value, state_of, put_back))
            # Two kinds come here: SystemRandom, which has no state to put back, and the process's
            # own generator, which is put back with those of devices.
            elif value is not torch.default_generator:
                self._stop(f"{path} draws random numbers that cannot be drawn again")
        elif self._only_own and not _is_own(value):
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
            self._entries.append(_Entry(path, value, _objects_of_array, _write_array))
            self._waiting += [(path, one) for one in value.ravel().tolist()]
        elif self._copies and self._num_bytes + memoryview(value).nbytes <= self._most_copied:
            self._num_bytes += memoryview(value).nbytes
            self._entries.append(_Entry(path, value, _bytes_of_array, _write_bytes))
        elif memoryview(value).nbytes > _MOST_BYTES:
            self._stop(f"{path} is an array of more than {_MOST_BYTES} bytes")
        else:
            self._entries.append(_Entry(path, value, _checksum, None))

    def _add_function(self, path: str, value: types.FunctionType) -> None:
        for cell in value.__closure__ or ():
            # Functions that are defined together share their cells.
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._entries.append(_Entry(path, cell, _cell, _write_cell))
                self._waiting.append((path, content_of(cell)))
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        self._waiting += [(path, one) for one in given]
        if vars(value):
            self._waiting.append((path, vars(value)))
        if self._follow_code:
            self._add_globals(value)

    def _add_object(self, path: str, value: Any) -> None:
        """A container, or an instance of a class that Python can see through; both, for a subclass of a container."""
        if isinstance(value, dict):
            self._entries.append(_Entry(path, value, _pairs, _write_pairs))
            held = pairs_of(value)
            self._wait_for(path, [key for key, _ in held])
            self._wait_for(path, [one for _, one in held])
        elif isinstance(value, list | deque | set):
            self._entries.append(_Entry(path, value, tuple, _WRITERS[_container(value)]))
            self._wait_for(path, value)
        elif isinstance(value, tuple | frozenset):
            self._wait_for(path, value)
        slots = _slots_of(value)
        own = own_attributes(value)
        if slots or own is not None:
            self._entries.append(_Entry(path, value, _fields, _write_fields))
            self._waiting += [(f"{path}.{key}", one) for key, one in (own or {}).items()]
            self._wait_for(path, [slot.__get__(value) for slot in slots if _is_set(slot, value)])
        if self._follow_code:
            self._add_class(type(value))

    def _wait_for(self, path: str, values: Collection[Any]) -> None:
        self._num_items += len(values)
        # Decided in C: a long list of numbers is one look at its types, and no turns of its items.
        if not _ATOMS.issuperset(set(map(type, values))):
            self._waiting += [(path, one) for one in values]


class _SameAttributes:
    """Whether all attributes of some modules are the same objects still, seen at once: it is asked at every call."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self.note()

    def note(self) -> None:
        """Notes the attributes as they are now."""
        # A lazy module becomes one of another class in its first call, and keeps its dict.
        self._kinds = list(map(type, self._modules))
        self._dicts = list(map(vars, self._modules))
        self._values = self._held()

    def _held(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._dicts)))

    def are_same(self) -> bool:
        """Whether no attribute was set since they were noted."""
        values = self._held()
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            return False
        return list(map(type, self._modules)) == self._kinds


def _belongs_to_the_run(value: Any) -> bool:
    """A trainer, a strategy, its loops, loggers and wrappers of optimizers; not the hyperparameters."""
    is_container = isinstance(value, dict | list | tuple | set)
    return not is_container and runs_steps(type(value))


def _name_of(entry: _Entry, old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
    """The path of an object; of a module, that of the attribute that is another one."""
    if entry.read is not _attributes:
        return entry.path
    before = _as_dict(old[1:])
    after = _as_dict(new[1:])
    for key in (*before, *after):
        if key not in before or key not in after or not _is_alike(before[key], after[key]):
            return f"{entry.path}.{key}"
    return entry.path


def _as_dict(held: tuple[Any, ...]) -> dict[Any, Any]:
    half = len(held) // 2
    return dict(zip(held[:half], held[half:], strict=True))


def _is_same(old: Any, new: Any) -> bool:
    if type(old) is tuple and type(new) is tuple:
        if len(old) != len(new):
            return False
        # By identity first, in C: as a rule nothing was set, and nothing needs to be compared.
        return all(map(operator.is_, old, new)) or all(map(_is_alike, old, new))
    return same_state(old, new)


def _is_alike(old: Any, new: Any) -> bool:
    if isinstance(old, np.ndarray):
        return isinstance(new, np.ndarray) and np.array_equal(old, new)
    # Only numbers and texts are asked whether they are equal: of other types that would be code of
    # the user, and an equal object may still be another one that is written to later.
    return old is new or (type(old) is type(new) and isinstance(old, _NUMBERS) and old == new)


def _is_own(value: Any) -> bool:
    """Whether ``value`` is of the user's own class, a function, or a container or array that is not large."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MOST_BYTES
    if isinstance(value, _CONTAINERS):
        return size_of(value) <= _LARGEST_CONTAINER
    return isinstance(value, _CALLED) or not is_installed(type(value).__module__)


# ---- what objects hold, and how they hold it again ----


def _attributes(module: nn.Module) -> tuple[Any, ...]:
    own = [(key, value) for key, value in vars(module).items() if key not in OF_EVERY_MODULE]
    return (type(module), *(key for key, _ in own), *(value for _, value in own))


def _write_attributes(module: nn.Module, held: tuple[Any, ...]) -> None:
    if type(module) is not held[0]:
        return  # a lazy module has become another one, for good
    # Past setattr, with which a module would register tensors and modules anew.
    for key in [key for key in vars(module) if key not in OF_EVERY_MODULE]:
        del vars(module)[key]
    vars(module).update(_as_dict(held[1:]))


def _class_values(kind: type) -> tuple[Any, ...]:
    # Python's own entries have such names, and some of them cannot be set again.
    held = [(key, value) for key, value in list(vars(kind).items()) if not key.startswith("__")]
    return (*(key for key, _ in held), *(value for _, value in held))


def _write_class(kind: type, held: tuple[Any, ...]) -> None:
    then = _as_dict(held)
    for key in list(vars(kind)):
        if not key.startswith("__") and key not in then:
            # Past the metaclass: that of an enum, for one, refuses both.
            type.__delattr__(kind, key)
    for key, value in then.items():
        if vars(kind).get(key, _MISSING) is not value:
            type.__setattr__(kind, key, value)


@dataclass(frozen=True, slots=True)
class _Globals:
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


def _globals_of(kind: type | types.FunctionType) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    if kind not in _known_globals:
        _known_globals[kind] = list(globals_of(kind))
    return _known_globals[kind]


_known_globals: weakref.WeakKeyDictionary[Any, list[tuple[dict[str, Any], tuple[str, ...]]]]
_known_globals = weakref.WeakKeyDictionary()  # a function may be a closure over very much


def _version(tensor: torch.Tensor) -> tuple[Any, ...]:
    # Inference tensors count no writes, and raise when they are asked for their version.
    return (None if tensor.is_inference() else version_counter(tensor),)


def _checksum(array: Any) -> tuple[Any, ...]:
    # A view of an array may have gaps, which a checksum over its memory cannot skip.
    data: Any = np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array
    shape = array.shape if isinstance(array, np.ndarray) else ()
    # A memoryview without bytes refuses to be cast.
    return *shape, zlib.crc32(memoryview(data).cast("B") if memoryview(data).nbytes else b"")


def _bytes_of_array(array: Any) -> tuple[Any, ...]:
    return (array.copy(),) if isinstance(array, np.ndarray) else (memoryview(array).tobytes(),)


def _write_bytes(array: Any, held: tuple[Any, ...]) -> None:
    if isinstance(array, np.ndarray):
        # The run may have resized it, or made it read-only; then it stays as it is.
        if array.flags.writeable and array.shape == held[0].shape:
            np.copyto(array, held[0])
    elif isinstance(array, bytearray):
        # Assigned as a slice, a bytearray gets its old length back as well.
        array[:] = held[0]
    elif not memoryview(array).readonly:
        memoryview(array).cast("B")[:] = held[0]


def _objects_of_array(array: np.ndarray) -> tuple[Any, ...]:
    return tuple(array.ravel().tolist())


def _write_array(array: np.ndarray, held: tuple[Any, ...]) -> None:
    for place, value in enumerate(held):
        array.flat[place] = value


def _cell(cell: types.CellType) -> tuple[Any, ...]:
    return (content_of(cell),)


def _write_cell(cell: types.CellType, held: tuple[Any, ...]) -> None:
    cell.cell_contents = held[0]


def _pairs(held: dict[Any, Any]) -> tuple[Any, ...]:
    pairs = pairs_of(held)
    return (*(key for key, _ in pairs), *(value for _, value in pairs))


def _write_pairs(into: dict[Any, Any], held: tuple[Any, ...]) -> None:
    # Past the methods of a subclass, whose own may do more than store, as may those of
    # lists and sets.
    base = OrderedDict if isinstance(into, OrderedDict) else dict
    base.clear(into)
    for key, value in _as_dict(held).items():
        base.__setitem__(into, key, value)


def _write_list(into: list[Any], held: tuple[Any, ...]) -> None:
    list.__setitem__(into, slice(None), held)


def _write_deque(into: deque[Any], held: tuple[Any, ...]) -> None:
    deque.clear(into)
    deque.extend(into, held)


def _write_set(into: set[Any], held: tuple[Any, ...]) -> None:
    set.clear(into)
    set.update(into, held)


_WRITERS: dict[type, Callable[[Any, Any], None]] = {list: _write_list, deque: _write_deque, set: _write_set}


def _container(value: Any) -> type:
    return next(kind for kind in _WRITERS if isinstance(value, kind))


def _fields(value: Any) -> tuple[Any, ...]:
    held = own_attributes(value) or {}
    slots = [slot.__get__(value) if _is_set(slot, value) else _MISSING for slot in _slots_of(value)]
    return (*slots, *held, *held.values())


def _write_fields(value: Any, held: tuple[Any, ...]) -> None:
    slots = _slots_of(value)
    for slot, content in zip(slots, held, strict=False):
        if content is not _MISSING:
            slot.__set__(value, content)
        elif _is_set(slot, value):
            slot.__delete__(value)
    rest = held[len(slots) :]
    own = own_attributes(value)
    if own is not None:
        own.clear()
        own.update(_as_dict(rest))


def _is_set(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


# ---- which types show what they hold ----


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
    while kind not in _BUILTIN:
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


def slot_contents(value: Any) -> list[tuple[str, Any]]:
    """What the slots of an object hold, with their names; nothing for those that are not set."""
    return [(slot.__name__, slot.__get__(value)) for slot in _slots_of(value) if _is_set(slot, value)]


def _slots_of(value: Any) -> tuple[Any, ...]:
    return _slots(type(value))  # type: ignore[arg-type]


@cache
def _slots(kind: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for base in kind.__mro__:
        if base not in _BUILTIN:
            found += [entry for entry in vars(base).values() if isinstance(entry, types.MemberDescriptorType)]
    return tuple(found)
