"""Values that are offloaded to the host's memory from forward to backward: copied both ways beside the computation.

A plan says how many may be on their way at once. On the way out a value keeps its memory until so many others were
offloaded after it; on the way back it takes its memory so many values early. The forecast counts both by the same rule.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from lightning_dpx.devices import OffloadedTensor, clock_of, synchronize
from lightning_dpx.prefetch import TensorPrefetcher
from lightning_dpx.prefetch_order import PrefetchSlot
from lightning_dpx.torch_compat import version_counter

_HOST = torch.device("cpu")
Fetch = Callable[[PrefetchSlot["_Offloaded"]], torch.Tensor]


class _Offloaded(OffloadedTensor):
    """A value's tensor on the host; notices writes into it while it is on its way there."""

    def __init__(self, tensor: torch.Tensor, version: int, name: str) -> None:
        self._version = version
        self._name = name
        self._changed = ""
        super().__init__(tensor, _HOST)

    def free_original(self) -> None:
        """Gives the tensor's memory free: from here on it may be written to."""
        # Up to here the copy may still be read from the tensor, so a write may be in it.
        if self._original is not None and version_counter(self._original) != self._version:
            self._changed = f"has version {version_counter(self._original)} instead of {self._version}"
        super().free_original()

    def fetch(self) -> torch.Tensor:
        """The tensor where it was.

        Raises:
            RuntimeError: it was changed in place before its copy was made, which autograd refuses as well.
        """
        self.free_original()  # a backward inside of the forward's context
        if self._changed:
            raise RuntimeError(
                f"A tensor that backward needs was changed in place: {self._name}, "
                f"offloaded to the host, {self._changed}."
            )
        return super().fetch()


class _Device:
    """What of one device is on its way to the host, and what is on its way back."""

    def __init__(self, prefetch_depth: int) -> None:
        self.leaving: deque[weakref.ref[_Offloaded]] = deque()
        self.fetches: TensorPrefetcher[_Offloaded] = TensorPrefetcher(prefetch_depth)

    def free_all_but(self, prefetch_depth: int) -> None:
        """From here on all but the last ``prefetch_depth`` have given their memory free."""
        while len(self.leaving) > prefetch_depth:
            if (offloaded := self.leaving.popleft()()) is not None:
                offloaded.free_original()


class Offloader:
    """Offloads the values of one plan.

    Args:
        prefetch_depth: How many values of a device may be on their way at once, in each direction; with 0 the device
            waits for every copy.
    """

    def __init__(self, prefetch_depth: int) -> None:
        self._prefetch_depth = prefetch_depth
        self._devices: dict[torch.device, _Device] = {}
        self._lock = threading.Lock()

    def offload(self, tensor: torch.Tensor, version: int, name: str) -> tuple[Fetch, PrefetchSlot[_Offloaded]]:
        """Sends ``tensor`` to the host's memory.

        Args:
            tensor: A value of a device.
            version: Of what was saved; in place operators count it up.
            name: Of the value.

        Returns:
            A function that brings it back, and what to give to it; nothing else holds what is offloaded.
        """
        offloaded = _Offloaded(tensor, version, name)
        with self._lock:
            device = self._devices.setdefault(tensor.device, _Device(self._prefetch_depth))
            # Weakly: where no backward runs, what is on its way goes with the graph.
            device.leaving.append(weakref.ref(offloaded))
            device.free_all_but(self._prefetch_depth)
        return device.fetches.fetch, device.fetches.slot_for(offloaded)

    def settle(self) -> None:
        """Forward is over: what is on its way gives its memory free."""
        # A value that leaves later would push these out, but there is none.
        with self._lock:
            for device in self._devices.values():
                device.free_all_but(0)


def copy_seconds(tensor: torch.Tensor) -> float:
    """Seconds of a copy of ``tensor`` to the host or back: the slower way, better of two tries."""
    clock = clock_of(tensor.device)
    slower = 0.0
    offloaded = OffloadedTensor(tensor, _HOST)
    for copy in (lambda: OffloadedTensor(tensor, _HOST).free_original(), offloaded.fetch):
        best = float("inf")
        for _ in range(2):
            offloaded.release()  # or the second fetch would find the tensor there
            synchronize(tensor.device)
            start = clock()
            copy()
            synchronize(tensor.device)
            best = min(best, clock() - start)
        slower = max(slower, best)
    return slower
