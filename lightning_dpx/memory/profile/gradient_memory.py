"""The memory of parameters' gradients in a step that is profiled."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation


class GradientMemory:
    """The memory of the parameters' gradients, also of those that the step forgets: it is no activation.

    Attributes:
        allocations: Ids of what they have occupied.
    """

    def __init__(self, module: nn.Module, trace: MemoryTrace) -> None:
        self._parameters = list(module.parameters())
        self._trace = trace
        self._handles: list[Any] = []
        self.allocations: set[int] = set()
        self._new: list[tuple[Allocation, int]] = []  # with the event at which it becomes a parameter's gradient
        self._found = {id(parameter) for parameter in self._parameters if parameter.grad is not None}

    def __enter__(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._note))  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        # A sparse gradient has no storage that could be looked for.
        if gradient is not None and gradient.layout is torch.strided:
            # The trace holds its allocations, so no id is given twice.
            allocation = self._trace.allocation_of(gradient.untyped_storage())
            self.allocations.add(id(allocation))
            if allocation is not None and id(parameter) not in self._found:
                self._new.append((allocation, self._trace.now))

    def adding(self, curve: Sequence[int]) -> Iterator[tuple[int, int]]:
        """What is there beside ``curve`` if each is added to another one: events and bytes."""
        gone = {id(allocation): event for allocation, event in self._new}
        bytes_with = self._trace.passing(self.allocations, gone)
        for event, (without, num_bytes) in enumerate(zip(curve, bytes_with, strict=False)):
            if num_bytes > without:
                yield event, num_bytes - without

    def counted(self, end: int, device: torch.device) -> tuple[int, ...]:
        """The curve of the step up to the event ``end``, with the new gradients in it from when they come."""
        # Those that parameters have by now: a hook may have put others in their places. What became of earlier ones
        # the trace knows by itself.
        lasting: dict[int, int] = {}
        absent = 0
        for parameter in self._parameters:
            if not parameter.requires_grad or id(parameter) in self._found:
                continue
            gradient = parameter.grad
            allocation = None
            if gradient is not None and gradient.layout is torch.strided:
                allocation = self._trace.allocation_of(gradient.untyped_storage())
            if allocation is not None:
                lasting[id(allocation)] = end
            elif parameter.device == device:
                # Other steps may make one, and nothing tells when.
                absent += parameter.nbytes
        return tuple(num_bytes + absent for num_bytes in self._trace.passing(gone=lasting)[:end])
