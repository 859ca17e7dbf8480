"""Which storages a stretch of code allocates, and when they go: the memory of a step as a curve over its events.

Works on every device, also where the allocator counts nothing (the host), because it watches operators, not the
allocator. It does not see what an operator allocates and frees inside.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_dpx.devices import synchronize

_QUIET = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}  # what pack hooks do themselves


class Allocation:
    """One storage: its bytes, and the events at which it came and went (``None``: it is still there)."""

    __slots__ = ("born", "born_operator", "died", "died_operator", "num_bytes")

    def __init__(self, num_bytes: int, born: int, born_operator: int) -> None:
        self.num_bytes, self.born, self.born_operator = num_bytes, born, born_operator
        self.died: int | None = None
        self.died_operator: int | None = None


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages on one device, from now on.

    Attributes:
        live: Bytes that were allocated since and are still there.
        curve: ``live`` after every event; an event is an operator, the end of a storage, or a :meth:`mark`.
        operators: The event of every operator.
        seconds: Spent in operators.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._present: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self.allocations: list[Allocation] = []
        self.live, self.seconds = 0, 0.0
        self.curve: list[int] = []
        self.operators: list[int] = []
        self._lock = threading.RLock()  # backward has a thread per device

    @property
    def now(self) -> int:
        """The number of events so far."""
        return len(self.curve)

    def mark(self) -> int:
        """An event of the caller's."""
        with self._lock:
            self.curve.append(self.live)
            return len(self.curve) - 1

    def allocation_of(self, storage: torch.UntypedStorage) -> Allocation | None:
        """What is known of ``storage``; nothing if it was there before."""
        entry = self._present.get(storage._cdata)
        return entry[1] if entry is not None else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        synchronize(self._device)
        seconds = time.perf_counter() - start
        with self._lock:
            self.seconds += seconds
            if func not in _QUIET:
                self._see(out, args, kwargs)
        return out

    def _see(self, out: Any, args: Any, kwargs: Any) -> None:
        given: set[int] | None = None
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor) or leaf.device != self._device or leaf.layout is not torch.strided:
                continue
            storage = leaf.untyped_storage()
            if storage._cdata in self._present:
                continue
            if given is None:
                given = {_identity(x) for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)}
            if storage._cdata not in given:
                self._add(storage)
        self.operators.append(self.mark())

    def _add(self, storage: torch.UntypedStorage) -> None:
        allocation = Allocation(storage.nbytes(), self.now, len(self.operators))
        self.allocations.append(allocation)
        self.live += allocation.num_bytes
        reference = weakref.ref(storage, self._gone(storage._cdata, allocation))
        self._present[storage._cdata] = reference, allocation

    def _gone(self, address: int, allocation: Allocation) -> Callable[[Any], None]:
        def forget(_reference: Any) -> None:
            with self._lock:
                self.live -= allocation.num_bytes
                allocation.died, allocation.died_operator = self.mark(), len(self.operators)
                entry = self._present.get(address)
                if entry is not None and entry[1] is allocation:
                    del self._present[address]

        return forget

    def peak_of_passing(self) -> int:
        """The most bytes at any time of what is gone by now: activations and what backward needs in between.

        Gradients of parameters, the loss and other results are still there and do not count.
        """
        return max(passing(self.curve, self.allocations), default=0)


def _identity(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def passing(curve: list[int], allocations: list[Allocation]) -> list[int]:
    """``curve`` without the allocations that never end."""
    lasting = [0] * (len(curve) + 1)
    for allocation in allocations:
        if allocation.died is None:
            lasting[allocation.born] += allocation.num_bytes
    result, sum_so_far = [], 0
    for event, live in enumerate(curve):
        sum_so_far += lasting[event]
        result.append(live - sum_so_far)
    return result
