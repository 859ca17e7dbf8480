"""The arithmetic behind the rules: several tensors, arrays or integers become one."""

from collections.abc import Sequence

import numpy as np
import torch

from lightning_dpx.replicas.merging.number_types import ADDED_IN
from lightning_dpx.replicas.merging.rules import Kind, Rule, Weights


def join(values: Sequence[torch.Tensor], rule: Rule) -> torch.Tensor:
    """The values one after the other, block by block."""
    if rule.blocks == 1:
        return torch.cat(list(values), rule.dim)
    # Two augmented views of a batch, one after the other: all slices' first blocks, then all their second ones.
    chunks = [value.chunk(rule.blocks, rule.dim) for value in values]
    in_order: list[torch.Tensor] = []
    for blocks in zip(*chunks, strict=True):
        in_order += blocks
    return torch.cat(in_order, rule.dim)


def join_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """Arrays of texts or objects one after the other; ``None`` where they differ in other dims than the first."""
    try:
        return np.concatenate(list(arrays))
    # Texts in columns, say, of which each slice has as many as its longest row; records of other fields.
    except (ValueError, TypeError):
        return None


def other_dims(value: torch.Tensor, dim: int) -> list[int]:
    """The sizes of all dims but one."""
    return [size for index, size in enumerate(value.shape) if index != dim]


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float], device: torch.device) -> torch.Tensor:
    """The mean of ``values`` (equal shapes) with ``weights``, on ``device``; one value is returned as it is."""
    if len(values) == 1:
        return values[0].to(device)
    total = float(sum(weights))
    # On the host, and where replicas share a device, all are there already.
    here = [value if value.device == device else value.to(device) for value in values]
    # Weights are divided before they multiply: the products are no larger than the values, so
    # that half precision does not overflow on the way.
    mean = here[0] * (weights[0] / total)
    for value, weight in zip(here[1:], weights[1:], strict=True):
        mean = torch.add(mean, value, alpha=weight / total)
    return mean


def mean_of_slices(values: Sequence[torch.Tensor], counts: Sequence[float], weights: Weights) -> torch.Tensor:
    """The mean of the slices' means of as many ``counts``, on the first one's device."""
    device = values[0].device
    counted = [index for index, count in enumerate(counts) if count]  # a mean over no tokens is NaN
    # No slice has any: rows are all that is known, and the mean is NaN as on one device.
    if not counted:
        return weighted_mean(values, weights.rows, device)
    return weighted_mean([values[i] for i in counted], [counts[i] for i in counted], device)


def reduce_integers(values: Sequence[int], kind: Kind) -> int | None:
    """One integer from several of any size; ``None`` where the kind is not exact for them."""
    if kind == "sum":
        return sum(values)
    if kind == "max":
        return max(values)
    if kind == "min":
        return min(values)
    if kind == "last":
        return values[-1]
    if kind == "first" or (kind == "equal" and len(set(values)) == 1):
        return values[0]
    return None


def reduce_numbers(values: Sequence[torch.Tensor], kind: Kind, weights: Weights) -> torch.Tensor | None:
    """One tensor from several of equal shapes on one device; ``None`` where the kind makes no sense for them."""
    first = values[0]
    if first.dtype in ADDED_IN:
        wide = [value.to(ADDED_IN[first.dtype]) for value in values]
        # Beyond 63 bits the signed number is negative, and smaller than all others.
        if kind in ("max", "min") and first.dtype == torch.uint64 and any(bool((one < 0).any()) for one in wide):
            return None
        reduced = reduce_numbers(wide, kind, weights)
        if reduced is None:
            return None
        return reduced.to(first.dtype)
    if kind in ("first", "last", "equal"):
        if kind == "last":
            return values[-1]
        return first
    # torch adds flags up to a flag, which counts nothing.
    if kind == "sum" and first.dtype != torch.bool:
        return _total(values)
    if kind in ("max", "min") and not first.is_complex():
        stacked = torch.stack(list(values))
        if kind == "max":
            return stacked.amax(0)
        return stacked.amin(0)
    if kind in ("mean", "loss mean") and (first.is_floating_point() or first.is_complex()):
        return mean_of_slices(values, weights.of(kind), weights)
    if kind == "quadratic mean" and first.is_floating_point():
        return weighted_mean([value.square() for value in values], weights.rows, first.device).sqrt()
    if kind == "geometric mean" and first.is_floating_point():
        return weighted_mean([value.log() for value in values], weights.of_loss, first.device).exp()
    return None


def _total(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
