"""How far two computations of one value may be apart when only the order of additions differs."""

import math
from dataclasses import dataclass

import torch

# A sum of n numbers in another order differs by about sqrt(n) roundings; a step chains a few such sums.
_ROUNDINGS_PER_SUM = 16
# Beyond this power of the precision a difference is none of rounding, however many numbers were added.
_LARGEST_SHARE_OF_DIGITS = 0.5
_FACTOR_OF_LARGEST = 3.0
# What cancels out in a value came from numbers of the size of its neighbors; so much of theirs counts for its scale.
_SHARE_OF_NEIGHBORS = 0.01
_PIECE = 2**16  # numbers that are compared at a time


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative difference that rounding explains.

    Attributes:
        relative: Relative to the largest magnitude of what is compared.
        of_neighbors: Relative to the largest magnitude among its neighbors: what cancels out in a value carries some
            roundings of numbers of their size, however few were added.
    """

    relative: float
    of_neighbors: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype, additions: int) -> "Tolerance":
        """For values computed in ``dtype`` from sums of ``additions`` numbers.

        16 eps sqrt(n): each of a few chained sums of n numbers differs by about sqrt(n) roundings of eps when their
        order changes; never more than 3 sqrt(eps), half of the digits.
        """
        eps = torch.finfo(dtype).eps
        explained = _ROUNDINGS_PER_SUM * eps * math.sqrt(max(additions, 1))
        relative = min(explained, _FACTOR_OF_LARGEST * eps**_LARGEST_SHARE_OF_DIGITS)
        return cls(relative, min(_ROUNDINGS_PER_SUM * eps, relative))


def difference(
    one: torch.Tensor, two: torch.Tensor, tolerance: Tolerance, scale: float = 0.0, terms: float = 0.0
) -> float:
    """The largest difference of two tensors, relative to the largest magnitude in them; infinity for other shapes.

    Integers and booleans differ or do not: 0 or infinity. Where both are NaN, or the same infinity, they are equal.

    Args:
        one: Any shape, on the host.
        two: The other tensor, of the same shape, on the host.
        tolerance: Differences of numbers this small beside ``scale`` are none.
        scale: The largest magnitude among neighbors, such as the other gradients of a step.
        terms: The largest magnitude among what was added up: of two numbers that cancel out, their roundings are left.
    """
    if one.shape != two.shape:
        return math.inf
    if one.numel() == 0:
        return 0.0
    # Most of what is compared is equal, and large buffers are constants: no wide copies are made of these.
    if one.dtype == two.dtype and _is_compared(one) and _is_compared(two) and torch.equal(one, two):
        return 0.0
    # Whole numbers have no roundings.
    if not (one.is_floating_point() or one.is_complex()) and not (two.is_floating_point() or two.is_complex()):
        if torch.equal(one.to(torch.int64), two.to(torch.int64)):
            return 0.0
        return math.inf
    apart, largest = _apart_and_largest(one.detach(), two.detach())
    # Times the tolerance this is ``of_neighbors``: so much of the neighbors' size is rounding.
    share = max(_SHARE_OF_NEIGHBORS, tolerance.of_neighbors / tolerance.relative)
    largest = max(largest, terms) + share * scale
    # All are zero: nothing is divided by that.
    smallest = torch.finfo(torch.float32).tiny * tolerance.relative
    return apart / max(largest, smallest)


def _apart_and_largest(one: torch.Tensor, two: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two tensors, and the largest finite magnitude in them.

    They are taken piece by piece: wide copies of a whole gradient would not stay in the processor's caches.
    """
    if one.layout != torch.strided or two.layout != torch.strided:
        return _of_piece(one, two)
    apart = 0.0
    largest = 0.0
    # Views, unless a tensor is not contiguous: gradients are, as a rule.
    pieces = torch.split(one.reshape(-1), _PIECE)
    others = torch.split(two.reshape(-1), _PIECE)
    for mine, theirs in zip(pieces, others, strict=True):
        difference_here, largest_here = _of_piece(mine, theirs)
        apart = max(apart, difference_here)
        largest = max(largest, largest_here)
    return apart, largest


def _of_piece(one: torch.Tensor, two: torch.Tensor) -> tuple[float, float]:
    wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    mine = one.to(wide)
    theirs = two.to(wide)
    if mine.layout == theirs.layout == torch.strided:
        apart = float((mine - theirs).abs().max())
        # Then all numbers are finite, as is the rule, and need no masks.
        if math.isfinite(apart):
            return apart, max(float(mine.abs().max()), float(theirs.abs().max()))
    # NaN differs from itself, and infinity less infinity is no number.
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    finite = torch.cat([mine[mine.isfinite()].abs(), theirs[theirs.isfinite()].abs()])
    largest = float(finite.max()) if finite.numel() else 0.0
    differences = torch.where(same, torch.zeros_like(mine), mine - theirs).abs()
    if not bool(differences.isfinite().all()):
        return math.inf, largest
    return float(differences.max()), largest


def _is_compared(tensor: torch.Tensor) -> bool:
    """Whether ``torch.equal`` takes it: neither sparse tensors, nor complex numbers of halves, nor floats of a byte."""
    is_of_a_byte = tensor.is_floating_point() and tensor.dtype.itemsize == 1
    return tensor.layout == torch.strided and tensor.dtype != torch.complex32 and not is_of_a_byte
