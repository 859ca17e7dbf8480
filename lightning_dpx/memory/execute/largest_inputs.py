"""Whether what a forward takes is larger than it was before: then what it keeps may have grown as well."""

from typing import Any

import torch

from lightning_dpx.python_objects.object_graph import ATOMS
from lightning_dpx.torch_compat import tree_leaves


class LargestInputs:
    """The largest inputs so far."""

    def __init__(self) -> None:
        self._bytes = 0
        self._last: list[Any] = []
        self._sizes: dict[tuple[int, int], int] = {}  # by number of the tensor, and dim

    def have_grown(self, inputs: Any) -> bool:
        """Whether ``inputs`` are larger than all before, together or in a dim of one of them."""
        tensors = tensors_in(inputs)
        shapes = [tensor.shape for tensor in tensors]
        if shapes == self._last:  # as in most steps
            return False
        self._last = shapes
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        grew = num_bytes > self._bytes
        self._bytes = max(num_bytes, self._bytes)
        # Few long rows may take more than many short ones: attention grows with the square of its length.
        for number, tensor in enumerate(tensors):
            for dim, size in enumerate(tensor.shape):
                if size > self._sizes.get((number, dim), 0):
                    self._sizes[number, dim] = size
                    grew = True
        return grew


def tensors_in(inputs: Any) -> list[torch.Tensor]:
    """The tensors among ``inputs``, in the same order for inputs of one structure.

    A step may be given long lists of words or numbers, which to flatten takes 0.3 us each, in every step.
    """
    found: list[torch.Tensor] = []
    waiting = [inputs]
    seen: set[int] = set()  # containers, one of which may hold itself
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            found.append(node)
        elif type(node) in (list, tuple, dict):
            if id(node) in seen:
                continue
            seen.add(id(node))
            items = node.values() if type(node) is dict else node
            waiting += [item for item in items if type(item) not in ATOMS]
        else:
            # Of other classes pytree knows whether they hold anything.
            found += [leaf for leaf in tree_leaves(node) if isinstance(leaf, torch.Tensor)]
    return found
