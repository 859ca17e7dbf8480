"""Which shapes of batches a plan was made for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas.containers import children_of, is_value
from lightning_dpx.torch_compat import with_memory_in

MOST_STEPS = 8  # that are remembered, of different shapes
_NO_DATA = (nn.Module, Dataset, type)  # which an object in a batch may lead to
T = TypeVar("T")
Shapes = tuple[tuple[int, ...], ...]
Array = torch.Tensor | np.ndarray[Any, Any]


def arrays_in(batch: Any) -> list[Array]:
    """All tensors and arrays of ``batch``, in order: in its containers, and in the attributes of its objects."""
    found: list[Array] = []
    seen: dict[int, Any] = {}  # what was met, which is held so that its id stays its own
    waiting = [batch]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            found += with_memory_in(node)  # a jagged one has rows in one of them, and no number of its own for its dim
        elif isinstance(node, np.ndarray):
            found.append(node)
        elif not is_value(node) and not isinstance(node, _NO_DATA) and id(node) not in seen:
            seen[id(node)] = node
            waiting += reversed(_parts_of(node))  # it is popped from the end
    return found


def bytes_of_tensors(batch: Any) -> int:
    """What the tensors of ``batch`` take; arrays of NumPy are not an allocator's."""
    return sum(array.nbytes for array in arrays_in(batch) if isinstance(array, torch.Tensor))


def _parts_of(node: Any) -> list[Any]:
    children = children_of(node)
    if children is not None:
        return [child for _, child in children]
    # Such as a packed sequence, which is cut as a whole.
    if isinstance(node, tuple):
        return list(node)
    return list((own_attributes(node) or {}).values())


def shapes_of(batch: Any) -> Shapes:
    """The shapes of all tensors and arrays in ``batch``, in order."""
    return tuple(map(_shape_of, arrays_in(batch)))


def _shape_of(array: Array) -> tuple[int, ...]:
    # Rows of different lengths have no shape together.
    if isinstance(array, torch.Tensor) and array.is_nested:
        return (array.numel(),)
    return tuple(array.shape)


class KnownShapes:
    """The largest shapes of batches so far: several, where each is larger than the others in some dim."""

    def __init__(self) -> None:
        self._largest: list[Shapes] = []

    def covers(self, batch: Any) -> bool:
        """Whether no tensor of ``batch`` is larger in any dim than that of one known batch."""
        return self.covers_shapes(shapes_of(batch))

    def covers_shapes(self, shapes: Shapes) -> bool:
        """Whether no shape is larger in any dim than that of one known batch."""
        return any(_within(shapes, known) for known in self._largest)

    def add(self, batch: Any) -> None:
        """From now on ``batch`` is known, and so are all within it."""
        self.add_shapes(shapes_of(batch))

    def add_shapes(self, shapes: Shapes) -> None:
        """The same, of a batch with these shapes, which another process may have."""
        # A batch that is longer but has fewer rows is within none, and may need more memory.
        # Those within the new one say nothing more, so the list stays as short as it can be.
        self._largest = [known for known in self._largest if not _within(known, shapes)] + [shapes]


def _within(shapes: Shapes, largest: Shapes) -> bool:
    return len(shapes) == len(largest) and all(
        len(mine) == len(most) and all(map(int.__le__, mine, most)) for mine, most in zip(shapes, largest, strict=True)
    )


def largest_of(shapes: Mapping[int, Shapes]) -> dict[int, Shapes]:
    """Those of ``shapes`` that are within no other; of equal ones the first."""
    largest = dict[int, Shapes]()
    for key, mine in shapes.items():
        if any(_within(mine, known) for known in largest.values()):
            continue
        # It may be larger than some that came before it.
        for smaller in [other for other, known in largest.items() if _within(known, mine)]:
            del largest[smaller]
        largest[key] = mine
    return largest


def most_demanding(steps: Sequence[T], pressure: Callable[[T], float]) -> list[T]:
    """As many of ``steps`` as are remembered: the last one, and those of the others that demand most."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    kept = sorted(range(len(steps) - 1), key=lambda index: -pressure(steps[index]))[: MOST_STEPS - 1]
    return [*(steps[index] for index in sorted(kept)), steps[-1]]
