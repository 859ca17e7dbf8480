"""Tensors and modules: what they are made of, whose memory they look at, what they check."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_dpx.torch_compat.names import has_storage, key_of


def is_view(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` looks at the memory of another one."""
    return tensor._is_view()


def adopt_backward_hooks_kind(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """The backward hooks of ``module`` are called as those of ``other``: as full ones, or as those of its last node."""
    module._is_full_backward_hook = other._is_full_backward_hook


def is_refused_by_modes(error: BaseException) -> bool:
    """Whether the constructor of a tensor subclass has raised, as it does under any dispatch mode.

    ``Subclass(tensor)`` makes a view, which is an operator; a mode gives it a Python object of another class.
    """
    return isinstance(error, RuntimeError) and "already associated to a python object" in str(error)


def write_tensor(target: torch.Tensor, value: torch.Tensor) -> None:
    """``target.copy_(value)``, also of an expanded tensor, which torch refuses to write as it repeats numbers."""
    if target.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if stride == 0 and size > 1:
                target = target.narrow(dim, 0, 1)
                value = value.narrow(dim, 0, 1)
    # Outside of its mode torch refuses to write a tensor of inference mode.
    with torch.inference_mode() if target.is_inference() else nullcontext():
        target.copy_(value)


def weak_storage(storage: torch.UntypedStorage) -> Any:
    """A reference that keeps no memory; :data:`free_weak_storage` ends it."""
    return storage._weak_ref()


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether another tensor than ``tensor`` holds its memory."""
    storage = tensor.untyped_storage()
    # Of the references one is ``tensor``, and one is the storage object that asking has made.
    return int(torch._C._storage_Use_Count(key_of(storage))) > 2


def on_tensors_of_tensors(types: Any) -> bool:
    """Whether an operator takes tensors that are made of others, such as jagged, distributed or quantized ones.

    They have no memory of their own. A dispatch mode leaves the operator to them: what they then do with the tensors
    that they hold comes to the mode again.
    """
    # Of an operator on plain tensors there are no types to look at.
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def with_memory_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory of their own that ``tensor`` is made of; itself, as a rule."""
    # Nearly all tensors are plain, and their type tells without a call.
    if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    found: list[torch.Tensor] = []
    # Not the shapes: of the outer tensor they tell nothing about the memory of the inner ones.
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        held = getattr(tensor, name)
        if isinstance(held, torch.Tensor):
            # One wrapper may hold another, such as a DTensor whose parts are quantized.
            found += with_memory_in(held)
    return found


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with a storage that ``tensor`` is made of: of a sparse one its indices and values."""
    if tensor.layout is torch.sparse_coo:
        # As they lie there: asking for them by their public names takes a coalesced one.
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return list(filter(has_storage, with_memory_in(tensor)))


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """What their elements take, of sparse ones those that are there; a storage may hold more, or be shared."""
    return sum(part.nbytes for tensor in tensors for part in stored_parts(tensor))


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Makes ``tensor`` one that ``isinstance`` takes for a parameter, as ``nn.Parameter`` does with subclasses."""
    # `nn.Parameter` asks for this attribute when it is asked whether a tensor is one.
    tensor._is_param = True  # type: ignore[attr-defined]


def check_input_dim(norm: AnyBatchNorm, values: torch.Tensor) -> None:
    """A batch norm's own check of its input.

    Raises:
        ValueError: it has another number of dimensions than this kind of batch norm takes.
    """
    norm._check_input_dim(values)  # type: ignore[no-untyped-call]


def flatten_dense(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat copy of all elements, in order."""
    flat: torch.Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def unflatten_dense(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of the one-dimensional ``flat`` with the shapes of ``like``, in order."""
    views: Sequence[torch.Tensor] = _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    return views
