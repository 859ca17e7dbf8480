"""Results of replicas become one by the types of their values, where no rehearsal has found a rule."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from lightning_dpx.devices import device_beside
from lightning_dpx.errors import GatherError
from lightning_dpx.replicas.containers import PLAIN, children_of, members_of, rebuild
from lightning_dpx.replicas.merging.equality import is_equal_object
from lightning_dpx.replicas.merging.number_types import ADDED_IN, NUMBERS, as_tensor, is_numeric, like
from lightning_dpx.replicas.merging.reductions import join_arrays, reduce_numbers
from lightning_dpx.replicas.merging.rules import Weights
from lightning_dpx.replicas.output_dims import OutputDims

_RESULT = "result"  # where the paths of values begin


def gather(
    results: Sequence[Any],
    sizes: Sequence[float],
    device: torch.device,
    dim: int | OutputDims = 0,
) -> Any:
    """Merges one result per active replica by the types of its values.

    Tensors whose size along ``dim`` is the replica's
    number of rows are concatenated; other floating-point tensors and floats are averaged with the rows as weights;
    integers that differ are counts and are summed; lists of as many items as rows are joined; equal values stay.
    Replicas that returned ``None`` contribute nothing.

    Args:
        results: One nested result per active replica.
        sizes: Rows of each of them, all positive.
        device: Where the merged tensors shall live.
        dim: The batch dim of all results, or the dims of outputs by path: one that differs between replicas, and has
            its rows along another dim than the one that is named, is refused then instead of averaged.

    Raises:
        GatherError: the replicas returned different structures, or different values that have no merge.
    """
    # A replica that returns nothing had nothing to say of its rows: they count neither as zeros nor as rows.
    present: list[Any] = []
    counts: list[float] = []
    for result, size in zip(results, sizes, strict=True):
        if result is not None:
            present.append(result)
            counts.append(size)
    if not present:
        return None
    return merge_by_type(present, counts, device, dim, _RESULT)


def merge_by_reduction(parts: Sequence[Any], weights: Weights, device: torch.device, reduce_fx: str, path: str) -> Any:
    """A logged value of which only the reduction over batches is known.

    Raises:
        GatherError: no numbers, or complex ones that have no order; names the key.
    """
    if isinstance(parts[0], Mapping) and all(part.keys() == parts[0].keys() for part in parts):
        merged_items = {}
        for key in parts[0]:
            of_slices = [part[key] for part in parts]
            inner = f"{path}.{key}"
            merged_items[key] = merge_by_reduction(of_slices, weights, device, reduce_fx, inner)
        return merged_items
    if not all(map(is_numeric, parts)):
        names = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise GatherError(
            f"self.log({path!r}, ...) got {names} from the replicas; give a number, a tensor or a metric."
        )
    kind = reduce_fx if reduce_fx in ("sum", "min", "max") else "mean"
    plain = all(isinstance(part, NUMBERS) for part in parts)
    # What is the same on all slices (a learning rate, a flag) keeps its type and all digits.
    if plain and kind == "mean" and all(part == parts[0] for part in parts):
        return parts[0]
    # Numbers of Python keep their digits; tensors are not handed to the host.
    to_tensor: Callable[[Any], torch.Tensor] = as_tensor if plain else partial(torch.as_tensor, device=device)
    tensors = list(map(to_tensor, parts))
    # In float32 at least: a sum of many rows in half precision would overflow.
    if not plain or kind == "mean":
        tensors = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    elif kind == "sum" and tensors[0].dtype == torch.bool:
        tensors = [tensor.long() for tensor in tensors]  # flags add up to a flag: any of them
    merged = reduce_numbers(tensors, kind, weights)  # type: ignore[arg-type]
    if merged is None:
        raise GatherError(
            f"self.log({path!r}, ..., reduce_fx={reduce_fx!r}) got numbers of {tensors[0].dtype} from the replicas, "
            "which have no such reduction; log their real numbers."
        )
    if not plain:
        return merged
    # A mean of integers is no integer; sums and extremes keep the type that the user logged.
    if kind == "mean":
        return merged.item()
    return like(merged, parts[0])


def merge_by_type(parts: list[Any], sizes: list[float], device: torch.device, dim: int | OutputDims, path: str) -> Any:
    """One value from those of replicas that all returned something; see :func:`gather`.

    Args:
        parts: The values.
        sizes: Rows of each replica.
        device: Where merged tensors shall live.
        dim: The batch dim, or that of each value.
        path: Where the value is, for errors.

    Raises:
        GatherError: they have no merge.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        names = ", ".join(type(part).__name__ for part in parts)
        raise GatherError(f"The replicas returned different types for {path}: {names}; all must return the same.")
    if isinstance(first, torch.Tensor):
        return _merge_tensors(parts, sizes, device, dim, path)
    if isinstance(first, np.ndarray | np.generic):
        return _merge_arrays(parts, sizes, device, dim, path)
    # Only texts and numbers, one for each row, are rows for certain: a list of tensors of that length may be columns.
    if type(first) in (list, tuple) and all(map(_has_plain_rows, parts, sizes)):
        return type(first)(chain.from_iterable(parts))
    if isinstance(first, torch.device):
        return device  # where tensors come together, a setting of it does as well
    children = [children_of(part) for part in parts]
    # An object that all replicas share, or that is alike on all, stays as it is, as numbers and texts do.
    if children[0] is None and not is_equal_object(first, parts[1:]):
        children = [members_of(part) for part in parts]
    if all(of_part is not None for of_part in children):
        return _merge_children(parts, children, sizes, device, dim, path)
    return _merge_plain(parts, sizes, path)


def _has_plain_rows(part: Any, num_rows: float) -> bool:
    return len(part) == num_rows and all(isinstance(item, PLAIN) for item in part)


def _merge_children(
    parts: list[Any], children: list[Any], sizes: list[float], device: torch.device, dim: int | OutputDims, path: str
) -> Any:
    names = []
    for part in children:
        names.append([name for name, _ in part])
    if isinstance(parts[0], Mapping):
        if any(set(other) != set(names[0]) for other in names[1:]):
            raise GatherError(f"The replicas returned different keys for {path}: {' and '.join(map(str, names))}.")
        # The order of keys may differ; that of the first replica is the result's.
        in_order = []
        for part in children:
            by_name = dict(part)
            in_order.append([(name, by_name[name]) for name in names[0]])
        children = in_order
    elif any(other != names[0] for other in names[1:]):
        lengths = ", ".join(str(len(other)) for other in names)
        raise GatherError(f"The replicas returned different lengths for {path}: {lengths}; all must be equal.")
    merged = []
    for index, name in enumerate(names[0]):
        merged.append(merge_by_type([part[index][1] for part in children], sizes, device, dim, f"{path}.{name}"))
    return rebuild(parts[0], merged)


def _merge_tensors(
    parts: list[torch.Tensor], sizes: list[float], device: torch.device, dims: int | OutputDims, path: str
) -> Any:
    device = device_beside(parts[0], device, device)
    if len(parts) == 1:
        return parts[0].to(device)
    if isinstance(dims, OutputDims):
        inner = path.removeprefix(_RESULT).removeprefix(".")
        # Said to be the same on all replicas, as MXNet has it of outputs without a batch axis.
        if dims.is_whole(inner):
            return parts[0].to(device)
        dim = dims.of(inner)
    else:
        dim = dims
    # Outputs often have their rows along dim 0 though inputs have them elsewhere (T x N in, N classes out).
    for candidate in dict.fromkeys((dim, 0)):
        has_rows = all(_has_rows_along(candidate, part, rows) for part, rows in zip(parts, sizes, strict=True))
        if has_rows and len({part.movedim(candidate, 0).shape[1:] for part in parts}) == 1:
            return torch.cat([part.to(device) for part in parts], candidate)
    moved = [part.to(device) for part in parts]
    if isinstance(dims, OutputDims):
        _check_has_no_rows(moved, sizes, dim, path)
    if any(part.shape != parts[0].shape for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise GatherError(
            f"The replicas returned tensors of shapes {shapes} for {path}; either one row per sample along dim {dim} "
            "or the same shape everywhere is required."
        )
    weights = Weights(rows=sizes, of_loss=sizes)
    if parts[0].is_floating_point() or parts[0].is_complex():
        return reduce_numbers(moved, "mean", weights)
    # Integers that agree are a setting, such as a number of classes; those that differ are counts, and add up.
    if all(torch.equal(part, moved[0]) for part in moved[1:]):
        return moved[0]
    if parts[0].dtype in ADDED_IN:
        return reduce_numbers(moved, "sum", weights)
    return torch.stack(moved).sum(0)


def _check_has_no_rows(parts: list[torch.Tensor], sizes: list[float], dim: int, path: str) -> None:
    """Whether what is to be averaged may be rows along another dim: states of an LSTM are (layers, rows, width).

    Raises:
        GatherError: it may be, and nobody has said which.
    """
    alike = [
        other
        for other in range(parts[0].ndim)
        if all(_has_rows_along(other, part, rows) for part, rows in zip(parts, sizes, strict=True))
    ]
    if not alike or all(torch.equal(part, parts[0]) for part in parts[1:]):
        return
    inner = path.removeprefix(_RESULT)
    # A lone output has no path for which -1 would be taken.
    without_rows = "-1 for what has no rows and is the same on all replicas" if inner else "read outputs()"
    raise GatherError(
        f"The replicas returned tensors of shapes {', '.join(str(tuple(part.shape)) for part in parts)} for {path}: "
        f"no rows along dim {dim}, and along dim {alike[0]} as many as each replica has. Say which it is: "
        f'batch_dim={{"output{inner}": {alike[0]}}}, or {without_rows}.'
    )


def _has_rows_along(dim: int, tensor: torch.Tensor, num_rows: float) -> bool:
    return tensor.ndim > dim and tensor.shape[dim] == num_rows


def _merge_arrays(parts: list[Any], sizes: list[float], device: torch.device, dim: int | OutputDims, path: str) -> Any:
    """Arrays and scalars of NumPy as tensors would be; text and objects are joined if they are rows."""
    if all(map(is_numeric, parts)):
        merged = _merge_tensors([as_tensor(part) for part in parts], sizes, torch.device("cpu"), dim, path)
        return like(merged, parts[0])
    if all(np.ndim(part) and len(part) == size for part, size in zip(parts, sizes, strict=True)):
        joined = join_arrays(parts)
        if joined is not None:
            return joined
    if all(np.array_equal(part, parts[0]) for part in parts):
        return parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise GatherError(f"The replicas returned arrays of shapes {shapes} for {path}, whose rows must be alike.")
    raise GatherError(f"The replicas returned different arrays for {path}, which are no numbers; give lists instead.")


def _merge_plain(parts: list[Any], sizes: list[float], path: str) -> Any:
    if is_equal_object(parts[0], parts[1:]):
        return parts[0]
    if isinstance(parts[0], float):
        return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
    # Integers that differ are counts, as among tensors.
    if isinstance(parts[0], int) and not isinstance(parts[0], bool):
        return sum(parts)
    raise GatherError(f"The replicas returned different values for {path}: {parts}; there is no way to merge them.")
