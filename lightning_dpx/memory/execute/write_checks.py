"""Tensors that backward needs and that were written to in place are refused, as autograd refuses them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from lightning_dpx.torch_compat import (
    version_counter,
)

if TYPE_CHECKING:
    from lightning_dpx.memory.execute.values import Value


def refuse_changed(value: "Value") -> NoReturn:
    """A value was written to, as autograd refuses it.

    Raises:
        RuntimeError: always; names the value, its operator and both versions.
    """
    # Of a value that was dropped only the counter is left, which shares the version of its tensor.
    tensor = value.held() if value.counter is None else value.counter
    size = tensor.size() if value.identity is None else value.identity.size
    refuse(tensor, value.version, value.name or "a parameter", size, value.operator)


def refuse(
    tensor: torch.Tensor, version: int, name: str, size: Sequence[int] | None = None, operator: str = ""
) -> NoReturn:
    """A tensor was written to that is no value, as autograd refuses it.

    Raises:
        RuntimeError: always.
    """
    made_by = f", the output of {operator}," if operator else ""
    shape = list(tensor.shape) if size is None else list(size)
    raise RuntimeError(
        "One of the variables needed for gradient computation has been modified by an inplace operation. A tensor that "
        f"backward needs was changed in place: {name} of shape {shape}{made_by} "
        f"has version {version_counter(tensor)} instead of {version}."
    )
