"""Which storages a stretch of code allocates, and when they go: the memory of a step as a curve over its events.

Works on every device, also where the allocator counts nothing (the host), because it watches operators, not the
allocator. What an operator allocates and frees inside is added from the allocator's reports.

    operator --> MemoryTrace -----> StorageLedger      what is there at every event, and when it goes
                     |    |                            storage_ledger.py
                     |    +-------> GradientTerms      sums that autograd would have made in place
                     |                                 gradient_terms.py
                     +------------> Account            what operators take inside
                                                       allocator_account.py
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from lightning_dpx.devices import clock_of, is_host, synchronize
from lightning_dpx.memory.tracing.allocator_account import Account, OperatorMemory, account_of
from lightning_dpx.memory.tracing.generator_states import GENERATOR_STATES
from lightning_dpx.memory.tracing.gradient_terms import GradientTerms, identity
from lightning_dpx.memory.tracing.idle_states import IdleStates
from lightning_dpx.memory.tracing.storage_ledger import Allocation, StorageLedger
from lightning_dpx.python_objects.leave_no_trace import CopyOnWrite
from lightning_dpx.torch_compat import (
    COLLECTIVES,
    FakeTensor,
    TorchDispatchMode,
    on_tensors_of_tensors,
    tree_leaves,
    with_memory_in,
)

aten: Any = torch.ops.aten
_QUIET = {aten.detach.default, aten.alias.default}  # what pack hooks do themselves


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages on one device, from now on.

    Args:
        device: Which.
        writes: What is told before an operator writes to a tensor.
        makes: Is given the bytes of every storage that an operator has made.

    Attributes:
        called: Every operator.
        seconds: Spent in operators.
        idle_states: Among the results of operators.
        communicates: Whether an operator was one of several processes.
    """

    _sees_fakes = False  # with which a distributed tensor finds out what its parts will be, the first time

    def __init__(
        self,
        device: torch.device,
        writes: CopyOnWrite | None = None,
        makes: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._writes = writes
        self._account = account_of(device)
        self._on_host = is_host(device)
        self._clock = clock_of(device)
        self._ledger = StorageLedger(makes)
        self._gradient_terms = GradientTerms(self._ledger)
        self.seconds: float = 0.0
        self.idle_states: IdleStates = IdleStates()
        self.communicates: bool = False
        self.called: list[Any] = []

    def __enter__(self) -> "MemoryTrace":
        super().__enter__()  # type: ignore[no-untyped-call]
        GENERATOR_STATES.tell(self.note_made)
        return self

    def __exit__(self, *error: Any) -> None:
        # Before the mode goes: from here on states belong to no trace.
        GENERATOR_STATES.tell_no_more(self.note_made)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def follow_storages_only(self) -> "MemoryTrace":
        """Without what operators take inside, which costs as much as a small operator; returns itself."""
        self._account = Account()
        return self

    # ---- what is known so far ----

    @property
    def now(self) -> int:
        """The number of events so far."""
        return self._ledger.now

    @property
    def live(self) -> int:
        """Bytes that were allocated since the trace began and are still there."""
        return self._ledger.live

    @property
    def curve(self) -> list[int]:
        """The most bytes at every event; an event is an operator, the end of a storage, or a :meth:`mark`."""
        return self._ledger.curve

    @property
    def operators(self) -> list[int]:
        """The event of every operator."""
        return self._ledger.operators

    @property
    def allocations(self) -> list[Allocation]:
        """All storages that were allocated since."""
        return self._ledger.allocations

    def allocation_of(self, storage: torch.UntypedStorage) -> Allocation | None:
        """What is known of ``storage``; nothing if it was there before."""
        return self._ledger.allocation_of(storage)

    def peak_of_passing(self) -> int:
        """The most bytes at any time of what is gone by now: activations and what backward needs in between.

        Gradients of parameters, the loss and other results are still there and do not count.
        """
        return max(self.passing(), default=0)

    def passing(self, apart: Collection[int] = (), gone: Mapping[int, int] = MappingProxyType({})) -> list[int]:
        """The curve without the allocations that are still there; see :meth:`StorageLedger.passing`."""
        return self._ledger.passing(apart, gone)

    # ---- what callers note ----

    def mark(self) -> int:
        """An event of the caller's."""
        with self._ledger.lock:
            self._ledger.settle()
            return self._ledger.add_event()

    def note_made(self, tensor: torch.Tensor) -> None:
        """``tensor`` is there from now on, which no operator has made."""
        with self._ledger.lock:
            if tensor.device != self._device or self.allocation_of(tensor.untyped_storage()) is not None:
                return
            self._ledger.settle()
            # It is there before its event, as the results of an operator are.
            self._ledger.add(tensor.untyped_storage())
            self._ledger.add_event()

    # ---- operators ----

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every call; the compiler leaves the code of this package alone anyway

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # These do the operator on the tensors that they hold, which comes here again.
        if on_tensors_of_tensors(types):
            return NotImplemented
        if self._writes is not None:
            self._writes.before(func, args, kwargs)
        out, seconds, taken = self.observed(func, args, kwargs or {})
        with self._ledger.lock:
            self.seconds += seconds
            if func not in _QUIET and (self._sees_fakes or type(out) is not FakeTensor):
                self._see(func, out, args, kwargs, taken)
        return out

    def observed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, OperatorMemory]:
        """The results of an operator, the seconds that it took, and the memory."""
        token = self._account.start()
        start = self._clock()
        try:
            out = func(*args, **kwargs)
            if not self._on_host:
                synchronize(self._device)  # or the time would be that of handing it to the device
        finally:
            # Also where it fails: a profiler that is left on hides the blocks of later operators.
            seconds = self._clock() - start
            taken = self._account.stop(token)
        return out, seconds, taken

    def _see(self, func: Any, out: Any, args: Any, kwargs: Any, taken: OperatorMemory) -> None:
        ledger = self._ledger
        # What the sum before this operator has replaced would be gone by now.
        ledger.settle()
        before = ledger.live
        num_earlier = len(ledger.allocations)
        self.communicates |= func.namespace in COLLECTIVES
        self.called.append(func)
        self.idle_states.note(func, out, args, kwargs)
        term = self._gradient_terms.term_of(func, args, out)
        # Whether the sum has memory of its own is known with the next event.
        if term is not None:
            storage = out.untyped_storage()
            ledger.add_open_sum(max(0, taken.most - storage.nbytes()), storage, term)
            return
        self._add_results(func, out, args, kwargs)
        # The allocator's account includes the results.
        inside = self._inside(func, args, out, taken.most - (ledger.live - before))
        ledger.add_operator(inside, before, num_earlier, taken)

    def _add_results(self, func: Any, out: Any, args: Any, kwargs: Any) -> None:
        """Counts the storages that an operator has made."""
        given: set[int] | None = None
        for leaf in _tensors_in((out,)):
            if leaf.device != self._device or leaf.layout is not torch.strided:
                continue
            # One among several results; a single one was looked at before.
            if isinstance(leaf, FakeTensor) and not self._sees_fakes:
                continue
            storage = leaf.untyped_storage()
            if self.allocation_of(storage) is not None:
                continue
            # An unknown storage is new, or older than the trace; then an operand has it. Operands
            # are looked at here only, as most operators' results are new or known.
            if given is None:
                given = {identity(x) for x in _tensors_in((*args, *(kwargs or {}).values()))}
            if identity(leaf) not in given:
                self._gradient_terms.note_made(func, self._ledger.add(storage))

    def _inside(self, func: Any, args: Any, out: Any, counted: int) -> int:
        """The most bytes that an operator has beyond its results; by the allocator's account it is ``counted``."""
        return max(0, counted)


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Of what an operator takes or gives: tensors with memory of their own, also in lists and in other tensors."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors += with_memory_in(value)
        elif isinstance(value, list | tuple | dict):
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    tensors += with_memory_in(leaf)
    return tensors
