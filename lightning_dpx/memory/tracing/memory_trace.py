"""Which storages a stretch of code allocates, and when they go: the memory of a step as a curve over its events.

Works on every device, also where the allocator counts nothing (the host), because it watches operators, not the
allocator. What an operator allocates and frees inside is added from the allocator's reports; see
allocator_account.py.

[Note: sums of gradients] While any dispatch mode is on, autograd adds up the gradients of a value of several uses out
of place, and otherwise in place: into the term that it has got first, the first operand of the sum, unless that is a
view, or others hold its memory. So if that one goes right after the sum, it was the sum. Its formulas for what was
gathered, indexed or sorted do likewise with the zeros that they have just made and fill.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FrameType, MappingProxyType
from typing import Any

import torch

from lightning_dpx.devices import clock_of, is_host, synchronize
from lightning_dpx.memory.tracing.allocator_account import Account, OperatorMemory, account_of
from lightning_dpx.python_objects.leave_no_trace import CopyOnWrite
from lightning_dpx.python_objects.overrides import Overrides
from lightning_dpx.torch_compat import (
    COLLECTIVES,
    FakeTensor,
    TorchDispatchMode,
    current_graph_task_id,
    engine_code,
    is_view,
    key_of,
    on_tensors_of_tensors,
    tree_leaves,
    with_memory_in,
)

aten: Any = torch.ops.aten
_QUIET = {aten.detach.default, aten.alias.default}  # what pack hooks do themselves
_CONSTANTS = {aten.new_zeros, aten.zeros, aten.zeros_like}
_FILLING = {aten.index_add, aten.index_put, aten.put, aten.scatter, aten.scatter_add}


class Allocation:
    """One storage: its bytes, and the events at which it came and went (``None``: it is still there)."""

    __slots__ = ("born", "born_operator", "died", "died_operator", "num_bytes")

    def __init__(self, num_bytes: int, born: int, born_operator: int) -> None:
        self.num_bytes: int = num_bytes
        self.born: int = born
        self.born_operator: int = born_operator
        self.died: int | None = None
        self.died_operator: int | None = None


class _PeakWithin:
    """What an operator took that also made what stays, such as the gradient of a parameter.

    At the moment when it had most inside, that may not have been there yet.
    """

    __slots__ = ("_before", "_made", "_taken")

    def __init__(self, before: int, taken: OperatorMemory, made: list[Allocation]) -> None:
        self._before = before
        self._taken = taken
        self._made = made

    def most_of_passing(self) -> int:
        """Bytes at the most while it ran, without those of its results that are still there."""
        staying = self._taken.until_each_stays()
        lasting = Counter(allocation.num_bytes for allocation in self._made if allocation.died is None)
        # The gradient of a convolution's input may be as large as that of its weight, and comes first:
        # of several of one size those last that came last, so that the most is never too low.
        passing = Counter(size for size, _ in staying) - lasting
        most = there = 0
        for size, before in staying:
            most = max(most, before - there)
            if passing[size]:
                passing[size] -= 1
            elif lasting[size]:
                lasting[size] -= 1
                there += size
        return self._before + most


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages on one device, from now on.

    Args:
        device: Which.
        writes: What is told before an operator writes to a tensor.
        makes: Is given the bytes of every storage that an operator has made.

    Attributes:
        live: Bytes that were allocated since and are still there.
        curve: The most bytes at every event; an event is an operator, the end of a storage, or a :meth:`mark`.
        operators: The event of every operator.
        called: Every operator.
        seconds: Spent in operators.
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
        self._makes = makes
        self._account = account_of(device)
        self._on_host = is_host(device)
        self._clock = clock_of(device)
        self._present: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self._constant: Allocation | None = None  # the last one that was made
        self._sum: tuple[torch.UntypedStorage, Allocation] | None = None  # and the term that it may take over
        self.allocations: list[Allocation] = []
        self.live: int = 0
        self.seconds: float = 0.0
        self.communicates: bool = False
        self.curve: list[int] = []
        self._courses: dict[int, _PeakWithin] = {}
        self.operators: list[int] = []
        self.called: list[Any] = []
        self._lock = threading.RLock()  # backward has a thread per device

    def __enter__(self) -> "MemoryTrace":
        super().__enter__()  # type: ignore[no-untyped-call]
        _STATES.tell(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _STATES.tell_no_more(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def follow_storages_only(self) -> "MemoryTrace":
        """Without what operators take inside, which costs as much as a small operator; returns itself."""
        self._account = Account()
        return self

    @property
    def now(self) -> int:
        """The number of events so far."""
        return len(self.curve)

    def mark(self) -> int:
        """An event of the caller's."""
        with self._lock:
            self._settle()
            return self._event()

    def note_made(self, tensor: torch.Tensor) -> None:
        """``tensor`` is there from now on, which no operator has made."""
        with self._lock:
            if tensor.device != self._device or self.allocation_of(tensor.untyped_storage()) is not None:
                return
            self._settle()
            self._add(tensor.untyped_storage())
            self._event()

    def _event(self, inside: int = 0) -> int:
        self.curve.append(self.live + inside)
        return len(self.curve) - 1

    def allocation_of(self, storage: torch.UntypedStorage) -> Allocation | None:
        """What is known of ``storage``; nothing if it was there before."""
        entry = self._present.get(key_of(storage))
        if entry is not None:
            return entry[1]
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # These do the operator on the tensors that they hold, which comes here again.
        if on_tensors_of_tensors(types):
            return NotImplemented
        if self._writes is not None:
            self._writes.before(func, args, kwargs)
        out, seconds, taken = self.observed(func, args, kwargs or {})
        with self._lock:
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
        # What the sum before this operator has replaced would be gone by now.
        self._settle()
        before = self.live
        earlier = len(self.allocations)
        self.communicates |= func.namespace in COLLECTIVES
        self.called.append(func)
        given: set[int] | None = None
        if (func is aten.add.Tensor or func.overloadpacket in _FILLING) and _called_by_engine():
            terms = args[:1] if func is aten.add.Tensor else self._constant_among(args[:1])
            self._sum = self._term_of_sum(out, terms)
            # Whether the sum has memory of its own is known with the next event.
            if self._sum is not None:
                self.operators.append(self._event(max(0, taken.most - out.untyped_storage().nbytes())))
                return
        for leaf in _tensors_in((out,)):
            if leaf.device != self._device or leaf.layout is not torch.strided:
                continue
            # One among several results; a single one was looked at before.
            if isinstance(leaf, FakeTensor) and not self._sees_fakes:
                continue
            storage = leaf.untyped_storage()
            if key_of(storage) in self._present:
                continue
            # An unknown storage is new, or older than the trace; then an operand has it. Operands
            # are looked at here only, as most operators' results are new or known.
            if given is None:
                given = {_identity(x) for x in _tensors_in((*args, *(kwargs or {}).values()))}
            if key_of(storage) not in given:
                self._add(storage)
                if func.overloadpacket in _CONSTANTS:
                    self._constant = self.allocations[-1]
        # The allocator's account includes the results.
        inside = self._inside(func, args, out, taken.most - (self.live - before))
        if inside and len(self.allocations) > earlier:
            self._courses[self.now] = _PeakWithin(before, taken, self.allocations[earlier:])
        self.operators.append(self._event(inside))

    def _inside(self, func: Any, args: Any, out: Any, counted: int) -> int:
        """The most bytes that an operator has beyond its results; by the allocator's account it is ``counted``."""
        return max(0, counted)

    def _constant_among(self, tensors: Any) -> list[torch.Tensor]:
        """Of ``tensors``, the constant that was made last."""
        known = self._constant
        if known is None:
            return []
        constants = []
        for tensor in tensors:
            if _identity(tensor) and self.allocation_of(tensor.untyped_storage()) is known:
                constants.append(tensor)
        return constants

    def _term_of_sum(self, out: torch.Tensor, terms: Any) -> tuple[torch.UntypedStorage, Allocation] | None:
        """The memory of the sum, and that of the term into which it may have been added."""
        # See [Note: sums of gradients] for the terms that autograd adds to in place.
        for term in terms:
            if not _identity(term) or not _identity(out) or is_view(term):
                continue
            known = self.allocation_of(term.untyped_storage())
            if known is not None and known.num_bytes == out.untyped_storage().nbytes():
                return out.untyped_storage(), known
        return None

    def _settle(self) -> None:
        """The last term of the last sum is still there: others hold it, so it was no sum in place."""
        if self._sum is not None:
            storage = self._sum[0]
            self._sum = None
            self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage that an operator has made."""
        allocation = Allocation(storage.nbytes(), self.now, len(self.operators))
        self.allocations.append(allocation)
        self.live += allocation.num_bytes
        self._follow(storage, allocation)
        if self._makes is not None:
            self._makes(allocation.num_bytes)

    def _follow(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        """From now on the end of ``storage`` is the end of ``allocation``."""
        reference = weakref.ref(storage, self._gone(key_of(storage), allocation))
        self._present[key_of(storage)] = reference, allocation

    def _gone(self, address: int, allocation: Allocation) -> Callable[[Any], None]:
        """Called when the storage that is followed there ends."""

        def forget(_reference: Any) -> None:
            with self._lock:
                # Another storage may have got the address before this one's end was told.
                entry = self._present.get(address)
                if entry is not None and entry[1] is allocation:
                    del self._present[address]
                # The term goes right after the sum: it was the sum, which lives on in its memory.
                if self._sum is not None and allocation is self._sum[1]:
                    storage = self._sum[0]
                    self._sum = None
                    self._follow(storage, allocation)
                    return
                self.live -= allocation.num_bytes
                allocation.died = self._event()
                allocation.died_operator = len(self.operators)

        return forget

    def peak_of_passing(self) -> int:
        """The most bytes at any time of what is gone by now: activations and what backward needs in between.

        Gradients of parameters, the loss and other results are still there and do not count.
        """
        return max(self.passing(), default=0)

    def passing(self, apart: Collection[int] = (), gone: Mapping[int, int] = MappingProxyType({})) -> list[int]:
        """The curve without the allocations that are still there, and without those whose ids are ``apart``.

        Args:
            apart: Ids of allocations.
            gone: Those that are to be in the curve until some event, by their ids.
        """
        # By how much the bytes change that are to be left out, at every event; summed up below.
        lasting = [0] * (len(self.curve) + 1)
        for allocation in self.allocations:
            if allocation.died is None or id(allocation) in apart:
                left_out = gone.get(id(allocation), allocation.born)
                lasting[min(left_out, len(self.curve))] += allocation.num_bytes
                if allocation.died is not None:
                    lasting[allocation.died] -= allocation.num_bytes
        result = []
        sum_so_far = 0
        for event, live in enumerate(self.curve):
            before = sum_so_far
            sum_so_far = sum_so_far + lasting[event]
            result.append(live - sum_so_far)
            # An operator may have had most inside before its result came that is left out here.
            if lasting[event] and event in self._courses:
                result[-1] = max(result[-1], self._courses[event].most_of_passing() - before)
        return result


class _GeneratorStates:
    """Tells traces of the states of the host's generator that a step keeps, as ``torch.utils.checkpoint`` does.

    Such a state is a tensor of 5 KB, made by no operator.
    """

    def __init__(self) -> None:
        self._traces: list[tuple[int, MemoryTrace]] = []  # each with its thread
        self._lock = threading.Lock()
        self._overrides = Overrides()
        self._get = torch.get_rng_state

    def tell(self, trace: MemoryTrace) -> None:
        """From now on ``trace`` is told of those that its thread asks for."""
        with self._lock:
            if not self._traces:
                self._get = torch.get_rng_state
                for owner in (torch, torch.random):
                    self._overrides.set(owner, "get_rng_state", self._get_and_tell)
            self._traces.append((threading.get_ident(), trace))

    def tell_no_more(self, trace: MemoryTrace) -> None:
        """From now on ``trace`` is told of no more states."""
        with self._lock:
            self._traces = [entry for entry in self._traces if entry[1] is not trace]
            if not self._traces:
                self._overrides.put_back()

    def _get_and_tell(self) -> torch.Tensor:
        state = self._get()
        for thread, trace in tuple(self._traces):
            if thread == threading.get_ident():
                trace.note_made(state)
        return state


_STATES = _GeneratorStates()
_ENGINE = engine_code
_BETWEEN = {"__torch_dispatch__", "_fn", "inner"}  # modes, and torch's own wrapping of them


def _called_by_engine() -> bool:
    """Whether autograd's engine itself calls the mode, and no Python code that runs in backward."""
    # A backward that records gradients never adds in place.
    if current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    # Two frames up is the mode, as the first two are this function's and the one that asks.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in _BETWEEN:
        frame = frame.f_back
    return frame is None or frame.f_code is _ENGINE  # a thread of the engine has no other frames


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


def _identity(tensor: torch.Tensor) -> int:
    """Of its storage; 0 where it has none of its own, such as sparse tensors."""
    if tensor.layout is torch.strided:
        return key_of(tensor.untyped_storage())
    return 0
