"""Offloaded tensors that come back before backward asks for them."""

import threading
from typing import TypeVar

import torch

from lightning_dpx.devices import OffloadedTensor
from lightning_dpx.prefetch_order import Prefetcher, Slot
from lightning_dpx.torch_compat import current_graph_task_id, execution_engine

R = TypeVar("R", bound=OffloadedTensor)


class TensorPrefetcher(Prefetcher[R]):
    """The same for tensors, from several threads; nothing that a backward did not ask for stays after it."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._lock = threading.Lock()  # backward has a thread per device
        self._backward = -1

    def slot_for(self, resting: R) -> Slot[R]:
        """The next slot in the order of forward."""
        with self._lock:
            return super().slot_for(resting)

    def take(self, slot: Slot[R]) -> torch.Tensor:
        """The tensor of ``slot`` where it was; those that will be asked for next are on their way from then on."""
        backward = current_graph_task_id()
        with self._lock:
            arrived = slot.resting.take()
            self.asked(slot, backward)
            if backward >= 0 and self._ahead and self._backward != backward:
                self._backward = backward
                execution_engine.queue_callback(self.forget)  # type: ignore[attr-defined]
        return arrived

    def forget(self) -> None:
        """Nothing is on its way any more."""
        with self._lock:
            super().forget()
