"""Which storages a stretch of code allocates, and when they go: the memory of a step as a curve over its events.

Works on every device, also where the allocator counts nothing (the host), because it watches operators, not the
allocator. It does not see what an operator allocates and frees inside.

[Note: sums of gradients] While any dispatch mode is on, autograd adds up the gradients of a value of several uses out
of place, and otherwise in place: into the term that came last. So if that one goes right after the sum, it was the sum.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_dpx.devices import synchronize
from lightning_dpx.python_objects.untouched import CopyOnWrite

_COLLECTIVES = {"c10d", "_c10d_functional"}
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

    Args:
        device: Which.
        writes: What is told before an operator writes to a tensor.

    Attributes:
        live: Bytes that were allocated since and are still there.
        curve: ``live`` after every event; an event is an operator, the end of a storage, or a :meth:`mark`.
        operators: The event of every operator.
        seconds: Spent in operators.
        communicates: Whether an operator was one of several processes.
    """

    def __init__(self, device: torch.device, writes: CopyOnWrite | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._writes = device, writes
        self._present: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self._sum: tuple[torch.UntypedStorage, Allocation] | None = None  # and the term that it may take over
        self.allocations: list[Allocation] = []
        self.live, self.seconds, self.communicates = 0, 0.0, False
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
            self._settle()
            return self._event()

    def _event(self) -> int:
        self.curve.append(self.live)
        return len(self.curve) - 1

    def allocation_of(self, storage: torch.UntypedStorage) -> Allocation | None:
        """What is known of ``storage``; nothing if it was there before."""
        entry = self._present.get(storage._cdata)
        return entry[1] if entry is not None else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._writes is not None:
            self._writes.before(func, args, kwargs)
        out, seconds = self.timed(func, args, kwargs or {})
        with self._lock:
            self.seconds += seconds
            if func not in _QUIET:
                self._see(func, out, args, kwargs)
        return out

    def timed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """The results of an operator, and the seconds that it took."""
        start = time.perf_counter()
        out = func(*args, **kwargs)
        synchronize(self._device)
        return out, time.perf_counter() - start

    def _see(self, func: Any, out: Any, args: Any, kwargs: Any) -> None:
        self._settle()
        self.communicates |= func.namespace in _COLLECTIVES
        given: set[int] | None = None
        if func is torch.ops.aten.add.Tensor and _called_by_engine():
            self._sum = self._term_of_sum(out, args)
            if self._sum is not None:
                self.operators.append(self._event())
                return
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
        self.operators.append(self._event())

    def _term_of_sum(self, out: torch.Tensor, terms: Any) -> tuple[torch.UntypedStorage, Allocation] | None:
        found = [
            known for x in terms if _identity(x) and (known := self.allocation_of(x.untyped_storage())) is not None
        ]
        last = max(found, key=lambda term: term.born, default=None)
        fits = last is not None and _identity(out) and last.num_bytes == out.untyped_storage().nbytes()
        return (out.untyped_storage(), last) if last is not None and fits else None

    def _settle(self) -> None:
        """The last term of the last sum is still there: others hold it, so it was no sum in place."""
        if self._sum is not None:
            storage, self._sum = self._sum[0], None
            self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        allocation = Allocation(storage.nbytes(), self.now, len(self.operators))
        self.allocations.append(allocation)
        self.live += allocation.num_bytes
        self._follow(storage, allocation)

    def _follow(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        reference = weakref.ref(storage, self._gone(storage._cdata, allocation))
        self._present[storage._cdata] = reference, allocation

    def _gone(self, address: int, allocation: Allocation) -> Callable[[Any], None]:
        def forget(_reference: Any) -> None:
            with self._lock:
                entry = self._present.get(address)
                if entry is not None and entry[1] is allocation:
                    del self._present[address]
                if self._sum is not None and allocation is self._sum[1]:
                    storage, self._sum = self._sum[0], None
                    self._follow(storage, allocation)
                    return
                self.live -= allocation.num_bytes
                allocation.died, allocation.died_operator = self._event(), len(self.operators)

        return forget

    def peak_of_passing(self) -> int:
        """The most bytes at any time of what is gone by now: activations and what backward needs in between.

        Gradients of parameters, the loss and other results are still there and do not count.
        """
        return max(passing(self.curve, self.allocations), default=0)


_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_BETWEEN = {"__torch_dispatch__", "_fn", "inner"}  # modes, and torch's own wrapping of them


def _called_by_engine() -> bool:
    """Whether autograd's engine itself calls the mode, and no Python code that runs in backward."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in _BETWEEN:
        frame = frame.f_back
    return frame is None or frame.f_code is _ENGINE  # a thread of the engine has no other frames


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
