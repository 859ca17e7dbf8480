"""Modules that a module holds in lists, dicts or objects: what hooks exchange in them reaches the replicas' copies.

    root's list -> module --attribute or buffer exchanged---------> exchanged on the replica's copy
                          --moved, hook, parameter, submodule-----> the attribute that leads to it is copied anew

They are no submodules, so nothing else looks after them: a teacher that is kept in a list to stay out of checkpoints,
say, and that a hook sends to the device. What is written into their tensors is followed in ``hidden_tensors``.
"""

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import device_beside
from lightning_dpx.python_objects.module_hooks import OF_MODULES, is_ours
from lightning_dpx.python_objects.object_contents import OF_EVERY_MODULE
from lightning_dpx.replicas.array_slices import copied_to
from lightning_dpx.replicas.attribute_watch import AttributeWatch
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.seen_values import is_still, remembered
from lightning_dpx.torch_compat import buffers_of, parameters_of, submodules_of

_PRIVATE = OF_EVERY_MODULE - {"training"}  # of submodules the mode is followed elsewhere, of these nowhere
_VALUES = operator.methodcaller("values")
_READERS: Sequence[Callable[[nn.Module], Any]] = (submodules_of, parameters_of, *OF_MODULES)


@dataclass(slots=True)
class _Pair:
    """A hidden module of the first replica, as it was when the copies were equal to it.

    Attributes:
        source: The module.
        leads: The attributes that lead to it, each as a submodule's place and a name.
        parts: What it held: submodules, parameters and hooks of the user.
        buffers: Its buffers, by name.
        devices: Of its tensors.
        attributes: Its own attributes, and its mode.
        copies: By the index of a replica.
    """

    source: nn.Module
    leads: set[tuple[int, str]]
    parts: list[Any]
    buffers: "dict[str, weakref.ref[torch.Tensor]]"
    devices: list[torch.device]
    attributes: dict[str, Any]
    copies: dict[int, nn.Module] = field(default_factory=dict)

    def is_exchanged(self) -> bool:
        """Whether the module holds other parts, or tensors elsewhere, than it did."""
        parts = _parts(self.source)
        is_same = len(parts) == len(self.parts) and all(map(operator.is_, parts, self.parts))
        return not is_same or self.has_moved()

    def has_moved(self) -> bool:
        """Whether its tensors are elsewhere, or it has got or lost a buffer."""
        # Module.to() gives a parameter other memory, and leaves it the same object.
        if _devices(self.source) != self.devices:
            return True
        return bool(self.buffers) and _buffers(self.source).keys() != self.buffers.keys()

    def exchanged_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that are other tensors than they were, such as of a module that averages into a new one."""
        now = _buffers(self.source)
        return {name: now[name] for name, then in self.buffers.items() if name in now and then() is not now[name]}


class HiddenModules:
    """The hidden modules of the first replica, and their copies.

    Args:
        root: The first replica; ``None`` looks after no module.
        skip: Types of modules that are looked after elsewhere.
        others: The other replicas.
    """

    def __init__(
        self, root: Replica | None = None, skip: tuple[type, ...] = (), others: Sequence[Replica] = ()
    ) -> None:
        self._root = root
        self._others = {replica.index: replica for replica in others}
        self._skip = skip
        self._pairs: dict[int, _Pair] = {}  # by the id of the source
        self._watched: list[_Pair] = []
        self._watch = AttributeWatch([], private=_PRIVATE)
        self._entries: list[list[Any]] = []  # by reader, of all modules one after the other
        self._registered: tuple[Any, frozenset[int]] = (None, frozenset())
        self._must_watch = False

    def __len__(self) -> int:
        return len(self._pairs)

    def is_hidden(self, module: nn.Module) -> bool:
        """Whether ``module`` is to be looked after here: it is no submodule, nor looked after elsewhere."""
        if self._root is None or isinstance(module, self._skip):
            return False
        # Asked of every module in a container. A replica keeps its list as long as it has the same submodules.
        if self._registered[0] is not self._root.modules:
            self._registered = (self._root.modules, frozenset(map(id, self._root.modules)))
        return id(module) not in self._registered[1]

    def add(self, attribute: tuple[int, str], replica: int, source: nn.Module, copied: nn.Module) -> None:
        """``copied`` is the counterpart of ``source`` on ``replica``, and equal to it now."""
        pair = self._pairs.get(id(source))
        # Another attribute may lead to the same copy; and where it leads to another one, the latest is followed.
        if pair is None or pair.copies.get(replica, copied) is not copied:
            pair = _Pair(
                source,
                {attribute},
                _parts(source),
                _weakly(_buffers(source)),
                _devices(source),
                remembered(_own_attributes(source)),
            )
            self._pairs[id(source)] = pair
        pair.leads.add(attribute)
        pair.copies[replica] = copied
        self._must_watch = True

    def forget(self, attribute: tuple[int, str]) -> bool:
        """The attribute holds something else now; says whether it led to hidden modules."""
        found = False
        for key, pair in list(self._pairs.items()):
            if attribute in pair.leads:
                found = True
                pair.leads.discard(attribute)
                if not pair.leads:
                    del self._pairs[key]
        if found:
            # A module that is gone is not kept alive until the next step begins.
            self._watched, self._entries = [], []
            self._watch = AttributeWatch([], private=_PRIVATE)
            self._must_watch = True
        return found

    def pairs(self, replica: int) -> Iterator[tuple[nn.Module, nn.Module]]:
        """The first replica's modules and those of another one."""
        for pair in self._pairs.values():
            if replica in pair.copies:
                yield pair.source, pair.copies[replica]

    def sync(self, replica: int, translate: Callable[[Any], Any]) -> None:
        """Before a step: attributes that were set on the modules since are set on the copies of a replica."""
        if not self._pairs:
            return
        self._begin_to_watch()
        # The same places for every replica: they are noted when all of them have had their turn.
        for place in self._watch.suspects():
            pair = self._watched[place]
            if replica in pair.copies:
                _send_attributes(pair, vars(pair.copies[replica]), translate)
        for pair in self._with_exchanged_buffers():
            if replica in pair.copies and replica in self._others:
                self._send_buffers(pair, self._others[replica])

    def note(self) -> list[tuple[int, str]]:
        """After all replicas had :meth:`sync`: the attributes that are to be copied anew."""
        if not self._pairs:
            return []
        self._begin_to_watch()
        for place in self._watch.suspects():
            pair = self._watched[place]
            # Tensors are remembered weakly: what a step leaves on a module may have a graph.
            pair.attributes = remembered(_own_attributes(pair.source))
            self._watch.note(place)
        for pair in self._with_exchanged_buffers():
            if not pair.has_moved():
                pair.buffers = _weakly(_buffers(pair.source))
        # All in one go, as a teacher may have hundreds of modules; hooks of a plan come and go.
        entries = self._all_entries()
        if _is_same(entries, self._entries) and not any(pair.has_moved() for pair in self._watched):
            return []
        self._entries = entries
        leads: set[tuple[int, str]] = set()
        for pair in self._watched:
            if pair.is_exchanged():
                leads |= pair.leads
                # Or the new copy of what leads to it would be given the old one.
                del self._pairs[id(pair.source)]
                self._must_watch = True
        return sorted(leads)

    def _begin_to_watch(self) -> None:
        if not self._must_watch:
            return
        self._must_watch = False
        # Only now, and not for each module: a teacher is added module by module.
        self._watched = list(self._pairs.values())
        self._watch = AttributeWatch([pair.source for pair in self._watched], private=_PRIVATE)
        self._entries = []

    def _with_exchanged_buffers(self) -> list[_Pair]:
        # Most modules have no buffers, and the others the same ones as before.
        return [pair for pair in self._watched if pair.buffers and pair.exchanged_buffers()]

    def _send_buffers(self, pair: _Pair, replica: Replica) -> None:
        held = buffers_of(pair.copies[replica.index])
        for name, buffer in pair.exchanged_buffers().items():
            home = buffer.device if self._root is None else self._root.device
            # Not all that leads to it is copied anew: some modules exchange a buffer in every forward.
            held[name] = copied = copied_to(buffer, device_beside(buffer, home, replica.device))
            replica.hidden.add([(buffer, copied)])

    def _all_entries(self) -> list[list[Any]]:
        # Most of the dicts are empty, and left out; it is asked in every step.
        modules = [pair.source for pair in self._watched]
        return [list(chain.from_iterable(map(_VALUES, filter(None, map(reader, modules))))) for reader in _READERS]


def _send_attributes(pair: _Pair, copied: dict[str, Any], translate: Callable[[Any], Any]) -> None:
    now = _own_attributes(pair.source)
    # One by one: a module that notes something in each forward is not copied in every step.
    for key, value in now.items():
        if key not in pair.attributes or not is_still(pair.attributes[key], value):
            copied[key] = translate(value)
    for key in pair.attributes.keys() - now.keys():
        copied.pop(key, None)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _PRIVATE}


def _parts(module: nn.Module) -> list[Any]:
    """Its submodules, parameters, and hooks of the user."""
    found: list[Any] = []
    for reader in _READERS:
        held = reader(module)
        # Of a scripted module these are no dicts, and of most modules they are empty.
        if held:
            # What a plan puts there and takes off again is each replica's own.
            found += [part for part in held.values() if not is_ours(part)]
    return found


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in buffers_of(module).items() if buffer is not None}


def _weakly(buffers: dict[str, torch.Tensor]) -> "dict[str, weakref.ref[torch.Tensor]]":
    # What a step has left there may have a graph, which is not to outlive it.
    return {name: weakref.ref(buffer) for name, buffer in buffers.items()}


def _devices(module: nn.Module) -> list[torch.device]:
    tensors = chain(parameters_of(module).values(), buffers_of(module).values())
    return [tensor.device for tensor in tensors if tensor is not None]


def _is_same(now: list[list[Any]], then: list[list[Any]]) -> bool:
    if list(map(len, now)) != list(map(len, then)):
        return False
    return all(map(operator.is_, chain.from_iterable(now), chain.from_iterable(then)))
