"""Writes that a step takes back before it ends: what it has filled is empty again, and no comparison shows them.

    self.memory["v"] = voltage       read by the next call of the layer ...
    self.memory["v"] = 0.0           ... and reset at the end of the step, as spiking networks do
    MODE["teacher"] = True           a switch of the user's own, which is put back as well

Replicas share such a container as long as it holds no tensor between steps, and globals in any case. In threads one
would find there what another has put into it. So they are looked at where submodules are called and return, and where
the user's code calls something: what has been written is mostly used by a call, and often taken back by one.

What a hook has left in a ``threading.local`` is found by the thread of the hook alone, so a step that may read it needs
order, too: its turns run in that thread.
"""

import sys
import threading
import types
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_dpx.python_objects.compiled import compiled_names
from lightning_dpx.python_objects.object_contents import own_values, slot_contents, slots_of
from lightning_dpx.python_objects.object_graph import MUTABLE, ObjectGraph, is_tensor_or_module, items_of, size_of
from lightning_dpx.python_objects.origin import is_followed, package_of, without_libraries
from lightning_dpx.python_objects.reachable import Place, places_of_code, value_at
from lightning_dpx.replicas.copying.shared_objects import modules_without
from lightning_dpx.replicas.mirrors import has_attributes
from lightning_dpx.replicas.state_fingerprint import is_boundary

_SMALL = 64  # items up to which a container is looked at item by item; beyond, by its length
_LARGEST_ARRAY = 2**16  # bytes
_MOST_WATCHED = 256  # objects of one module
_MOST_LOOKS = 400  # in one run, each some 0.4 ms for a language model: its layers do alike
_CALL = nn.Module.__call__.__code__  # runs for every call of a module


class PassingWrites(AbstractContextManager["PassingWrites"]):
    """Notices in a run that an object which replicas share holds something else for a while.

    Args:
        module: Whose objects are looked at, and the globals that its code names.
        keep: Objects that are not looked into.

    Attributes:
        found: Whether one did, or one holds what other threads do not find there.
    """

    def __init__(self, module: nn.Module, keep: Sequence[object] = ()) -> None:
        self.found: bool = False
        self._module = module
        self._handles: list[RemovableHandle] = []
        self._children: list[nn.Module] = []
        # By the id of the submodule: a metric has a hash of its states, which a step changes.
        self._watched: dict[int, list[_Held]] = {}
        self._globals: list[tuple[Place, Any]] = []
        self._num_looks = 0
        self._packages = without_libraries(frozenset(package_of(type(part).__module__) for part in module.modules()))
        # Compiled code would be compiled once more for the hooks.
        if not compiled_names(module):
            self._watch({id(kept): kept for kept in keep})

    def _watch(self, kept: dict[int, object]) -> None:
        graph = ObjectGraph(is_tensor_or_module, lambda value: is_boundary(value, kept))
        found: dict[int, list[tuple[int, Any]]] = {}
        self._children = list(modules_without(self._module, kept))
        for child in self._children:
            known = len(graph.objects)
            graph.walk(value for _, value in own_values(child))
            # Each once, where it is met first: what many submodules hold, such as a configuration, is of the outermost.
            found[id(child)] = list(graph.objects.items())[known:]
        # What leads to tensors every replica has its own of.
        leading = graph.leading()
        for index, objects in found.items():
            self._watched[index] = []
            for key, value in objects[:_MOST_WATCHED]:
                self.found = self.found or _is_of_this_thread(value)
                if key not in leading and not is_boundary(value, kept) and _can_hold(value):
                    self._watched[index].append(_Held(value))
        self._watch_globals(kept)

    def _watch_globals(self, kept: dict[int, object]) -> None:
        of_module = self._watched[id(self._module)]
        for place in places_of_code(self._module)[:_MOST_WATCHED]:
            value = value_at(place)
            self._globals.append((place, value))
            self.found = self.found or _is_of_this_thread(value)
            if not is_boundary(value, kept) and _can_hold(value):
                of_module.append(_Held(value))

    def __enter__(self) -> "PassingWrites":
        if not self._globals and not any(self._watched.values()):
            return self
        # No hooks, where it can be helped: calls of modules with hooks are not made again, which a plan may count on.
        if sys.getprofile() is None:
            sys.setprofile(self._follow_call)
            return self
        # There is one profiler in a thread, and that is the user's.
        for child in self._children:
            if not isinstance(child, torch.jit.ScriptModule):
                self._handles.append(child.register_forward_pre_hook(self._look))
                self._handles.append(child.register_forward_hook(self._look))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_profile()

    def _end_profile(self) -> None:
        # Each time a method is asked for it is another object, which is equal.
        if sys.getprofile() == self._follow_call:
            sys.setprofile(None)

    def _follow_call(self, frame: types.FrameType, event: str, _: Any) -> None:
        """Looks where submodules are called and return, and where code of the user's own calls something."""
        if frame.f_code is _CALL:
            if event in ("call", "return"):
                self._look(frame.f_locals["self"])
        elif event in ("call", "c_call"):
            caller = frame.f_back if event == "call" else frame
            if caller is not None and is_followed(caller.f_globals.get("__name__"), self._packages):
                self._look(self._module)
        if self.found or self._num_looks > _MOST_LOOKS:
            self._end_profile()

    def _look(self, child: nn.Module, *_: object) -> None:
        self._num_looks += 1
        if self.found or self._num_looks > _MOST_LOOKS:
            return
        # A step, and hooks of submodules, mostly write what the outermost module holds.
        of_both = [self._watched[id(self._module)]]
        # Of modules that are no part of it, such as a teacher in a list, only globals and the like are known.
        if child is not self._module and id(child) in self._watched:
            of_both.append(self._watched[id(child)])
        self.found = any(held.differs() for held in chain.from_iterable(of_both))
        self.found = self.found or any(_is_other(place, value) for place, value in self._globals)


def _is_of_this_thread(value: Any) -> bool:
    return isinstance(value, threading.local) and bool(vars(value))


def _is_other(place: Place, before: Any) -> bool:
    try:
        return value_at(place) is not before
    except KeyError:  # it was deleted
        return True


class _Held:
    """What an object holds, read in a microsecond or two: hundreds of times in a step.

    Args:
        value: The object.
    """

    __slots__ = ("_before", "_has_attributes", "_has_slots", "_kept", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._has_attributes = has_attributes(value)
        self._has_slots = not isinstance(value, type | nn.Module | torch.Tensor) and bool(slots_of(value))
        self._before = self._read()
        # So that what takes the place of a number does not get its id as well.
        self._kept = [] if self._is_large else [list(part) for part in self._parts()]

    @property
    def _is_large(self) -> bool:
        return isinstance(self._value, MUTABLE) and size_of(self._value) > _SMALL

    def _parts(self) -> Iterator[Iterable[Any]]:
        if self._has_attributes:
            yield vars(self._value).values()
        if self._has_slots:
            yield [item for _, item in slot_contents(self._value)]
        if isinstance(self._value, dict):
            yield dict.values(self._value)
        elif isinstance(self._value, MUTABLE):
            yield items_of(self._value)

    def _read(self) -> list[Any]:
        if isinstance(self._value, np.ndarray):
            return [zlib.crc32(self._value.tobytes())]
        if self._is_large:
            return [size_of(self._value)]
        return [id(item) for part in self._parts() for item in part]

    def differs(self) -> bool:
        """Whether it holds something else than at first."""
        return self._read() != self._before


def _can_hold(value: Any) -> bool:
    # Large arrays would be read as a whole each time.
    if isinstance(value, np.ndarray):
        return value.nbytes <= _LARGEST_ARRAY
    return isinstance(value, MUTABLE) or has_attributes(value) or bool(slots_of(value))
