"""Copies of tensors across a cut: one per tensor and device, and none that was written past its original."""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from lightning_dpx.devices import moved
from lightning_dpx.torch_compat import has_storage, key_of, version_counter


class Extent:
    """Which bytes of its storage a tensor covers, for numpy, which finds out exactly whether two overlap."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        start = 4096 + tensor.storage_offset() * size  # nothing reads there; an address of 0 means "none" to numpy
        self.__array_interface__: dict[str, Any] = {
            "data": (start, True),
            "shape": tuple(tensor.shape),
            "strides": strides,
            "typestr": f"|V{size}",
            "version": 3,
        }

    def overlaps(self, other: "Extent") -> bool:
        """Whether both cover a byte; also where it would take too long to tell."""
        return bool(np.may_share_memory(np.asarray(self), np.asarray(other), max_work=10_000))  # type: ignore[arg-type]


class Lent(NamedTuple):
    """A copy that may be written into.

    Attributes:
        storage: Of the original. As long as this is held, no other storage gets its address.
        extent: Of the original.
        counter: Shares the copy's version counter, without its memory: the copy may be gone when the original is read.
        version: Of the copy when it was made.
        device: Of the copy.
        borrower: The module call that it was made for.
    """

    storage: StorageWeakRef
    extent: Extent
    counter: torch.Tensor
    version: int
    device: torch.device
    borrower: Any


class Copies:
    """The copies of one step.

    Args:
        running: The module calls that are running, innermost last.
        refuse: Called with a copy that was written in place, the tensor of the original's memory that is read, and the
            module call that reads it.
    """

    def __init__(self, running: Sequence[Any], refuse: Callable[[Lent, torch.Tensor, Any], None]) -> None:
        self._running = running
        self._refuse = refuse
        self._copies: MutableMapping[torch.Tensor, dict[torch.device, tuple[int, torch.Tensor]]]
        self._copies = WeakTensorKeyDictionary()  # a copy lives as long as its original may be used again
        self._originals: MutableMapping[torch.Tensor, tuple[int, TensorWeakRef]] = WeakTensorKeyDictionary()
        self._lent: dict[int, list[Lent]] = {}  # by the original's storage, which its views share

    def check(self, tensor: torch.Tensor) -> None:
        """What is written into a copy misses the original, and all that read the original, or a view, differ."""
        if not self._lent or not has_storage(tensor):
            return
        # A storage may be lent to several devices, and through several views.
        for lent in self._lent.get(key_of(tensor.untyped_storage()), ()):
            if version_counter(lent.counter) != lent.version and lent.extent.overlaps(Extent(tensor)):
                self._refuse(lent, tensor, self._running[-1])

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The one copy of ``tensor`` on ``device``; made anew where the tensor was written since."""
        # Without a version counter it cannot be told whether the tensor was written since.
        if tensor.is_inference():
            return moved(tensor, device)
        self.check(tensor)
        # Used again by all operators there, so autograd adds up their gradients before it
        # sends them back.
        entry = self._copies.get(tensor, {}).get(device)
        if entry is not None and entry[0] == version_counter(tensor):
            held: torch.Tensor = entry[1]
            return held
        # On its way back a copy that nobody has written is the original itself.
        version, reference = self._originals.get(tensor, (-1, None))
        original = reference() if reference is not None and version == version_counter(tensor) else None
        if isinstance(original, torch.Tensor) and original.device == device:
            return original
        arrived = moved(tensor, device)
        self._copies.setdefault(tensor, {})[device] = version_counter(tensor), arrived
        # Weakly, as a copy that is saved for backward would else keep its original's memory.
        self._originals[arrived] = version_counter(arrived), TensorWeakRef(tensor)
        if has_storage(tensor):
            self._lend(tensor, arrived)
        return arrived

    def _lend(self, tensor: torch.Tensor, arrived: torch.Tensor) -> None:
        # ``detach`` shares the version counter, and ``data`` takes the memory away from this one only.
        counter = arrived.detach()
        counter.data = counter.new_empty(0)
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        lent = Lent(storage, Extent(tensor), counter, version_counter(arrived), arrived.device, self._running[-1])
        self._lent.setdefault(storage.cdata, []).append(lent)
