"""Last stage of a forward: the results of the replicas become the result of one device, in sample order."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.replicas.slicing import PLAIN, children_of, rebuild


def gather(results: Sequence[Any], sizes: Sequence[int], device: torch.device, dim: int = 0) -> Any:
    """Merges one result per active replica.

    Tensors whose size along ``dim`` is the replica's number of rows are concatenated; other floating-point tensors
    and floats are averaged with the rows as weights; integers that differ are counts and are summed; lists of as many
    items as rows are joined; equal values stay. Replicas that returned ``None`` contribute nothing.

    Args:
        results: One nested result per active replica.
        sizes: Rows of each of them, all positive.
        device: Where the merged tensors shall live.
        dim: The batch dim of the results.

    Raises:
        GatherError: the replicas returned different structures, or different values that have no merge.
    """
    present = [(result, size) for result, size in zip(results, sizes, strict=True) if result is not None]
    if not present:
        return None
    return _merge([result for result, _ in present], [size for _, size in present], device, dim, "result")


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float], device: torch.device) -> torch.Tensor:
    """The mean of ``values`` (equal shapes) with ``weights``, on ``device``; one value is returned as it is."""
    if len(values) == 1:
        return values[0].to(device)
    total = float(sum(weights))
    mean = values[0].to(device) * (weights[0] / total)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        mean = torch.add(mean, value.to(device), alpha=weight / total)
    return mean


def _merge(parts: list[Any], sizes: list[int], device: torch.device, dim: int, path: str) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        names = ", ".join(type(part).__name__ for part in parts)
        raise GatherError(f"The replicas returned different types for {path}: {names}; all must return the same.")
    if isinstance(first, torch.Tensor):
        return _merge_tensors(parts, sizes, device, dim, path)
    if type(first) in (list, tuple) and all(
        _has_plain_rows(part, size) for part, size in zip(parts, sizes, strict=True)
    ):
        return type(first)(item for part in parts for item in part)
    children = [children_of(part) for part in parts]
    if children[0] is not None:
        return _merge_children(parts, children, sizes, device, dim, path)
    return _merge_plain(parts, sizes, path)


def _has_plain_rows(part: Any, num_rows: int) -> bool:
    return len(part) == num_rows and all(isinstance(item, PLAIN) for item in part)


def _merge_children(
    parts: list[Any], children: list[Any], sizes: list[int], device: torch.device, dim: int, path: str
) -> Any:
    names = [[name for name, _ in part] for part in children]
    if isinstance(parts[0], Mapping):
        if any(set(other) != set(names[0]) for other in names[1:]):
            raise GatherError(f"The replicas returned different keys for {path}: {' and '.join(map(str, names))}.")
        children = [sorted(part, key=lambda item: names[0].index(item[0])) for part in children]
    elif any(other != names[0] for other in names[1:]):
        lengths = ", ".join(str(len(other)) for other in names)
        raise GatherError(f"The replicas returned different lengths for {path}: {lengths}; all must be equal.")
    merged = []
    for index, name in enumerate(names[0]):
        merged.append(_merge([part[index][1] for part in children], sizes, device, dim, f"{path}.{name}"))
    return rebuild(parts[0], merged)


def _merge_tensors(parts: list[torch.Tensor], sizes: list[int], device: torch.device, dim: int, path: str) -> Any:
    if len(parts) == 1:
        return parts[0].to(device)
    for candidate in dict.fromkeys((dim, 0)):
        if all(
            part.ndim > candidate and part.shape[candidate] == rows for part, rows in zip(parts, sizes, strict=True)
        ):
            return torch.cat([part.to(device) for part in parts], candidate)
    if any(part.shape != parts[0].shape for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise GatherError(
            f"The replicas returned tensors of shapes {shapes} for {path}; either one row per sample along dim {dim} "
            "or the same shape everywhere is required."
        )
    if parts[0].is_floating_point() or parts[0].is_complex():
        return weighted_mean(parts, sizes, device)
    moved = [part.to(device) for part in parts]
    return moved[0] if all(torch.equal(part, moved[0]) for part in moved[1:]) else torch.stack(moved).sum(0)


def _merge_plain(parts: list[Any], sizes: list[int], path: str) -> Any:
    if all(part is parts[0] or bool(part == parts[0]) for part in parts[1:]):
        return parts[0]
    if isinstance(parts[0], float):
        return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
    if isinstance(parts[0], int) and not isinstance(parts[0], bool):
        return sum(parts)
    raise GatherError(f"The replicas returned different values for {path}: {parts}; there is no way to merge them.")
