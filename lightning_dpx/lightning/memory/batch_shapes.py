"""Which shapes of batches a plan was made for."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from lightning_dpx.torch_compat import tree_leaves

MOST_STEPS = 8  # that are remembered, of different shapes
T = TypeVar("T")
Shapes = tuple[tuple[int, ...], ...]


def shapes_of(batch: Any) -> Shapes:
    """The shapes of all tensors in ``batch``, in order."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


class KnownShapes:
    """The largest shapes of batches so far: several, where each is larger than the others in some dim."""

    def __init__(self) -> None:
        self._largest: list[Shapes] = []

    def hold(self, batch: Any) -> bool:
        """Whether no tensor of ``batch`` is larger in any dim than that of one known batch."""
        shapes = shapes_of(batch)
        return any(_within(shapes, known) for known in self._largest)

    def add(self, batch: Any) -> None:
        """From now on ``batch`` is known, and so are all within it."""
        # A batch that is longer but has fewer rows is within none, and may need more memory.
        shapes = shapes_of(batch)
        # Those within the new one say nothing more, so the list stays as short as it can be.
        self._largest = [known for known in self._largest if not _within(known, shapes)] + [shapes]


def _within(shapes: Shapes, largest: Shapes) -> bool:
    return len(shapes) == len(largest) and all(
        len(mine) == len(most) and all(map(int.__le__, mine, most)) for mine, most in zip(shapes, largest, strict=True)
    )


def most_demanding(steps: Sequence[T], demand: Callable[[T], float]) -> list[T]:
    """As many of ``steps`` as are remembered: the last one, and those of the others that demand most."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    kept = sorted(range(len(steps) - 1), key=lambda index: -demand(steps[index]))[: MOST_STEPS - 1]
    return [*(steps[index] for index in sorted(kept)), steps[-1]]
