"""Every private name of torch that the package uses, in one place."""

from collections.abc import Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def flatten_dense(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat copy of all elements, in order."""
    flat: torch.Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def unflatten_dense(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of the one-dimensional ``flat`` with the shapes of ``like``, in order."""
    views: Sequence[torch.Tensor] = _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    return views
