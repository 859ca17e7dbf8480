"""First stage: a batch becomes one slice per replica, cut along its batch dim by workload.

Legend: B rows in the batch, K replicas, n_i rows of replica i (n_1 + ... + n_K = B). The rules are those of MXNet's
DataParallelExecutorGroup (workload list, a batch dim per input, -1 means "give it whole to everybody").
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from lightning_dpx.errors import ConfigurationError, SliceError

PLAIN = (str, bytes, int, float, complex, bool, type(None))
BatchDim = int | Mapping[str, int]


class UncuttableBatch(SliceError):  # noqa: N818  no error where one device takes it whole
    """A batch that cannot be cut for certain; one device can do with it what it does.

    Args:
        reason: Why, as a sentence that names all inputs at fault.
        advice: What to do about it, in sentences.
        kind: What is the same for all batches with these faults, whatever their sizes.
    """

    def __init__(self, reason: str, advice: str, kind: Hashable) -> None:
        super().__init__(f"{reason} {advice}".rstrip())
        self.reason, self.advice, self.kind = reason, advice, kind


def parse_workload(workload: Any, num_replicas: int) -> tuple[float, ...]:
    """One positive share per replica.

    Raises:
        ConfigurationError: an unknown word, a wrong length, or an entry that is not a positive finite number.
    """
    if isinstance(workload, str):
        if workload not in ("even", "auto"):
            raise ConfigurationError(
                f"workload={workload!r} is not allowed; give 'even', 'auto' or one positive number per device, "
                f"for example workload={[1] * num_replicas}."
            )
        return (1.0,) * num_replicas
    check_workload(workload)
    shares = tuple(workload)
    if len(shares) != num_replicas:
        raise ConfigurationError(
            f"workload has {len(shares)} entries {list(shares)} for {num_replicas} devices; give one per device."
        )
    return tuple(float(share) for share in shares)


def check_workload(workload: object) -> None:
    """What can be said before the devices are known.

    Raises:
        ConfigurationError: an unknown word, or an entry that is not a positive finite number.
    """
    if workload in ("even", "auto"):
        return
    if isinstance(workload, str) or not isinstance(workload, Sequence):
        raise ConfigurationError(
            f"workload={workload!r} is not allowed; give 'even', 'auto' or one positive number per device."
        )
    for index, share in enumerate(workload):
        if isinstance(share, bool) or not isinstance(share, int | float) or not math.isfinite(share) or share <= 0:
            raise ConfigurationError(
                f"workload[{index}]={share!r} is not allowed; every entry must be a positive finite number."
            )


def check_batch_dim(batch_dim: object) -> None:
    """Refuses what :func:`slice_batch` would not understand, or would not notice.

    Raises:
        ConfigurationError: neither a dim nor {input path: dim}.
    """
    dims = batch_dim if isinstance(batch_dim, Mapping) else {"": batch_dim}
    if not all(isinstance(path, str) and type(dim) is int for path, dim in dims.items()):
        raise ConfigurationError(
            f"batch_dim={batch_dim!r} is not allowed; give an int, or {{'input path': int}}, for example {{'1': 0}}."
        )


def split_sizes(num_rows: int, workload: Sequence[float], usual_rows: int = 0) -> tuple[int, ...]:
    """Rows per replica, by largest remainder, with sum exactly ``num_rows``.

    A batch shorter than usual goes to fewer replicas: the first ones, as many as get at least half of their usual
    slice and not a single row where more are usual (batch norm fails on one sample).

    Args:
        num_rows: B, the rows of this batch.
        workload: K positive shares.
        usual_rows: Rows of a full batch; batches at least as long are full themselves.
    """
    usual_rows = max(usual_rows, num_rows)
    usual = [usual_rows * share / sum(workload) for share in workload]
    least = [max(rows / 2, min(2, math.floor(rows))) for rows in usual]
    for active in range(len(workload), 1, -1):
        sizes = _largest_remainder(num_rows, workload[:active])
        if all(size >= max(need, 1) for size, need in zip(sizes, least, strict=False)):
            return (*sizes, *(0,) * (len(workload) - active))
    return (num_rows, *(0,) * (len(workload) - 1))


def _largest_remainder(total: int, shares: Sequence[float]) -> list[int]:
    quotas = [total * share / sum(shares) for share in shares]
    sizes = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda i: sizes[i] - quotas[i])
    for index in by_remainder[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes


def batch_size(batch: Any, batch_dim: BatchDim = 0) -> int:
    """B: the common size of all inputs along their batch dims.

    Raises:
        SliceError: two inputs disagree (both are named), there are no rows, a dim is out of range, or nothing in
            the batch has a batch dim.
    """
    found: tuple[str, int] | None = None
    for path, size in _sized_inputs(batch, batch_dim):
        if found is None:
            found = path, size
        elif found[1] != size:
            raise UncuttableBatch(
                f"The batch has two batch sizes: {found[0]} has {found[1]} rows and {path} has {size}.",
                f"All inputs must agree; an input without a batch dim is given whole to every replica by "
                f"batch_dim={{{path!r}: -1}}.",
                ("sizes", path),
            )
    if found is None:
        raise UncuttableBatch(
            f"Nothing in the batch ({type(batch).__name__}) has a batch dim.",
            "Give tensors, lists of plain items, or containers of them.",
            "nothing",
        )
    return found[1]


def slice_batch(batch: Any, sizes: Sequence[int], batch_dim: BatchDim = 0) -> list[Any]:
    """K slices of ``batch``, each of the batch's own type; a replica with no rows gets ``None``.

    Args:
        batch: Nested tuples, lists, dicts, namedtuples, dataclasses and registered pytree nodes. Tensors are cut
            (views, no copy), and so are lists and tuples of B plain items; everything else is handed to each replica.
        sizes: K numbers of rows.
        batch_dim: One dim for all inputs, or ``{path: dim}`` with paths such as ``"0"`` or ``"image.mask"``.
    """
    slices = _cut(batch, "", list(sizes), sum(sizes), batch_dim)
    return [part if size else None for part, size in zip(slices, sizes, strict=True)]


def _dim_of(path: str, batch_dim: BatchDim) -> int:
    return batch_dim if isinstance(batch_dim, int) else batch_dim.get(path, 0)


def children_of(node: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container, or ``None`` for a leaf."""
    if isinstance(node, PackedSequence):
        raise UncuttableBatch(
            "A PackedSequence cannot be cut by rows; give the padded tensor and the lengths, and pack inside the step.",
            "",
            "packed",
        )
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, list | tuple):
        return [(str(index), value) for index, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    if type(node) in _pytree.SUPPORTED_NODES:
        children, _ = _pytree.SUPPORTED_NODES[type(node)].flatten_fn(node)
        return [(str(index), value) for index, value in enumerate(children)]
    return None


def check_paths(batch: Any, batch_dim: BatchDim) -> None:
    """Whether every path that ``batch_dim`` names is there.

    Raises:
        SliceError: one is not; names those that are.
    """
    if isinstance(batch_dim, Mapping) and (unknown := set(batch_dim) - set(_paths(batch))):
        known = ", ".join(repr(path) for path in _paths(batch)) or "no inputs"
        raise SliceError(f"batch_dim names {', '.join(map(repr, sorted(unknown)))}; the batch has {known}.")


def _paths(node: Any, path: str = "") -> Iterator[str]:
    """Of everything that may have a batch dim, containers included."""
    if path:
        yield path
    if not isinstance(node, torch.Tensor) and not _is_plain_list(node):
        for name, child in children_of(node) or ():
            yield from _paths(child, f"{path}.{name}" if path else name)


def _is_plain_list(node: Any) -> bool:
    return type(node) in (list, tuple) and bool(node) and all(isinstance(item, PLAIN) for item in node)


def _has_no_rows(node: Any) -> bool:
    """A list of whatever holds no tensor: strings, records, objects; one per row, if there are as many as rows."""
    return type(node) in (list, tuple) and bool(node) and not any(map(_holds_rows, node))


def _holds_rows(node: Any) -> bool:
    if isinstance(node, torch.Tensor | np.ndarray | PackedSequence):
        return True
    return any(_holds_rows(child) for _, child in children_of(node) or ())


def _sized_inputs(node: Any, batch_dim: BatchDim, path: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, torch.Tensor):
        dim = _dim_of(path, batch_dim)
        if dim == -1 or node.ndim == 0:
            return
        if node.layout != torch.strided or node.is_nested:
            raise UncuttableBatch(
                f"{path or 'The batch'} is a sparse or nested tensor, which cannot be cut by rows; give it whole to "
                f"every replica by batch_dim={{{path!r}: -1}}, or give dense tensors.",
                "",
                ("layout", path),
            )
        if not 0 <= dim < node.ndim:
            raise SliceError(
                f"batch_dim={dim} is out of range for {path or 'the batch'} of shape {tuple(node.shape)}; "
                f"allowed: 0 to {node.ndim - 1}, or -1 for an input without a batch dim."
            )
        yield path or "the batch", node.shape[dim]
    elif isinstance(node, np.ndarray) and node.ndim and _dim_of(path, batch_dim) != -1:
        yield path or "the batch", len(node)
    elif not _is_plain_list(node):
        for name, child in children_of(node) or ():
            yield from _sized_inputs(child, batch_dim, f"{path}.{name}" if path else name)
    elif not path:
        yield "the batch", len(node)


def _cut(node: Any, path: str, sizes: list[int], total: int, batch_dim: BatchDim) -> Sequence[Any]:
    """K parts of ``node``, also for replicas without rows."""
    if isinstance(node, torch.Tensor):
        dim = _dim_of(path, batch_dim)
        if dim == -1 or node.ndim == 0:
            return [_own(node) for _ in sizes]
        return [_own(part) for part in torch.split_with_sizes(node, sizes, dim)]
    if isinstance(node, np.ndarray) and node.ndim and _dim_of(path, batch_dim) != -1:
        return np.split(node, list(itertools.accumulate(sizes))[:-1])
    one_per_row = _has_no_rows(node) and len(node) == total and _dim_of(path, batch_dim) != -1
    if one_per_row and not any(_is_plain_list(child) and len(child) == total for child in node):  # not columns
        ends = list(itertools.accumulate(sizes))
        return [node[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    children = children_of(node)
    if children is None:
        return [node] * len(sizes)
    parts = [_cut(child, f"{path}.{name}" if path else name, sizes, total, batch_dim) for name, child in children]
    return [rebuild(node, [part[index] for part in parts]) for index in range(len(sizes))]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A replica's part, which it may write in place: views would share a version counter, and autograd complain."""
    return tensor if tensor.requires_grad else tensor.data  # the caller may want its gradient


def rebuild(node: Any, parts: Sequence[Any]) -> Any:
    """A container of ``node``'s type with other children, in ``node``'s order."""
    if isinstance(node, dict):
        fresh = dict(zip(node, parts, strict=True))
        return fresh if type(node) is dict else _like_mapping(node, fresh)
    if isinstance(node, Mapping):
        return type(node)(dict(zip(node, parts, strict=True)))  # type: ignore[call-arg]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*parts)
    if isinstance(node, list | tuple):
        return type(node)(parts)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        clone = copy.copy(node)
        for field, part in zip(dataclasses.fields(node), parts, strict=True):
            object.__setattr__(clone, field.name, part)  # frozen ones too, and without a second __post_init__
        return clone
    handler = _pytree.SUPPORTED_NODES[type(node)]
    _, context = handler.flatten_fn(node)
    return handler.unflatten_fn(list(parts), context)


def _like_mapping(node: dict[Any, Any], fresh: dict[Any, Any]) -> Any:
    """Keeps subclasses of dict, whose constructors may take anything, by refilling a shallow copy."""
    clone = node.copy()
    clone.update(fresh)
    return clone
