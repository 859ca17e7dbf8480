"""Gradients fused into a few flat buckets (tensorpack's GradientPacker, PyTorch DDP).

The buckets are cut at parameter boundaries and ordered as backward finishes the parameters, last ones first, so that a
bucket can travel as soon as its last gradient is there.
"""

from collections.abc import Sequence

import torch

from lightning_dpx.arguments import is_whole_number
from lightning_dpx.boundaries import split_at_boundaries as split_at_boundaries
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.torch_compat import flatten_dense, unflatten_dense

SMALLEST_SPLIT = 1024  # elements; below, fusing costs more than it saves


class GradientPacker:
    """Fuses lists of gradients into ``num_splits`` buckets and takes them apart again.

    Args:
        num_splits: Buckets per list; fewer where there are fewer gradients.

    Attributes:
        refusal: Why the gradients of the last :meth:`plan` are not packed, or ``None``.

    Raises:
        ConfigurationError: not a positive number of splits.

    Examples:
        >>> packer = dpx.GradientPacker(num_splits=2)
        >>> gradients = [torch.ones(40, 30), torch.ones(800), torch.ones(400)]
        >>> packer.plan(gradients)
        True
        >>> [len(bucket) for bucket in packer.pack(gradients)]
        [1200, 1200]
    """

    def __init__(self, num_splits: int = 8) -> None:
        if not is_whole_number(num_splits) or num_splits < 1:
            raise ConfigurationError(f"num_splits={num_splits!r} is not allowed; give a positive integer.")
        self.num_splits = num_splits
        self.refusal: str | None = None
        self._shapes: list[torch.Size] = []
        self._splits: list[list[int]] = []
        self._dtype = torch.float32

    @property
    def splits(self) -> list[list[int]]:
        """The gradients of every bucket, as indices into the list, in the order in which they lie in it."""
        return [list(split) for split in self._splits]

    def plan(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Decides the splits for gradients like these; whether they can be packed, else see :attr:`refusal`."""
        self.refusal = self._refuse(grads)
        if self.refusal is not None:
            self._splits = []
            return False
        present = [gradient for gradient in grads if gradient is not None]
        self._shapes = [gradient.shape for gradient in present]
        self._dtype = present[0].dtype
        self._splits = split_at_boundaries([gradient.numel() for gradient in present], self.num_splits)
        return True

    def _refuse(self, grads: Sequence[torch.Tensor | None]) -> str | None:
        present = []
        # A flat bucket has one dtype, one device and no holes.
        for index, gradient in enumerate(grads):
            if gradient is None:
                return f"gradient {index} is None"
            present.append(gradient)
            if gradient.layout != torch.strided:
                return f"gradient {index} is sparse"
            if gradient.dtype != present[0].dtype:
                return f"the gradients have different dtypes: {present[0].dtype} and {gradient.dtype}"
            if gradient.device != present[0].device:
                return f"the gradients lie on different devices: {present[0].device} and {gradient.device}"
        # In all, and not bucket by bucket: one small gradient beside large ones does no harm.
        total = sum(gradient.numel() for gradient in present)
        if total < SMALLEST_SPLIT * self.num_splits:
            return f"{total} elements in {self.num_splits} splits are fewer than {SMALLEST_SPLIT} each"
        return None

    def pack(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """N gradients to one flat bucket per split; no copy where they are neighboring views of one bucket already.

        Raises:
            ConfigurationError: no plan, or gradients of other numbers, shapes or dtypes than planned.
        """
        self._require_plan(len(grads), len(self._shapes), "gradients")
        for index, (gradient, shape) in enumerate(zip(grads, self._shapes, strict=True)):
            if gradient.shape != shape:
                raise ConfigurationError(
                    f"Gradient {index} has shape {tuple(gradient.shape)}, planned was {tuple(shape)}; plan() again."
                )
            # Beside others it would silently become of theirs.
            if gradient.dtype != self._dtype:
                raise ConfigurationError(
                    f"Gradient {index} is of {gradient.dtype}, planned was {self._dtype}; plan() again."
                )
        return [flatten([grads[index] for index in split]) for split in self._splits]

    def unpack(self, buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """N gradients, as views of the buckets.

        Raises:
            ConfigurationError: no plan, or buckets of other numbers or sizes than :meth:`pack` makes.
        """
        self._require_plan(len(buckets), len(self._splits), "buckets")
        grads: dict[int, torch.Tensor] = {}
        for split, bucket in zip(self._splits, buckets, strict=True):
            shapes = [self._shapes[index] for index in split]
            if bucket.numel() != sum(shape.numel() for shape in shapes):
                raise ConfigurationError(
                    f"A bucket of gradients {split} has {bucket.numel()} elements, planned was "
                    f"{sum(shape.numel() for shape in shapes)}; give what pack() has made."
                )
            grads.update(zip(split, unflatten(bucket, shapes), strict=True))
        return [grads[index] for index in range(len(self._shapes))]

    def pack_all(self, all_grads: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """K x N gradients to K lists of buckets."""
        return [self.pack(grads) for grads in all_grads]

    def unpack_all(self, all_buckets: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """K lists of buckets to K x N gradients."""
        return [self.unpack(buckets) for buckets in all_buckets]

    def _require_plan(self, given: int, planned: int, what: str) -> None:
        if not self._splits:
            raise ConfigurationError(f"There is no plan ({self.refusal or 'call plan() first'}).")
        if given != planned:
            raise ConfigurationError(f"There are {given} {what}, planned were {planned}; plan() again.")


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor of all elements, in order; a view where the tensors are neighbors in one storage."""
    first = tensors[0]
    storage = first.untyped_storage()
    # Gradients that lie one after the other in one storage need no copy: a view is flat already.
    end = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == storage.data_ptr() and tensor.storage_offset() == end
        if not same or not tensor.is_contiguous():
            return flatten_dense(tensors)
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def flatten_each(lists: Sequence[Sequence[torch.Tensor]], indices: Sequence[int]) -> list[torch.Tensor]:
    """One flat tensor for each list, of its tensors at ``indices``."""
    buckets = []
    for row in lists:
        chosen = [row[index] for index in indices]
        buckets.append(flatten(chosen))
    return buckets


def unflatten(bucket: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Views of ``bucket`` with these shapes, in order."""
    parts = bucket.split([shape.numel() for shape in shapes])  # type: ignore[no-untyped-call]
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def alike(tensors: Sequence[torch.Tensor], targets: Sequence[int]) -> list[list[int]]:
    """Indices that can share a bucket: of one dtype, for one target."""
    # A flat tensor has one dtype, and what goes to one owner travels together.
    groups: dict[tuple[torch.dtype, int], list[int]] = {}
    for index, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        groups.setdefault((tensor.dtype, target), []).append(index)
    return list(groups.values())


def unflatten_into(
    bucket: torch.Tensor, like: Sequence[torch.Tensor], indices: Sequence[int], result: list[torch.Tensor]
) -> None:
    """Puts the tensors of ``bucket`` at ``indices`` of ``result``; they look like those at ``indices`` of ``like``."""
    for index, tensor in zip(indices, unflatten_like(bucket, [like[index] for index in indices]), strict=True):
        result[index] = tensor


def unflatten_like(bucket: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``bucket`` with the shapes of ``like``; copies where those are not contiguous (channels last)."""
    tensors = []
    for part, own in zip(unflatten_dense(bucket, like), like, strict=True):
        if part.stride() != own.stride():
            # Optimizers are fast only where a gradient lies in memory as its parameter does.
            part = torch.empty_like(own, device=bucket.device).copy_(part)
        tensors.append(part)
    return tensors
