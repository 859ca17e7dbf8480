"""What the Python objects behind the attributes of modules hold, to be compared, or put back.

A module may keep state anywhere: in an attribute, a list in a dict, an array, an object with slots, the closure of a
function, a generator of random numbers, a class, or a global of the file that defines it. :class:`ObjectState` notes,
for every object that can be written to, what it holds.

    object_walk      finds the objects, and what stands in the way of seeing what they hold
    object_contents  reads what one of them holds, and writes it again
"""

import operator
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.python_objects.object_contents import Entry, as_dict, attributes_of
from lightning_dpx.python_objects.object_graph import PLAIN
from lightning_dpx.python_objects.object_walk import MOST_OBJECTS, ObjectWalk, WalkOptions
from lightning_dpx.python_objects.preserve import put_back, same_state
from lightning_dpx.python_objects.same_values import SameValues


class ObjectState:
    """What everything behind the attributes of some modules holds.

    The tensors among it count by identity and version, parameters and buffers of the modules not at all, wherever they
    are held. Loggers and locks do not count; a trainer that a module belongs to is an obstacle.

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
        sharding: Also what ``fully_shard`` keeps of a module.

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
        most: int = MOST_OBJECTS,
        sharding: bool = True,
    ) -> None:
        options = WalkOptions(follow_code=follow_code, copies=copies, only_own=only_own, most=most, sharding=sharding)
        walk = ObjectWalk(modules, classes, objects, options)
        self.obstacle: str = walk.obstacle
        self.outside: list[nn.Module] = walk.outside
        self.caches: list[Any] = walk.caches
        # Entries hold the objects that count; what the walk only passed is not kept alive.
        self._entries = walk.entries
        self._attributes = _SameAttributes([e.value for e in self._entries if e.read is attributes_of])
        self._last = [entry.read(entry.value) for entry in self._entries]
        self._others = [(at, entry) for at, entry in enumerate(self._entries) if entry.read is not attributes_of]

    @property
    def paths(self) -> list[str]:
        """Where what is looked at was found, as ``module.attribute[key]``."""
        return [entry.path for entry in self._entries]

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among what the attributes hold."""
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

    def difference(self, before: list[Any], after: list[Any], meanwhile: list[Any] | None = None) -> str:
        """The path of an object that holds something else; empty if none does. Random generators move on as ever.

        Args:
            before: What they held.
            after: What they held later.
            meanwhile: Those alone count that held something else by then, too.
        """
        if before is after:
            return ""
        for at, (entry, old, new) in enumerate(zip(self._entries, before, after, strict=True)):
            if old is new or entry.write is put_back or _is_same(old, new):
                continue
            if meanwhile is None or not _is_same(old, meanwhile[at]):
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


class _SameAttributes:
    """Whether all attributes of some modules are the same objects still, seen at once: it is asked at every call."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self.note()

    def note(self) -> None:
        """Notes the attributes as they are now."""
        # A lazy module becomes one of another class in its first call, and keeps its dict.
        self._kinds = list(map(type, self._modules))
        self._attributes = SameValues(list(map(vars, self._modules)))

    def are_same(self) -> bool:
        """Whether no attribute was set since they were noted."""
        return self._attributes.are_same() and list(map(type, self._modules)) == self._kinds


def _name_of(entry: Entry, old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
    """The path of an object; of a module, that of the attribute that is another one."""
    if entry.read is not attributes_of:
        return entry.path
    before = as_dict(old[1:])
    after = as_dict(new[1:])
    for key in (*before, *after):
        if key not in before or key not in after or not _is_alike(before[key], after[key]):
            return f"{entry.path}.{key}"
    return entry.path


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
    return old is new or (type(old) is type(new) and isinstance(old, PLAIN) and old == new)
