"""The inputs of a group's forward, by position and by name: one rule cuts both, and each replica gets its slice.

positional and named --> by name, "0" for the first --> slices --> on the replicas --> the module's arguments again
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_dpx.replicas import BatchSlice, map_leaves


def by_name(inputs: Sequence[Any], named_inputs: Mapping[str, Any]) -> dict[str, Any]:
    """All inputs under one name each: ``batch_dim`` names positional ones by their positions, as ``"0"``."""
    return {**{str(position): value for position, value in enumerate(inputs)}, **named_inputs}


def call_module(batch_slice: BatchSlice, num_positional: int) -> Any:
    """What the replica's module returns for its slice of inputs that :func:`by_name` has named."""
    # A copy, as the slice keeps its inputs for input_grads().
    batch = dict(batch_slice.batch)
    positional = [batch.pop(str(position)) for position in range(num_positional)]
    return batch_slice.replica.module(*positional, **batch)


def on_replica(batch_slice: BatchSlice, *, need_grads: bool) -> BatchSlice:
    """The slice with its inputs on the replica's device; floating-point tensors may ask for gradients there."""
    device = batch_slice.replica.device

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            # Packed sequences and graphs move themselves. Some do so in place, and one that is given whole is
            # every replica's.
            if _moves_itself(value):
                return copy.copy(value).to(device)
            return value
        # A leaf of its own for each replica, also where nothing has to move, so that gradients
        # of the inputs are those of the slice.
        moved = value.detach().to(device)
        if need_grads and moved.is_floating_point():
            moved.requires_grad_()
        return moved

    return BatchSlice(batch_slice.replica, batch_slice.num_rows, map_leaves(move, batch_slice.batch))


def gradients_by_input(slices: Sequence[BatchSlice]) -> list[list[Any]]:
    """Per input, the gradients that its slices have got, nested as the input."""
    found = []
    for name in slices[0].batch:
        found.append([map_leaves(_gradient_of, batch_slice.batch[name]) for batch_slice in slices])
    return found


def _moves_itself(value: Any) -> bool:
    """Whether ``value`` holds tensors, as far as one can say that knows nothing of its type."""
    return callable(getattr(value, "to", None)) and not isinstance(value, nn.Module | type)


def _gradient_of(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value.grad
    return None
