"""Random draws of a step that drew nothing when it was checked, as one that draws new features in every 1,000th batch.

Slices would each draw for themselves, and what they have drawn is in what they have kept. So that batch is run again
on one device, from the states that the generators had when it began; the next one is checked. A batch that its slices
have written (an augmentation in place) is none to begin with again.
"""

import zlib
from collections.abc import Sequence

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.memory.batch_shapes import arrays_in
from lightning_dpx.replicas import BatchSlice
from lightning_dpx.torch_compat import version_counter

_LARGEST_ARRAY = 2**16  # bytes, which are read in 30 us, before and after a step

REASON = (
    "It draws random numbers in this batch, and drew none when it was checked. Its slices had begun it: what it counts "
    "outside of the module, they did as well."
)


class DrawsAppear(GatherError):  # noqa: N818  the step goes on, whole
    """A step has drawn random numbers in slices for the first time, and is to run again on the whole batch."""

    def __init__(self) -> None:
        super().__init__(REASON)


def versions_of(slices: Sequence[BatchSlice]) -> list[int | None]:
    """How often the tensors of the batch have been written, as the first slice tells: it has views of them.

    Arrays of NumPy count no writes. Small ones are read instead; ``None`` stands for a large one that may be written.
    """
    versions: list[int | None] = []
    # All slices run the same code, and views of one tensor count together: to ask each costs time in every step.
    for array in arrays_in(slices[0].batch):
        if isinstance(array, torch.Tensor):
            if not array.is_inference():
                versions.append(version_counter(array))
        elif array.flags.writeable:
            versions.append(zlib.crc32(array.tobytes()) if array.nbytes <= _LARGEST_ARRAY else None)
    return versions
