"""The value that a metric has of one slice alone: for a step that calls metrics as functions, and waits for no other.

A metric that is called as a function gives its value of the batch, which all slices must be there for. Micro-batches
that wait for each other are all in memory at once, and spare none. So each gets the value of its own rows, by a copy of
the metric, and the user's metric is called once with all rows after the step. Whether that is what one device gives,
once logged values are merged, a rehearsal finds out.
"""

import copy
from collections import deque
from typing import Any

import torch
from torch import nn


class SliceMetrics:
    """Copies of metrics that are called with the rows of one slice; as many as are called at a time."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.device], deque[Any]] = {}
        self._originals: dict[int, nn.Module] = {}  # held, so that no other gets their ids

    def value(self, metric: Any, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``metric`` returns for these arguments, with the gradients that it gives."""
        self._originals[id(metric)] = metric
        # Replicas in threads share it, and a deque is appended to and popped from atomically.
        free = self._free.setdefault((id(metric), device), deque())
        try:
            own = free.pop()
        except IndexError:
            # One for every call that is under way; between calls they are used again.
            own = copy.deepcopy(metric).to(device)
            own.reset()
        try:
            return own(*args, **kwargs)
        finally:
            # Metrics may keep every row, and these copies outlive the step.
            own.reset()
            free.append(own)
