"""What a step returns beside its loss is there until the step is over: its caller holds it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.torch_compat import DisableTorchFunctionSubclass, tree_leaves

Parts = Callable[[Any], list[Any] | None]


def items_of(value: Any) -> list[Any] | None:
    """What a container holds; ``None`` of what is none."""
    asked = 0

    def is_below(_: Any) -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    items = tree_leaves(value, is_leaf=is_below)
    if asked == 1 and items:
        return None
    return items


class HeldOutput:
    """A run of a step that holds on to all that the step returns, as the loop of a training does.

    Args:
        step: Returns a loss, or a container with one.
        loss_in: The loss in what it returns; ``None`` of a step that runs all its backwards itself.
        is_merged: Whether backward finds it merged with what other slices return, in its place.
        parts_of: What an object is merged by, or ``None`` of what is one piece.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        loss_in: Callable[[Any], torch.Tensor | None],
        *,
        is_merged: bool = False,
        parts_of: Parts = items_of,
    ) -> None:
        self._step = step
        self._loss_in = loss_in
        self._is_merged = is_merged
        self._parts_of = parts_of
        self._output: Any = None

    def __call__(self) -> torch.Tensor | None:
        """Runs the step, and returns its loss."""
        # The step before is over by now.
        self._output = None
        output = self._step()
        loss = self._loss_in(output)
        self._output = output
        return loss

    def end_forward(self) -> None:
        """The forward is over, after which outputs of slices are merged, and go."""
        if self._is_merged:
            self._output = None

    def end(self) -> None:
        """The step is over, and what it returned goes."""
        self._output = None

    def bytes_in(self, trace: MemoryTrace) -> tuple[int, int]:
        """Bytes of the storages that are held and came while ``trace`` watched, and of the tensors in them."""
        storages = {}
        tensors = 0
        # Attributes of tensors are theirs to refuse where a subclass has functions of its own.
        with DisableTorchFunctionSubclass():
            for tensor in _tensors_in(self._output, self._parts_of):
                # Others have no storage that could be looked for.
                if is_lazy(tensor) or tensor.layout is not torch.strided:
                    continue
                allocation = trace.allocation_of(tensor.untyped_storage())
                if allocation is not None:
                    # A view of a few rows holds all of them.
                    storages[id(allocation)] = allocation.num_bytes
                    tensors += tensor.nbytes
        return sum(storages.values()), tensors


def _tensors_in(output: Any, parts_of: Parts) -> Iterator[torch.Tensor]:
    """The tensors of nested containers, which may hold themselves, or be nested deeper than calls may be."""
    others = set[type]()  # that are no containers: of a long list of numbers only the first one is looked into
    met = set[int]()
    waiting = [output]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value
        # All that is met is held by the output, so no id is given to another one meanwhile.
        elif type(value) not in others and id(value) not in met:
            met.add(id(value))
            parts = parts_of(value)
            if parts is None:
                others.add(type(value))
            else:
                waiting += parts


def end_run(run: object) -> None:
    """The step that ``run`` ran is over."""
    if isinstance(run, HeldOutput):
        run.end()


def end_forward(run: object) -> None:
    """The forward that ``run`` ran is over."""
    if isinstance(run, HeldOutput):
        run.end_forward()
