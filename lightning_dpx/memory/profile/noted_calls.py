"""The calls of modules in a profiled step, watched from their begin until autograd lets go of what they saved.

forward    begins --> packed, part --> ends     what a call takes and saves
then       try_all                              which calls can be replayed: replay_trials.py
backward   small_is_asked, small_goes           until when what they saved is needed
after it   calls, holds, compiled               what the profile tells of them
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lightning_dpx.memory.call_names import path_of
from lightning_dpx.memory.execute.calls import Call
from lightning_dpx.memory.execute.module_calls import OF_CODE, CallNames
from lightning_dpx.memory.execute.recipes.registry import NotRecomputable
from lightning_dpx.memory.execute.recorded_collectives import Collective, RecordsCollectives, needed
from lightning_dpx.memory.execute.sharded_units import ShardedUnits
from lightning_dpx.memory.execute.values import Unnamed, Value, View
from lightning_dpx.memory.profile.data import CompiledCall, Hold, SavedCall
from lightning_dpx.memory.profile.noted_call import HeldTensor, NotedCall, SavedTensors, allocation_of
from lightning_dpx.memory.profile.noted_code import NotedCode
from lightning_dpx.memory.profile.replay_trials import ReplayTrials, TriesReplays
from lightning_dpx.memory.tracing.communication import is_in_group
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.torch_compat import disable_current_modes, with_memory_in

_FEWEST_TENSORS = 6  # a layer norm saves five; with fewer, operators are repeated at the same price; not compiled ones


class SmallPart:
    """What autograd holds for a tensor of a call that is too small for a decision: tells when it is asked for and goes.

    Attributes:
        entry: What the hooks made of the tensor.
    """

    __slots__ = ("_calls", "_number", "entry")

    def __init__(self, entry: Unnamed, calls: "NotedCalls", number: int) -> None:
        self.entry: Unnamed = entry
        self._calls = calls
        self._number = number

    def asked(self) -> None:
        """Backward asks for it."""
        self._calls.small_is_asked(self._number)

    def __del__(self) -> None:
        self._calls.small_goes(self._number)


@dataclass(slots=True)
class _Span:
    """The events between which backward uses a small tensor of a call.

    Attributes:
        call: The number of the noted call that saves it; -1 for none.
        function: The number of the call of a compiled function that saves it; -1 for none.
        asked: Event, -1 if it never does.
        end: Event, -1 if it is still there.
    """

    call: int
    function: int = -1
    asked: int = -1
    end: int = -1


class _NotedCollectives(RecordsCollectives):  # type: ignore[no-untyped-call]
    """Copies what collectives give, outside of the trace: it goes when it would go without a profile.

    Args:
        calls: Are told of them.
        trace: Tells of the memory.
    """

    def __init__(self, calls: "NotedCalls", trace: MemoryTrace) -> None:
        super().__init__(lambda: calls.num_packed)
        self._calls = calls
        self._trace = trace
        self.memory: dict[Collective, Allocation | None] = {}

    def _begun(self, collective: Collective) -> None:
        self._calls.meets(collective)

    def _arrived(self, collective: Collective, tensor: torch.Tensor) -> None:
        with disable_current_modes(), torch.no_grad():
            collective.result = None if collective.result is None else collective.result.clone()
        self.memory[collective] = self._trace.allocation_of(tensor.untyped_storage())

    def _is_held(self, collective: Collective) -> bool:
        allocation = self.memory.get(collective)
        return allocation is None or allocation.died is None


class NotedCalls:
    """Watches the calls of a step.

    Args:
        names: Tells of them.
        trace: Tells of the memory.
        find: The value of a tensor, if it is one.
        units: What may be made again where parameters are sharded.

    Attributes:
        units: As given.
        in_code: Identities of tensors that compiled code saves.
    """

    def __init__(
        self,
        names: CallNames,
        trace: MemoryTrace,
        find: Callable[[torch.Tensor], Value | View | None],
        units: ShardedUnits,
    ) -> None:
        self.units = units
        self.in_code: set[Any] = set()
        self._names = names
        self._trace = trace
        self._find = find
        self._noted: list[NotedCall] = []
        self._open: list[int] = []
        self._saved = SavedTensors()
        self._holds: list[tuple[str, str, int]] = []  # name, running call, number of the noted one
        self._random: tuple[int, int] | None = None  # the number of the last tensor, and the state then
        self._right = set[int]()  # numbers of calls that gave the same when they were made again
        self._small: list[_Span] = []
        self._code = NotedCode(trace)
        self._begun = set[tuple[int, int]]()  # calls of whose small tensors backward has asked for one
        self._collectives = _NotedCollectives(self, trace)

    @property
    def num_packed(self) -> int:
        """How many tensors autograd has saved so far."""
        return len(self._saved.held)

    def recording(self) -> AbstractContextManager[Any]:
        """A context for a forward, in which what collectives give is kept for the calls."""
        return self._collectives if is_in_group() else nullcontext()

    def meets(self, collective: Collective) -> None:
        """A collective begins."""
        for number in self._open:
            self._noted[number].met.append(collective)

    def begins(self, call: Call) -> None:
        """A call begins."""
        parent = self._open[-1] if self._open else -1
        self._open.append(len(self._noted))
        # What is there round compiled code is to be told exactly, so both of its ends are events.
        is_code = self._is_compiled(call)
        begin = self._trace.mark() if is_code else self._trace.now
        if is_code:
            self._code.enter()
        noted = NotedCall(call, parent, begin, len(self._saved.held))
        self._noted.append(noted)
        # It stays among the open calls all the same, for those that are made in it.
        if call.obstacle:
            return
        with disable_current_modes(), torch.no_grad():
            for argument in call.arguments.tensors:
                tensor = argument.tensor()
                if tensor is None:
                    noted.given.clear()
                    return
                allocation = self._trace.allocation_of(tensor.untyped_storage())
                argument.watch(tensor)
                if allocation is None:  # it was there before the step, or is elsewhere
                    noted.given.append(tensor.detach())
                    continue
                # A copy, outside of the trace: the tensor itself goes when it would go without a
                # profile, and its memory is counted to that moment.
                noted.allocations.append(allocation)
                noted.given.append(tensor.clone())

    def ends(self, call: Call) -> None:
        """A call is over."""
        number = self._open.pop()
        noted = self._noted[number]
        if noted.call is not call:  # some call has ended without telling, so the numbers are wrong
            self._open.clear()
            self._noted.clear()
            return
        # It is kept until the calls are tried, and the graph that it stands in must not be.
        noted.call = call.apart()
        is_code = self._is_compiled(call)
        noted.end = self._trace.mark() if is_code else self._trace.now
        if is_code:
            self._code.leave()
        noted.count = len(self._saved.held) - noted.first
        # Compiled code has no operators that could be repeated one by one.
        fewest = 1 if is_code else _FEWEST_TENSORS
        # Otherwise the last state was noted before this call began to save.
        if self._random is not None and self._random[0] >= noted.first:
            noted.random = self._random[1]
        if (
            call.obstacle
            or number in self._code.around
            or noted.count < fewest
            or self.units.holds_units(path_of(call.name))
            or not self._can_be_given_again(noted)
        ):
            noted.given = []
            noted.met = []
            return
        try:
            arguments = [argument.tensor() for argument in call.arguments.tensors]
        except NotRecomputable:  # it writes to what it is given, which is another tensor by then
            noted.given = []
            return
        for at, tensor in enumerate(arguments):
            value = None if tensor is None else self._find(tensor)
            if value is not None and noted.given:
                # Autograd keeps that argument itself, so no copy of it need be kept until the call
                # is tried.
                noted.given[at] = weakref.ref(value)

    def code_begins(self) -> None:
        """A compiled function begins."""
        self._code.begin_function(self._open)

    def code_ends(self) -> None:
        """It is over."""
        self._code.end_function()

    def _can_be_given_again(self, noted: NotedCall) -> bool:
        """Whether what collectives gave in the call is there for a replay, which asks no other process."""
        if not noted.met:
            return True
        # What is compiled would run eagerly where operators are watched, and give other bits.
        if not noted.call.is_distributed or self._names.runs_code:
            return False
        # A replay that draws from unknown states goes on to the call's end.
        if not noted.call.draws.drew or noted.random is not None:
            noted.met = needed(noted.met, len(self._saved.held))
        return not any(collective.obstacle for collective in noted.met)

    def packed(self, tensor: torch.Tensor, elements: int, held: Any, hold: int, name: str) -> None:
        """Autograd saves ``tensor``, which stands for so many elements, and holds ``held`` for it."""
        number = len(self._saved.held)
        self._saved.held.append(HeldTensor(weakref.ref(held), elements, self._trace.idle_states.has(tensor)))
        innermost = self._open[-1] if self._open else -1
        if innermost >= 0 and not self._noted[innermost].call.obstacle:
            # A call that is made again ends with the last tensor that it saved, and the generators
            # are compared there. Which tensor is the last shows only when the call is over.
            self._random = number, self._noted[innermost].call.draws.digest()
        if hold >= 0:
            self._saved.hold_of[number] = hold
            stack = self._names.stack
            self._holds.append((name, stack[-1][0] if stack else "", innermost))

    def part(self, tensor: torch.Tensor, held: Unnamed) -> Unnamed | SmallPart:
        """What autograd is to hold for a tensor without a name: the next one that is packed."""
        innermost = self._open[-1] if self._open else -1
        if innermost < 0 and self._code.function < 0:
            return held
        # What was there before the step gives no memory free, whatever is replayed.
        made = [part for part in with_memory_in(tensor) if allocation_of(part, self._trace) is not None]
        if not made:
            return held
        self._saved.small_bytes[len(self._saved.held)] = sum(part.nbytes for part in made)
        self._small.append(_Span(innermost, self._code.function))
        return SmallPart(held, self, len(self._small) - 1)

    def small_is_asked(self, number: int) -> None:
        """Backward asks for a small tensor; for the first one of a call that is an event of its own."""
        span = self._small[number]
        if span.asked < 0:
            of_call = span.call, span.function
            span.asked = self._trace.now if of_call in self._begun else self._trace.mark()
            self._begun.add(of_call)

    def small_goes(self, number: int) -> None:
        """Autograd lets go of a small tensor."""
        self._small[number].end = self._trace.now

    def try_all(self, costs: TriesReplays) -> None:
        """Makes calls again; those that do not give the same are no longer considered."""
        # Before backward frees what autograd holds, as that is what the trials compare with.
        self._right.update(ReplayTrials(self._noted, self._saved, costs).run())
        # What was kept for the trials alone.
        for noted in self._noted:
            noted.given = []
            for collective in noted.met:
                collective.result = None

    def holds(self, asked: Sequence[int], ends: Sequence[int]) -> tuple[Hold, ...]:
        """What autograd has held, in order; then the small tensors of calls, without a name.

        Args:
            asked: For each the event at which backward first asked for it, or -1.
            ends: For each the event at which autograd let go of it.
        """
        holds = []
        for at, (name, module_call, noted) in enumerate(self._holds):
            holds.append(Hold(name, module_call, self._places[self._around(noted)], asked[at], ends[at]))
        for span in self._small:
            call = self._places[self._around(span.call)]
            if call >= 0:
                end = self._trace.now if span.end < 0 else span.end
                holds.append(Hold("", "", call, span.asked, end))
        return tuple(holds)

    def _around(self, number: int) -> int:
        """The innermost call that can be replayed, from one on outwards; -1 without one."""
        while number >= 0 and number not in self._right:
            number = self._noted[number].parent
        return number

    @cached_property
    def _places(self) -> dict[int, int]:
        """The calls that can be replayed, and the place of each among them."""
        places = {-1: -1}
        for at, number in enumerate(sorted(self._right)):
            places[number] = at
        return places

    def compiled(self) -> tuple[CompiledCall, ...]:
        """The calls of compiled parts and functions whose backward asks for something, in order."""
        of_parts = self._used_by(lambda span: span.call)
        of_functions = self._used_by(lambda span: span.function)
        found = []
        for number, noted in enumerate(self._noted):
            if number in of_parts and self._is_compiled(noted.call):
                found.append(CompiledCall(noted.call.name, noted.begin, noted.end, *of_parts[number]))
        for number, (begin, end) in enumerate(self._code.functions):
            if number in of_functions:
                found.append(CompiledCall(f"{OF_CODE}{number}", begin, end, *of_functions[number]))
        return tuple(sorted(found, key=lambda code: code.begin))

    def _used_by(self, number_of_call: Callable[[_Span], int]) -> dict[int, tuple[int, int]]:
        """The events at which backward first asks for small tensors of calls, and lets go of the last, by number."""
        used: dict[int, tuple[int, int]] = {}
        for span in self._small:
            if span.asked >= 0:
                end = self._trace.now if span.end < 0 else span.end
                asked, over = used.get(number_of_call(span), (span.asked, end))
                used[number_of_call(span)] = min(asked, span.asked), max(over, end)
        return used

    def is_of_code(self, node: Any) -> bool:
        """Whether a call of compiled code that is over has made ``node``."""
        return self._code.has_made(node)

    def _is_compiled(self, call: Call) -> bool:
        return path_of(call.name) in self._names.compiled

    def calls(self, ends: Sequence[int], storages: dict[int, int], end: int) -> tuple[SavedCall, ...]:
        """The calls that can be replayed, in the order in which they begin.

        Args:
            ends: As in :meth:`holds`.
            storages: The numbers of the profile's storages, by the id of their memory.
            end: Of the step.
        """
        calls = []
        for number in sorted(self._right):
            noted = self._noted[number]
            again, small = self._made_again(noted, ends)
            given, beside = _given_memory(self._memory_kept_for(noted), storages, end)
            calls.append(
                SavedCall(
                    name=noted.call.name,
                    kind=type(noted.call.module).__qualname__,
                    parent=self._places[self._around(noted.parent)],
                    begin=noted.begin,
                    end=noted.end,
                    tensors=noted.count,
                    seconds=noted.seconds,
                    most=noted.most,
                    again=again,
                    small=small,
                    given=given,
                    given_beside=beside,
                    state=noted.call.draws.num_bytes,
                )
            )
        return tuple(calls)

    def _memory_kept_for(self, noted: NotedCall) -> list[Allocation]:
        """Of what the call was given by its caller, and by collectives, where that was made in the step."""
        by_collectives = [self._collectives.memory.get(collective) for collective in noted.met]
        return [*noted.allocations, *(allocation for allocation in by_collectives if allocation is not None)]

    def _made_again(self, noted: NotedCall, ends: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], int]:
        """What a replay of a call makes: bytes with the events at which they go, and bytes of which none is known."""
        again = []
        small = 0
        for size, numbers in noted.again.values():
            goes = [ends[hold] for hold in self._saved.holds_of(noted, numbers)]
            # What is no value has no hold that tells when it goes: it is taken to stay as long as
            # anything of the call.
            if goes:
                again.append((size, max(goes)))
            else:
                small += size
        return tuple(again), small


def _given_memory(
    allocations: Sequence[Allocation], storages: Mapping[int, int], end: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """What a call was given: numbers of storages, and of all others the bytes with the events at which they go."""
    # By the id of their memory, so that what is given twice counts once.
    saved: dict[int, int] = {}
    beside: dict[int, tuple[int, int]] = {}
    for allocation in allocations:
        key = id(allocation)
        if key in storages:
            saved[key] = storages[key]
            continue
        goes = end
        if allocation.died is not None:
            goes = allocation.died
        beside[key] = (allocation.num_bytes, goes)
    return tuple(saved.values()), tuple(beside.values())
