"""Offloaded tensors that come back before backward unpacks them."""

import threading
from typing import TypeVar

import torch

from lightning_dpx.devices import OffloadedTensor
from lightning_dpx.prefetch_order import Prefetcher, PrefetchSlot
from lightning_dpx.torch_compat import current_graph_task_id, execution_engine

R = TypeVar("R", bound=OffloadedTensor)


class TensorPrefetcher(Prefetcher[R]):
    """A prefetcher of tensors for threads; nothing fetched in vain outlives its backward."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._lock = threading.Lock()  # backward has a thread per device
        self._backward = -1

    def slot_for(self, offloaded: R) -> PrefetchSlot[R]:
        """The next slot in the order of forward."""
        with self._lock:
            return super().slot_for(offloaded)

    def fetch(self, slot: PrefetchSlot[R]) -> torch.Tensor:
        """The tensor of ``slot`` where it was; those that will be unpacked next are on their way from then on."""
        # Negative outside of a backward, as when a debugger looks at a saved tensor.
        backward = current_graph_task_id()
        with self._lock:
            arrived = slot.offloaded.fetch()
            self.on_unpack(slot, backward)
            # Once for each backward: one of a part of the graph ends before it has unpacked all
            # that is on its way.
            if backward >= 0 and self._ahead and self._backward != backward:
                self._backward = backward
                execution_engine.queue_callback(self.cancel)  # type: ignore[attr-defined]
        return arrived

    def cancel(self) -> None:
        """Nothing is on its way any more."""
        with self._lock:
            super().cancel()
