"""Whether two values are the same: by their own equality, by what they hold, and numbers within a tolerance."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lightning_dpx.python_objects.object_contents import slot_contents
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas.containers import children_of, members_of
from lightning_dpx.replicas.merging.number_types import as_tensor, is_large_integer, is_numeric
from lightning_dpx.replicas.merging.tolerance import Tolerance, difference

_SHORT = 4  # numbers that are told one by one


def is_equal_object(whole: Any, parts: Sequence[Any]) -> bool:
    """Whether all are equal, by their own idea of it; an idea that fails counts as no."""
    if isinstance(whole, np.ndarray):
        return all(isinstance(part, np.ndarray) and np.array_equal(part, whole) for part in parts)
    try:
        # Identity first: an object may be unequal to itself, as NaN is.
        return all(part is whole or bool(part == whole) for part in parts)
    except Exception:  # noqa: BLE001  an object may refuse to be compared; then nothing is known
        return False


def has_no_equality(value: Any) -> bool:
    """Whether two objects of this class are equal only if they are one."""
    # ``object`` itself, the last of the row, has one: that of identity.
    # Two runs of one step make two objects of such a class, which are never equal.
    return not any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1])


def is_same_object(one: Any, two: Any, tolerance: Tolerance, within: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two objects are equal, or of a class without equality and alike in all attributes.

    Args:
        one: Any object.
        two: Another one.
        tolerance: Of the numbers that they hold.
        within: The ids of the pairs that are being compared, whose attributes have led here.
    """
    # Objects may refer to each other in a circle; whether these differ is found out where the circle began.
    pair = id(one), id(two)
    if pair in within or is_equal_object(one, [two]):
        return True
    if type(one) is not type(two) or not has_no_equality(one):
        return False
    # Without any, as those of C, two objects of a class are taken for the same.
    mine = _attributes_of(one)
    theirs = _attributes_of(two)
    if mine.keys() != theirs.keys():
        return False
    for key, value in mine.items():
        for _, error in compare_trees(value, theirs[key], tolerance, within=within | {pair}):
            if error > tolerance.relative:
                return False
    return True


def _attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds in its ``__dict__`` and in slots, by name."""
    return {**dict(slot_contents(value)), **(own_attributes(value) or {})}


def compare_trees(
    one: Any, two: Any, tolerance: Tolerance, path: str = "", *, within: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[tuple[str, float]]:
    """Paths and relative differences of all leaves; infinity where structures or shapes differ."""
    if is_large_integer(one) or is_large_integer(two):
        yield path, 0.0 if type(one) is type(two) and one == two else float("inf")
        return
    if is_numeric(one) and is_numeric(two):
        yield path, difference(as_tensor(one), as_tensor(two), tolerance)
        return
    if type(one) is not type(two):
        yield path, float("inf")
        return
    mine = children_of(one)
    theirs = children_of(two)
    if mine is None and theirs is None and not is_equal_object(one, [two]):
        mine = members_of(one)
        theirs = members_of(two)
    if mine is None or theirs is None:
        yield path, 0.0 if is_same_object(one, two, tolerance, within) else float("inf")
        return
    if [name for name, _ in mine] != [name for name, _ in theirs]:
        yield path, float("inf")
        return
    for (name, value), (_, other) in zip(mine, theirs, strict=True):
        inner = f"{path}.{name}" if path else name
        yield from compare_trees(value, other, tolerance, inner, within=within)


def describe(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, torch.Tensor | np.ndarray) and np.prod(value.shape) != 1:
        is_short = len(value.shape) == 1 and 0 < len(value) <= _SHORT
        if is_short:
            return f"[{', '.join(map(describe, value))}]"
        return f"shape {tuple(value.shape)}"
    if isinstance(value, int):
        return str(value)
    if is_numeric(value):
        number = as_tensor(value).item()
        if isinstance(number, float):
            return f"{number:.6g}"
        return str(number)
    if isinstance(value, list | tuple | dict | set):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    if len(text) <= 40:
        return text
    return f"a {type(value).__name__}"
