"""How a tensor is known again: tensors that agree in this hold the same numbers."""

from typing import NamedTuple

import torch

from lightning_dpx.torch_compat import (
    key_of,
    version_counter,
)


class Identity(NamedTuple):
    """Tensors that agree in this hold the same numbers, as long as the storage lives."""

    storage: int
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def is_dense_unlike(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has its dims in another order in memory: operators of libraries rely on theirs."""
        steps = list[tuple[int, int, int]]()
        for step, size, other in zip(self.stride, self.size, tensor.stride(), strict=True):
            # The stride of a dim of one element means nothing, and may be any.
            if size != 1:
                steps.append((step, size, other))
        expected = 1
        for step, size, _ in sorted(steps):
            # A part of something larger, on whose order in memory nobody can rely.
            if step != expected:
                return False
            expected *= size
        return any(step != other for step, _, other in steps)


def identity_of(base: torch.Tensor) -> Identity:
    """The identity of ``base``, by which it is known again."""
    storage = key_of(base.untyped_storage())
    offset = int(base.storage_offset())
    return Identity(storage, version_counter(base), base.dtype, base.size(), base.stride(), offset)
