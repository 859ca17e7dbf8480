"""Cuts what has dims: tensors of every class and layout, NumPy arrays and tensordicts, each with public API of its own.

Slices keep the class and the attributes of what they are slices of, as indexing does in the library that made it.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_dpx.errors import SliceError
from lightning_dpx.torch_compat import DisableTorchFunctionSubclass

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
# Jagged tensors fit together only while they share the very tensor of offsets, and so must their slices.
_offsets_of_slices: Any = WeakTensorKeyDictionary()


def is_array(node: Any) -> bool:
    """Whether ``node`` has a size along a dim: a tensor, an array or a tensordict, but none without dims."""
    if isinstance(node, torch.Tensor | np.ndarray):
        return node.ndim > 0
    return _is_tensordict(node) and len(node.batch_size) > 0


def shape_of(array: Any) -> tuple[Any, ...]:
    """The sizes of what :func:`is_array` holds true of; those of a nested tensor that differ are no numbers."""
    if isinstance(array, torch.Tensor):
        if array.is_nested and array.layout == torch.strided:
            return (array.size(0), *("j",) * (array.ndim - 1))
        return tuple(size if isinstance(size, int) else "j" for size in array.shape)
    return tuple(array.shape if isinstance(array, np.ndarray) else array.batch_size)


def shape_of_row(array: Any, dim: int) -> tuple[Any, ...]:
    """The sizes of one of the rows that are counted along ``dim``."""
    shape = shape_of(array)
    return (*shape[:dim], *shape[dim + 1 :])


def cut_array(array: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    """Slices of ``array`` with ``sizes`` rows along ``dim``; views, where the layout allows it.

    Raises:
        SliceError: a layout that cannot be cut along ``dim``.
    """
    if type(array) in _PLAIN_TENSORS and array.layout == torch.strided and not array.is_nested:
        # The usual input, cut by one call for all slices.
        parts = [_own(part) for part in torch.split_with_sizes(array, list(sizes), dim)]
        if array.__dict__:
            return [_with_attributes(part, array) for part in parts]
        return parts
    if isinstance(array, torch.Tensor):
        if array.is_nested:
            return _cut_nested(array, sizes, dim)
        if array.layout != torch.strided:
            return _cut_sparse(array, sizes, dim)
        return [_cut_subclass(array, start, stop, dim) for start, stop in spans(sizes)]
    if isinstance(array, np.ndarray):
        return [array[(*(slice(None),) * dim, slice(start, stop))] for start, stop in spans(sizes)]
    # What is left is a tensordict.
    parts = array.split(list(sizes), dim)
    if array.requires_grad:
        return list(parts)
    return [part.data for part in parts]


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each slice starts and stops."""
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A slice that its replica may write in place: views share a version counter, and autograd would complain."""
    # the caller may want its gradient
    if tensor.requires_grad:
        return tensor
    return tensor.data


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy without history on ``device``, of the class and with the attributes of ``tensor``."""
    is_other = (
        isinstance(tensor, nn.Parameter) or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )
    # Parameters are made anew by those who copy them, and a class with operators of its own knows how it is copied.
    if type(tensor) is torch.Tensor or is_other:
        copied = tensor.detach().to(device, copy=True)
        if is_other:
            return copied
        return _with_attributes_on(device, copied, tensor)
    # Past the methods of the class: its own ``to`` may look for attributes that ``detach`` has left behind.
    with DisableTorchFunctionSubclass():
        data = tensor.as_subclass(torch.Tensor).detach().to(device, copy=True)
        return _with_attributes_on(device, data.as_subclass(type(tensor)), tensor)


def _with_attributes_on(device: torch.device, copied: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``copied``, with the attributes of ``source``; tensors among these are copied as well."""
    for name, value in source.__dict__.items():
        # A parameter has a counterpart on every replica, which is not known here.
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            value = value.detach().to(device, copy=True)
        copied.__dict__.setdefault(name, value)
    return copied


def _with_attributes(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    for name, value in whole.__dict__.items():
        part.__dict__.setdefault(name, value)
    return part


def _cut_subclass(tensor: torch.Tensor, start: int, stop: int, dim: int) -> torch.Tensor:
    """A slice made by indexing, where libraries keep their own records of the rows in step."""
    index = (*(slice(None),) * dim, slice(start, stop))
    indexed: torch.Tensor = tensor[index if dim else slice(start, stop)]  # MONAI looks at a plain slice only
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return indexed  # its memory is elsewhere, so it knows alone how it is cut
    with DisableTorchFunctionSubclass():
        data = _own(tensor.as_subclass(torch.Tensor)[index])
        part = data.as_subclass(type(tensor))  # torchvision returns plain tensors
    return _with_attributes(_with_attributes(part, indexed), tensor)


def _cut_nested(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
    if dim != 0:
        raise SliceError(f"a nested tensor has its rows along dim 0, not {dim}")
    # Rows with gaps between them are no piece of the values: they are taken out one by one.
    if tensor.layout != torch.jagged or tensor.lengths() is not None:  # type: ignore[attr-defined]
        rows = tensor.unbind()
        return [torch.nested.as_nested_tensor(list(rows[a:b]), layout=tensor.layout) for a, b in spans(sizes)]
    offsets = tensor.offsets()  # type: ignore[attr-defined]
    values = tensor.values()
    jagged_dim = next(index for index, size in enumerate(tensor.shape) if index and not isinstance(size, int))
    parts = []
    for (start, stop), part_offsets in zip(spans(sizes), _cut_offsets(offsets, tuple(sizes)), strict=True):
        first = int(offsets[start])
        last = int(offsets[stop])
        rows_of_part = _own(values.narrow(jagged_dim - 1, first, last - first))
        parts.append(torch.nested.nested_tensor_from_jagged(rows_of_part, part_offsets, jagged_dim=jagged_dim))
    return parts


def _cut_offsets(offsets: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    known: dict[tuple[int, ...], list[torch.Tensor]] = _offsets_of_slices.get(offsets, {})
    if sizes not in known:
        known.clear()  # those of the last batch with these offsets are enough
        known[sizes] = [offsets[start : stop + 1] - offsets[start] for start, stop in spans(sizes)]
        _offsets_of_slices[offsets] = known
    return known[sizes]


def _cut_sparse(tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        # COO tensors cannot be cut by slices, but their rows can be selected.
        rows = torch.arange(sum(sizes), device=tensor.device)
        return [tensor.index_select(dim, rows[start:stop]) for start, stop in spans(sizes)]
    if dim == 0 and tensor.layout == torch.sparse_csc and tensor.ndim == 2:
        return [part.to_sparse_csc() for part in _cut_csr(tensor.to_sparse_csr(), sizes)]
    if dim == 0 and tensor.layout == torch.sparse_csr and tensor.ndim == 2:
        return _cut_csr(tensor, sizes)
    raise SliceError(f"a tensor of layout {tensor.layout} with {tensor.ndim} dims cannot be cut along dim {dim}")


def _cut_csr(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    starts = tensor.crow_indices()
    columns = tensor.col_indices()
    values = tensor.values()
    parts = []
    for start, stop in spans(sizes):
        first = int(starts[start])
        last = int(starts[stop])
        shape = (stop - start, *tensor.shape[1:])
        # Rows lie one after the other; in a slice they are counted from its own beginning.
        row_starts = starts[start : stop + 1] - starts[start]
        parts.append(
            torch.sparse_csr_tensor(row_starts, columns[first:last], values[first:last], shape, check_invariants=False)
        )
    return parts


def _is_tensordict(node: Any) -> bool:
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and bool(tensordict.is_tensor_collection(node))
