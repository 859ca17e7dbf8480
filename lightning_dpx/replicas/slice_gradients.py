"""Gradients by slice: those of merged outputs are cut for the replicas, those of the replicas' inputs are joined.

The counterpart of :mod:`~lightning_dpx.replicas.merging`: what was joined along its rows is cut along them, and what
was averaged, such as a loss, counts by its rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch

from lightning_dpx.errors import SliceError
from lightning_dpx.replicas.batch_reading import BatchDim
from lightning_dpx.replicas.containers import children_of, is_sequence, join_path, map_tensors, rebuild
from lightning_dpx.replicas.output_dims import OutputDims

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class OutputGradients:
    """The gradients of the merged outputs of one forward.

    Attributes:
        given: By path in the outputs; ``None`` where the output is a loss, whose gradient is 1.
        num_rows: Of the whole batch.
        dims: The batch dims of the outputs.
    """

    given: Tensors | None
    num_rows: int
    dims: OutputDims

    @classmethod
    def read(cls, out_grads: Any, num_rows: int, dims: OutputDims) -> Self:
        """The gradients that a caller gave.

        Raises:
            SliceError: none of them has as many rows as the batch.
        """
        given = None if out_grads is None else _tensors_of(out_grads)
        sizes = set()
        for path, grad in (given or {}).items():
            dim = dims.of(path)
            if grad is not None and not dims.is_whole(path) and grad.ndim > dim:
                sizes.add(grad.shape[dim])
        if sizes and num_rows not in sizes and not sizes <= {1}:
            raise SliceError(f"out_grads has {min(sizes)} rows, the outputs have {num_rows}; give one per output row.")
        return cls(given, num_rows, dims)

    def check(self, output: Any, rows: slice) -> None:
        """Whether these are gradients of what a replica returned for ``rows``.

        Raises:
            SliceError: they have another structure or shape.
        """
        self._pairs(output, rows)

    def walk(self, output: Any, rows: slice) -> bool:
        """Runs the backward of one replica; whether there was a graph.

        Raises:
            SliceError: the gradients have another structure or shape than ``output``.
        """
        # Outputs such as indices have no graph, and autograd refuses them.
        pairs = [(leaf, grad) for leaf, grad in self._pairs(output, rows) if leaf.requires_grad]
        # The gradients may be of another type, and come from another device.
        torch.autograd.backward([leaf for leaf, _ in pairs], [grad.to(leaf) for leaf, grad in pairs])
        return bool(pairs)

    def _pairs(self, output: Any, rows: slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = {path: leaf for path, leaf in _tensors_of(output).items() if leaf is not None}
        share = (rows.stop - rows.start) / self.num_rows if self.num_rows else 0.0
        if self.given is None:
            leaves = list(own.values())
            # One number and nothing else, or it would be a guess what the gradients of the others are.
            if len(leaves) != 1 or leaves[0].numel() != 1:
                raise self._refused(own)
            return [(leaves[0], torch.full_like(leaves[0], share))]
        missing = [path for path, leaf in own.items() if leaf.requires_grad and path not in self.given]
        # What is no tensor, such as a cache that was not asked for, has None for its gradient, too.
        wanted = {path: grad for path, grad in self.given.items() if grad is not None}
        # By path and not in order: a dict of gradients may have its keys in any.
        if missing or not wanted.keys() <= own.keys():
            raise self._refused(own)
        pairs = []
        for path, grad in wanted.items():
            part = self._part(path, own[path], grad, rows, share)
            if part is None:
                raise self._refused(own)
            pairs.append((own[path], part))
        return pairs

    def _part(
        self, path: str, leaf: torch.Tensor, grad: torch.Tensor, rows: slice, share: float
    ) -> torch.Tensor | None:
        """What belongs to a replica's output; ``None`` where the shapes do not fit."""
        size = rows.stop - rows.start
        # In the order in which outputs are joined.
        dims = () if self.dims.is_whole(path) else dict.fromkeys((self.dims.of(path), 0))
        for dim in dims:
            if leaf.ndim > dim and leaf.shape[dim] == size:
                whole = torch.Size([*leaf.shape[:dim], self.num_rows, *leaf.shape[dim + 1 :]])
                if _is_like(grad.shape, whole):
                    return grad.reshape(whole).narrow(dim, rows.start, size)
        # What has no rows was averaged, each replica's by its rows.
        if _is_like(grad.shape, leaf.shape):
            return grad.reshape(leaf.shape) * share
        return None

    def _refused(self, own: Mapping[str, torch.Tensor | None]) -> SliceError:
        given = "none" if self.given is None else _described(self.given)
        return SliceError(
            f"The outputs have shapes {_described(own)}, and their gradients {given}, of {self.num_rows} rows. Without "
            "out_grads the output must be a scalar loss; out_grads has the structure and the shapes of "
            "outputs_merged(), with None for an output that needs none."
        )


class InputGradients:
    """The gradients of the inputs of slices, over one backward or over several.

    Args:
        adds: Whether a backward adds to those of the one before, where its slices have the same shapes; it replaces
            them otherwise.
    """

    def __init__(self, *, adds: bool) -> None:
        self._adds = adds
        self._shapes: list[list[torch.Size]] = []
        self._earlier: list[torch.Tensor | None] = []

    def forget(self) -> None:
        """The next backward adds to nothing."""
        self._shapes = []
        self._earlier = []

    @contextmanager
    def of_a_backward(self, batches: Sequence[Any]) -> Iterator[None]:
        """A backward of these slices; an error in the block leaves their gradients as they were.

        Args:
            batches: Of all replicas, with rows or without, so that a replica never adds to the gradients of another.
        """
        found = [_wanting_gradients(batch) for batch in batches]
        inputs = list(chain.from_iterable(found))
        before = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        try:
            yield
        except BaseException:
            for tensor, grad in zip(inputs, before, strict=True):
                tensor.grad = grad
            raise
        if not self._adds:
            return
        shapes = [_shapes_of(tensors) for tensors in found]
        if shapes == self._shapes:
            for tensor, earlier in zip(inputs, self._earlier, strict=True):
                # Not in place: what a caller was given before stays as it is.
                tensor.grad = _sum(tensor.grad, earlier)
        self._shapes = shapes
        self._earlier = [tensor.grad for tensor in inputs]


def _wanting_gradients(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found


def _shapes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _sum(grad: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None or other is None:
        if grad is None:
            return other
        return grad
    return grad + other


def join_input_gradients(
    parts: Sequence[Any], sizes: Sequence[int], device: torch.device, batch_dim: BatchDim, path: str
) -> Any:
    """The gradient of one whole input, nested as the input, from the slices that replicas got of it.

    Rows that a replica did not use have a gradient of zero; an input that no replica used has none. What every replica
    had whole has the sum.

    Args:
        parts: Each replica's slice of the input.
        sizes: Rows of each of them.
        device: Where the gradients shall live.
        batch_dim: As for the inputs.
        path: The input's name, and the path within it.
    """
    dim = batch_dim if isinstance(batch_dim, int) else batch_dim.get(path, 0)
    first = parts[0]
    if isinstance(first, torch.Tensor):
        grads = [part.grad for part in parts]
        if all(grad is None for grad in grads):
            return None
        present = []
        for part, grad in zip(parts, grads, strict=True):
            present.append(torch.zeros_like(part, device=device) if grad is None else grad.to(device))
        # Every replica had all of it, so each of its elements has a gradient from each of them.
        if dim == -1 or not first.ndim:
            return sum(present[1:], present[0])
        return torch.cat(present, dim)
    children = children_of(first)
    if children is None:
        return None
    # A list with an item for each row: the replicas have different items.
    if dim != -1 and is_sequence(first) and _hold_rows(parts, sizes, dim):
        gradients = [join_input_gradients([item], [1], device, -1, path) for item in chain.from_iterable(parts)]
        return type(first)(gradients)
    rows: list[list[Any]] = []
    for part in parts:
        # Their names are those of the first part: all slices of a batch are made alike.
        rows.append([child for _, child in children_of(part) or ()])
    columns = zip(*rows, strict=True)
    merged = []
    for (name, _), column in zip(children, columns, strict=True):
        # -1 gives all that is in a container whole.
        inner = -1 if dim == -1 else batch_dim
        merged.append(join_input_gradients(column, sizes, device, inner, join_path(path, name)))
    return rebuild(first, merged)


def _hold_rows(parts: Sequence[Any], sizes: Sequence[int], dim: int) -> bool:
    """Whether sequences have an item for each row, and not a column for each item."""
    if [len(part) for part in parts] != list(sizes):
        return False
    for part, size in zip(parts, sizes, strict=True):
        for item in part:
            if not isinstance(item, torch.Tensor) or item.ndim <= dim or item.shape[dim] != size:
                return True
    return False


def _tensors_of(value: Any, path: str = "") -> Tensors:
    """The tensors in a nested value, and what is ``None`` in their place, by path."""
    if value is None or isinstance(value, torch.Tensor):
        return {path: value}
    found: Tensors = {}
    for name, child in children_of(value) or ():
        found.update(_tensors_of(child, join_path(path, name)))
    return found


def _is_like(shape: torch.Size, other: torch.Size) -> bool:
    """Whether shapes differ in dims of size 1 alone: a gradient of shape [3] serves an output of shape [3, 1]."""
    return [size for size in shape if size != 1] == [size for size in other if size != 1]


def _described(tensors: Mapping[str, torch.Tensor | None]) -> str:
    found = []
    for path, tensor in tensors.items():
        shape = None if tensor is None else list(tensor.shape)
        found.append(f"{path}: {shape}" if path else str(shape))
    return ", ".join(found)
