"""What becomes of values that a plan does not know, because steps differ: what became of similar ones.

A step may call layers that the profiled one skipped, or give an expert more rows than it had. A similar value is
saved in the same place of another call, of the same module or of another one of the same class: in ``blocks.4.mlp:1``
what is in ``blocks.0.mlp:1``, if the blocks are of one class. The larger the modules that are alike, the better they
tell.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import nn

from lightning_dpx.memory.call_names import numbered, path_of
from lightning_dpx.memory.execute.module_calls import compiled_parts
from lightning_dpx.memory.execute.values import Value

LARGER = 1.1  # than what was decided about; norms and paddings vary by a few bytes
_Place = tuple[type, str, str, str]


class KnownDecision(NamedTuple):
    """What a plan says of a value.

    Attributes:
        operator: The node that produced it.
        num_bytes: Its size.
        is_dropped: Whether it is computed again.
    """

    operator: str
    num_bytes: int
    is_dropped: bool


class Room(NamedTuple):
    """Bytes of the planned step.

    Attributes:
        budget: That it may take at the most; ``None`` where none is known.
        peak: That it takes at the most; ``None`` where that is unknown.
        kept: That it keeps from forward to backward, of these.
    """

    budget: int | None
    peak: int | None
    kept: int


class SimilarValues:
    """The places of a plan's values.

    Args:
        module: The root.
        decided: What the plan says, by name.
        room: What it leaves.
        grows: Whether a value that is larger than what was decided about counts as unknown.

    Attributes:
        of_all: Whether values that the plan keeps are dropped as well, where a similar one is: after a step that took
            more.
        given: The storages of what the forward takes, which are no memory of the step.
    """

    def __init__(self, module: nn.Module, decided: Mapping[str, KnownDecision], room: Room, *, grows: bool) -> None:
        self._decided = decided
        self._room = room
        self._grows = grows
        self.of_all: bool = False
        self.given: Collection[int] = ()
        self._classes = {path: type(part) for path, part in module.named_modules()}
        self._trusted = {entry.operator for entry in decided.values() if entry.is_dropped}
        self._operators = {entry.operator for entry in decided.values()}
        self._similar: dict[_Place, list[str]] = {}
        self._last: dict[str, tuple[int, int]] = {}  # call of a module and number in it, by path
        for name in decided:
            if ":" in name:  # else it is about a call
                path, call, number = _place_in_step(name)
                self._last[path] = max(self._last.get(path, (0, 0)), (call, number))

    def is_other(self, value: Value) -> bool:
        """Whether the plan has not decided about such a value: it does not know it, or as a smaller one."""
        planned = self._decided.get(value.name)
        if planned is None:
            if not self.is_of_step(value):
                return False
            # Of calls that it knows, and of calls before those, a plan leaves out what takes no memory
            # of its own, or dies in the forward.
            path, call, number = _place_in_step(value.name)
            return (call, number) > self._last.get(path, (0, 0))
        return self._grows and num_bytes_of(value) > LARGER * planned.num_bytes

    def is_of_step(self, value: Value) -> bool:
        """Whether the memory of ``value`` is the step's own.

        What has no producer was there before as a rule: inputs, buffers, frozen parameters. A plan decides about none
        of these, and where it has decided about such a value, or a similar one, it is another one: a mask, an index.
        """
        if value.identity is not None and value.identity.storage in self.given:
            return False
        return bool(value.operator or value.name in self._decided or self._similar_to(value.name, value.operator))

    def is_of_forward(self, value: Value) -> bool:
        """Whether the memory of ``value`` is not that of what the forward takes."""
        return value.identity is None or value.identity.storage not in self.given

    def is_made_otherwise(self, value: Value) -> bool:
        """Whether another operator has made ``value`` than the one that the plan has decided about, and tried.

        Where contents decide how often something is done, as in packed sequences, a place in a step may be another
        one's next time. What a recipe gives was compared for the plan's own operators only: a sigmoid in place, on a
        part of a larger tensor, has other last digits than one of its own.
        """
        planned = self._decided.get(value.name)
        if planned is None or not (planned.operator and value.operator):
            return False
        if value.operator == planned.operator or value.operator in self._trusted:
            return False
        # One that the plan knows nowhere is another device's for the same: its plan was made elsewhere.
        return value.operator in self._operators

    def drop(self, value: Value) -> bool:
        """Whether ``value``, which the plan does not drop, is dropped if a recipe for it is known."""
        # What a recipe gives was compared for the plan's own operators only.
        if value.operator not in self._trusted:
            return False
        similar = self._similar_to(value.name, value.operator)
        if not similar:
            return value.name not in self._decided
        return any(self._decided[name].is_dropped for name in similar)

    def are_made_like(self, names: Collection[str]) -> frozenset[str]:
        """The operators that have made the values of these names."""
        return frozenset(self._decided[name].operator for name in names if name in self._decided)

    def of(self, value: Value) -> Collection[str]:
        """The names of similar values that the plan knows."""
        return self._similar_to(value.name, value.operator)

    def fits(self, value: Value, kept: int) -> bool:
        """Whether there is room to make ``value`` again, beside the bytes that are ``kept`` of what came before it."""
        most = self._room.budget or self._room.peak
        if most is None:
            return True
        # A step that keeps too much already gets no worse by what fits beside that of the plan.
        left = most - min(kept, self._room.kept)
        return bytes_to_make(value, left) <= left

    def bytes_kept(self, values: Iterable[Value]) -> int:
        """Bytes of those values that are there and are the step's own."""
        return sum(value.tensor.nbytes for value in values if value.tensor is not None and self.is_of_step(value))

    def peak_of_backward(self, values: Iterable[Value]) -> int:
        """The most bytes that a backward will take at a time, of ``values`` in the order of the forward; about.

        Beyond the budget, any number that is.
        """
        enough = self._room.budget or 0
        kept = 0
        peak = 0
        largest = 0
        for value in values:
            if not self.is_of_step(value):
                continue
            largest = max(largest, num_bytes_of(value))
            if value.tensor is not None:
                kept += value.tensor.nbytes
            elif peak <= enough:
                peak = max(peak, kept + bytes_to_make(value, enough - kept))
        # Gradients, and what operators take inside themselves, grow with the tensors.
        planned = self._largest
        return max(peak, kept + self._passing * max(largest, planned) // max(planned, 1))

    def peak_of_calls(self, kept: int) -> int:
        """The most bytes of a step whose calls keep so many; about."""
        return kept + self._passing

    def exceeds(self, peak: int, *, surely: bool) -> bool:
        """Whether a step with that peak takes more than the budget; ``surely``, even if it is off by a value."""
        return self._room.budget is not None and peak - surely * self._largest > self._room.budget

    @property
    def _largest(self) -> int:
        """Bytes of the largest value of the plan."""
        return max((entry.num_bytes for entry in self._decided.values()), default=0)

    @property
    def _passing(self) -> int:
        """What the planned step has at a time, beside what it keeps."""
        return 0 if self._room.peak is None else self._room.peak - self._room.kept

    def _similar_to(self, name: str, operator: str) -> Collection[str]:
        if not self._similar:
            self._find_places()
        for place in self._places(name, operator):
            similar = [other for other in self._similar.get(place, ()) if other != name]
            if similar:
                return similar
        return ()

    def _find_places(self) -> None:
        for name, entry in self._decided.items():
            for place in self._places(name, entry.operator):
                self._similar.setdefault(place, []).append(name)

    def _places(self, name: str, operator: str) -> Iterator[_Place]:
        """Where a value is saved, seen from the modules around it, the largest first."""
        call, _, number = name.rpartition(":")
        path = path_of(call)
        parts = path.split(".") if path else []
        for depth in range(len(parts) + 1):
            around = self._classes.get(".".join(parts[:depth]))
            if around is not None:
                yield around, ".".join(parts[depth:]), number, operator


def _place_in_step(name: str) -> tuple[str, int, int]:
    """The path of a module, which of its calls from 1, and the number of a value in that."""
    called, _, number = name.rpartition(":")
    return *numbered(called), int(number)


def similar_calls(module: nn.Module, replayed: Collection[str], known: Collection[str]) -> list[str]:
    """Paths of modules of the classes of those whose calls are replayed, in and round which nothing is known.

    Args:
        module: The root.
        replayed: Names of calls.
        known: Paths of modules that a plan says anything of.
    """
    parts = dict(module.named_modules())
    compiled = compiled_parts(module)
    classes = {type(parts[path_of(name)]) for name in replayed}
    around = set[str]()
    for path in known:
        while path:
            around.add(path)
            path = path.rpartition(".")[0]
    found = list[str]()
    for path, part in parts.items():
        # What compiled code saves has no names, so a plan may know it and say nothing of it.
        is_code = any(not code or f"{path}.".startswith(f"{code}.") for code in compiled)
        if path and type(part) in classes and not is_code and path not in around:
            found.append(path)
    return found


def bytes_to_make(value: Value, enough: int) -> int:
    """Bytes of ``value`` and of all that is made on the way to it; of more than ``enough``, so many."""
    made = set[Value]()
    num_bytes = 0
    waiting = [value]
    while waiting and num_bytes <= enough:
        needed = waiting.pop()
        if needed in made or (needed.tensor is not None and needed is not value):
            continue
        made.add(needed)
        num_bytes += num_bytes_of(needed)
        waiting += needed.sources
    return num_bytes


def num_bytes_of(value: Value) -> int:
    """Of a value that autograd saves; 0 for others, whose size is not known."""
    identity = value.identity
    if identity is None:
        return 0
    return math.prod(identity.size) * identity.dtype.itemsize
