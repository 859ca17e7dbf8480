"""Numbers of Python, NumPy and torch: what counts as one, as a tensor, and back in its own type."""

import math
from typing import Any

import numpy as np
import torch

NUMBERS = (bool, int, float, np.generic)
# Numbers of NumPy that torch has none for.
_WIDEST = {
    np.dtype(np.longdouble): np.dtype(np.float64),
    np.dtype(np.clongdouble): np.dtype(np.complex128),
}
# What torch stores but does not add, and what it does so in; the bits of a sum of unsigned numbers are the same.
ADDED_IN = {
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


def is_numeric(value: Any) -> bool:
    """Whether ``value`` is a number or a dense array of numbers."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_nested
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, bool | int | float)


def as_tensor(value: Any) -> torch.Tensor:
    """Numbers of any kind as a tensor on the host; floats of Python keep their precision."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        # torch takes arrays of this machine's byte order alone, and no numbers of more than 64 bits.
        known = _WIDEST.get(array.dtype, array.dtype.newbyteorder("="))
        return torch.as_tensor(array.astype(known, copy=True))
    if is_large_integer(value):
        try:
            value = float(value)
        except OverflowError:
            value = math.copysign(math.inf, value)
    # torch would make float32 of a Python float, and lose half of its digits.
    dtype = torch.float64 if isinstance(value, float) else None
    return torch.tensor(value, dtype=dtype)


def is_large_integer(value: Any) -> bool:
    """Whether ``value`` is an integer of Python that no tensor can hold."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def like(merged: torch.Tensor, first: Any) -> Any:
    """A number, or an array of NumPy, of the kind that the slices gave."""
    if isinstance(first, np.ndarray):
        return merged.numpy().astype(first.dtype, copy=False)
    if isinstance(first, np.generic):
        return first.dtype.type(merged.item())
    # A float keeps its digits; a bool or an int is made from the number that the tensor has.
    if isinstance(first, float):
        return merged.item()
    return type(first)(merged.item())


def is_nonzero(value: Any) -> bool:
    """Whether it is a number, or numbers, not all of which are zero."""
    return is_numeric(value) and bool(as_tensor(value).bool().any())
