"""A call of a module in a profiled step, and the tensors that autograd saves in it."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dpx.memory.execute.calls import Call
from lightning_dpx.memory.execute.recorded_collectives import Collective
from lightning_dpx.memory.execute.values import Unnamed, Value, View
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation


@dataclass(slots=True)
class NotedCall:
    """A call of the step that is watched.

    Attributes:
        call: Which.
        parent: The one that it is made in.
        begin: Event.
        first: The number of the first tensor that autograd saves in it.
        given: What it takes: the tensor or a copy of it, or the value that is saved; in the order of its arguments.
        allocations: Of what it takes.
        end: Event.
        count: Tensors that are saved in it.
        random: The state of the generators when the last of them was saved.
        met: The collectives in it, as far as they are needed to make it again.
        seconds: That it takes to make it again.
        most: Bytes at the most while it is made again.
        again: What is made again, by the id of its memory: bytes, and the numbers of its tensors within the call.
    """

    call: Call
    parent: int
    begin: int
    first: int
    given: list[Any] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    end: int = -1
    count: int = 0
    random: int | None = None
    met: list[Collective] = field(default_factory=list)
    seconds: float = 0.0
    most: int = 0
    again: dict[int, tuple[int, list[int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """What autograd holds for a tensor that it saves.

    Attributes:
        held: A weak reference to it.
        num_elements: Of the tensor.
        is_idle: Whether nobody reads what is in it.
    """

    held: "weakref.ref[Any]"
    num_elements: int
    is_idle: bool = False

    def tensor(self) -> torch.Tensor | None:
        """The tensor; ``None`` if it is gone."""
        # Weakly: a trial must not keep alive what the step itself has let go of.
        return tensor_of(self.held)


@dataclass(slots=True)
class SavedTensors:
    """All that autograd saves in a step; its tensors are numbered in the order in which it does.

    Attributes:
        held: What it holds, by the number of the tensor.
        hold_of: The numbers of the profile's holds, by the number of the tensor; of values only.
        small_bytes: Of tensors that are too small for a decision of their own, by the number of the tensor.
    """

    held: list[HeldTensor] = field(default_factory=list)
    hold_of: dict[int, int] = field(default_factory=dict)
    small_bytes: dict[int, int] = field(default_factory=dict)

    def within(self, noted: NotedCall) -> list[HeldTensor]:
        """What autograd holds of a call, in order."""
        return self.held[noted.first : noted.first + noted.count]

    def has_value(self, noted: NotedCall) -> bool:
        """Whether a tensor of a call is large enough to be decided about by itself."""
        return any(number in self.hold_of for number in _numbers_of(noted))

    def small_bytes_within(self, noted: NotedCall) -> int:
        """Bytes of the tensors of a call that are too small for that."""
        return sum(self.small_bytes.get(number, 0) for number in _numbers_of(noted))

    def holds_of(self, noted: NotedCall, within: list[int]) -> Iterator[int]:
        """The numbers of the holds of some tensors of a call, which are numbered from its first one on."""
        for number in within:
            if noted.first + number in self.hold_of:
                yield self.hold_of[noted.first + number]


def _numbers_of(noted: NotedCall) -> range:
    return range(noted.first, noted.first + noted.count)


def allocation_of(tensor: torch.Tensor, trace: MemoryTrace) -> Allocation | None:
    """What ``trace`` knows of the memory of ``tensor``, if that has one block of memory."""
    if tensor.layout is torch.strided:
        return trace.allocation_of(tensor.untyped_storage())
    return None


def tensor_of(held: Any) -> torch.Tensor | None:
    """The tensor itself, behind weak references and values."""
    if isinstance(held, weakref.ref):
        held = held()
    if isinstance(held, Unnamed | Value):
        return held.tensor
    # A view is read anew from the value that it is of, where that is still there.
    if isinstance(held, View):
        if held.value.tensor is None:
            return None
        return held.read()
    if isinstance(held, torch.Tensor):
        return held
    return None
