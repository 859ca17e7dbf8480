"""What a step on slices begins with: where it can be put back, the step may run again on the whole batch.

It may draw random numbers for the first time (``first_draws.py``), or raise an error on a slice (``slice_errors.py``).
A batch that a check has seen written is kept as the loader gave it: memory that NumPy shares counts no writes.
"""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_dpx.devices import RandomStates, is_host
from lightning_dpx.lightning.memory.batch_shapes import arrays_in
from lightning_dpx.replicas import BatchSlice, MergeRules, SeenGenerators
from lightning_dpx.replicas.tensor_checksums import checksums
from lightning_dpx.torch_compat import version_counter

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

_LARGEST_ARRAY = 2**16  # bytes, which are read in 30 us, before and after a step


class StepBeginning:
    """The batch, the generators and the module, as a step finds them.

    Args:
        session: Of the step.
        name: Of the step.
        slices: What runs; several.
        rules: Of the step.

    Attributes:
        generators: Where they are.
    """

    def __init__(self, session: "Session", name: str, slices: Sequence[BatchSlice], rules: MergeRules) -> None:
        self._session = session
        self._name = name
        self._slices = slices
        self._rules = rules
        self.generators: SeenGenerators = session.replicas.traits.draws.now()
        # Each device has one of its own, from which the whole batch draws on the first.
        devices = [device for device in session.replicas.devices if not is_host(device)]
        self._on_devices = RandomStates(devices) if devices else None
        # A copy costs each step time and memory, so it is made where a check has seen that there is need.
        self._kept = BatchCopy(slices) if rules.writes_batch else None
        self._versions = [] if rules.writes_batch else _versions_of(slices)
        session.replicas.python_state.hold_tensors()

    def can_begin_again(self) -> bool:
        """Whether the step can run on the whole batch as if it had not run on slices."""
        return self._session.can_repeat(self._name) and self._is_untouched()

    def has_drawn_on_devices(self) -> bool:
        """Whether anything was drawn from the generators of accelerators since."""
        states = self._on_devices
        return states is not None and not states.same_on_devices(states.again())

    def put_back(self) -> None:
        """The generators are where the batch began, as one device draws from there; and a kept batch is put back."""
        self.generators.put_back()
        if self._on_devices is not None:
            self._on_devices.restore()
        if self._kept is not None:
            self._kept.put_back()

    def _is_untouched(self) -> bool:
        """Whether the batch still is what the loader gave, and what slices have left in the module can be put back."""
        if self._kept is None and (None in self._versions or _versions_of(self._slices) != self._versions):
            return False
        attributes = self._rules.attributes
        lists = [place.attribute.rpartition(".") for place in {*attributes.appended, *attributes.growing}]
        return self._session.replicas.python_state.can_put_back([(path, name) for path, _, name in lists])


class BatchCopy:
    """What the slices of a batch hold, of a step that writes it.

    Args:
        slices: Of the batch, as the loader gave it.
    """

    def __init__(self, slices: Sequence[BatchSlice]) -> None:
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        # Of every slice: each has views of other rows.
        for batch_slice in slices:
            for array in arrays_in(batch_slice.batch):
                if isinstance(array, torch.Tensor):
                    self._tensors.append((array, array.detach().clone()))
                elif array.flags.writeable:
                    self._arrays.append((array, array.copy()))

    def put_back(self) -> None:
        """The batch holds that again."""
        for tensor, kept in self._tensors:
            # Nothing else may write a tensor that was made in inference mode.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(kept)
        for array, copied in self._arrays:
            np.copyto(array, copied)


def contents_of(batch: Any) -> list[int]:
    """A number for what each tensor and array of ``batch`` holds, which changes if it is written."""
    found: list[int] = []
    for array in arrays_in(batch):
        if isinstance(array, torch.Tensor):
            # Of a sparse one the number of values is part of what it holds.
            plain = array.detach().to_dense() if array.layout != torch.strided else array
            found += checksums([plain])
        # The bytes of such an array are addresses.
        elif not array.dtype.hasobject:
            found.append(zlib.crc32(array.tobytes()))
    return found


def _versions_of(slices: Sequence[BatchSlice]) -> list[int | None]:
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
