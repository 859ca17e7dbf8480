"""Losses of slices as one, where a step by hand gives them to hooks, closures and optimizers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dpx.replicas import weighted_mean
from lightning_dpx.step import TrainingStep
from lightning_dpx.torch_compat import pytree


class LossMerger:
    """Merges what each slice gives into what one device would give.

    Args:
        step: Knows whether losses are means or sums.
        device: Of what is merged.
    """

    def __init__(self, step: TrainingStep, device: torch.device) -> None:
        self._step = step
        self._device = device

    def merge(self, values: Sequence[Any], weights: Sequence[float]) -> Any:
        """Losses of slices as one: their mean by weight, their sum where weights are those of a sum."""
        tensors = [value.detach() for value in values if isinstance(value, Tensor)]
        if len(tensors) < len(values):
            # A number among tensors, or numbers alone: Python adds them as the step itself would.
            total = sum(value * weight for value, weight in zip(values, weights, strict=True))
            if self._step.adds_losses:
                return total
            return total / sum(weights)
        merged = weighted_mean(tensors, weights, self._device)
        # Each part of a sum weighs 1, so this is the mean of the parts so far.
        if self._step.adds_losses and len(weights) > 1:
            return merged * len(weights)
        return merged

    def merge_of_closures(self, losses: Sequence[Any], weights: Sequence[float]) -> Any:
        """What an optimizer gets for what the closures of all slices have returned; some may return ``None``."""
        pairs = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if loss is not None]
        if not pairs:
            return None
        # A slice whose closure gave nothing has no rows that count.
        values = [loss for loss, _ in pairs]
        # What is no loss cannot be merged; the first replica's stands for all, as for all that
        # a step rebinds.
        if not all(_is_number(value) for value in values):
            return values[0]
        return self.merge(values, [weight for _, weight in pairs])

    def merge_arguments(self, given: Sequence[Any], weights: Sequence[float]) -> Any:
        """The first replica's, but numbers that differ (losses) are merged as losses are."""
        flat = [pytree.tree_flatten(one) for one in given]
        # Arguments of another structure cannot be merged either.
        if len({len(leaves) for leaves, _ in flat}) > 1:
            return given[0]
        merged = []
        for column in zip(*(leaves for leaves, _ in flat), strict=True):
            # Of a scheduler that steps by a metric, say, each slice gives another loss.
            same = all(one is column[0] for one in column)
            is_loss = not same and all(_is_number(one) for one in column)
            if is_loss and len({_as_float(one) for one in column}) > 1:
                merged.append(self.merge(column, weights))
            else:
                merged.append(column[0])
        return pytree.tree_unflatten(merged, flat[0][1])


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    # Integers are indices and counts, which are no losses.
    return type(value) is float


def _as_float(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
