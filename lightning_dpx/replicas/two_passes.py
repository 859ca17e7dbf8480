"""Micro-batches whose gradients depend on the outputs of all: forward without a graph, and once more with one.

    first    slices --forward, nothing kept--> outputs of all rows --> the caller's loss --> its gradients
    second   slice --random numbers and buffers as in the first--forward--> graph --backward--> parameters' gradients
                +-- the next slice, when the graph of this one is gone

This is the gradient cache of Gao et al. 2021 (arXiv 2101.06983): what is held at once does not grow with the number of
slices, and costs a second forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_dpx.python_objects.preserve import GeneratorStates
from lightning_dpx.replicas.batch_slice import BatchSlice
from lightning_dpx.replicas.replica_set import ReplicaSet


class TwoPasses:
    """One step's passes over its slices.

    Args:
        replicas: Which run them.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._generators = replicas.traits.draws.generators
        self._states: dict[int, GeneratorStates] = {}
        # What the first pass makes of them is kept; the second must begin where that one began.
        self._buffers = [buffer.detach().clone() for buffer in replicas.root.buffers]

    def first(self, slices: Sequence[BatchSlice], call: Callable[[BatchSlice], Any]) -> list[Any]:
        """What ``call`` returns for every slice, without a graph."""

        def remembered(batch_slice: BatchSlice) -> Any:
            replica = batch_slice.replica
            self._states[replica.index] = GeneratorStates([replica.device], generators=self._generators)
            return call(batch_slice)

        # Nothing is kept: this is what makes the memory of one slice enough for all.
        with torch.no_grad():
            return self._replicas.run("forward", slices, remembered)

    def second(self, slices: Sequence[BatchSlice], call: Callable[[BatchSlice], None]) -> None:
        """Runs ``call``, a forward and its backward, on every slice, with the random numbers of the first pass.

        Random generators and buffers are afterwards what the first pass left.
        """
        root = self._replicas.root
        # The second pass draws all numbers again, which one device would have drawn once.
        states = GeneratorStates(self._replicas.devices, generators=self._generators)
        left = [buffer.detach().clone() for buffer in root.buffers]

        def again(batch_slice: BatchSlice) -> None:
            self._states[batch_slice.replica.index].restore()
            call(batch_slice)

        _write(root.buffers, self._buffers)
        self._replicas.state.synchronize()
        try:
            self._replicas.run("backward", slices, again)
        finally:
            _write(root.buffers, left)
            states.restore()


@torch.no_grad()
def _write(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
