"""What a step returns beside its loss is there until the step is over: its caller holds it."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.torch_compat import tree_leaves


class HeldOutput:
    """A run of a step that holds on to all that the step returns, as the loop of a training does.

    Args:
        step: Returns a loss, or a container with one.
        loss_in: The loss in what it returns; ``None`` of a step that runs all its backwards itself.
        is_merged: Whether backward finds it merged with what other slices return, in its place.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        loss_in: Callable[[Any], torch.Tensor | None],
        *,
        is_merged: bool = False,
    ) -> None:
        self._step = step
        self._loss_in = loss_in
        self._is_merged = is_merged
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
        for leaf in tree_leaves(self._output):
            # Others have no storage that could be looked for.
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                allocation = trace.allocation_of(leaf.untyped_storage())
                if allocation is not None:
                    # A view of a few rows holds all of them.
                    storages[id(allocation)] = allocation.num_bytes
                    tensors += leaf.nbytes
        return sum(storages.values()), tensors


def end_run(run: object) -> None:
    """The step that ``run`` ran is over."""
    if isinstance(run, HeldOutput):
        run.end()


def end_forward(run: object) -> None:
    """The forward that ``run`` ran is over."""
    if isinstance(run, HeldOutput):
        run.end_forward()
