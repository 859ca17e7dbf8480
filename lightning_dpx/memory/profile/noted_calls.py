"""The calls of modules in a profiled step, and what it takes to replay each as a whole.

Every call that could not be told from a second one, and that saves several tensors, is made once more before backward
begins: that gives its time and its memory, and shows that all tensors come out the same.
"""

import statistics
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from lightning_dpx.devices import HostFullError
from lightning_dpx.memory.execute.calls import Call
from lightning_dpx.memory.execute.distributed_tensors import part_here
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.recipes.registry import NotRecomputable
from lightning_dpx.memory.execute.recorded_collectives import Collective, RecordsCollectives, needed
from lightning_dpx.memory.execute.replays import Replay
from lightning_dpx.memory.execute.saved_tensor_hooks import SMALL
from lightning_dpx.memory.execute.sharded_units import ShardedUnits
from lightning_dpx.memory.execute.values import Unnamed, Value, View
from lightning_dpx.memory.profile.data import CompiledCall, Hold, SavedCall
from lightning_dpx.memory.tracing.communication import is_in_group
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.torch_compat import disable_current_modes, with_memory_in

_FEWEST_TENSORS = 6  # a layer norm saves five; with fewer, operators are repeated at the same price; not compiled ones
_LARGEST_PART = 0.6  # of the tensors of a step: replaying more of it at once makes room for nothing
_FEWEST_BYTES = SMALL  # of the tensors that calls save and that are too small for a decision of their own
_MOST_TRIES = 3.0  # times the tensors of a step: how much may be tried, the outer calls first


@dataclass(frozen=True, slots=True)
class TimedReplay:
    """What a call gave when it was made again to see how long that takes.

    Attributes:
        found: What it saved.
        seconds: That it took.
    """

    found: Sequence[torch.Tensor]
    seconds: float


@dataclass(frozen=True, slots=True)
class WatchedReplay:
    """What a call gave when it was made again to see what memory that takes.

    Attributes:
        found: What it saved.
        trace: What has watched it.
    """

    found: Sequence[torch.Tensor]
    trace: MemoryTrace


class TriesReplays(Protocol):
    """A cost model, as far as this file knows it."""

    def timed_replay(self, replay: Replay) -> TimedReplay:
        """Makes a call again, and measures how long that takes."""

    def watched_replay(self, replay: Replay) -> WatchedReplay:
        """Makes a call again, and watches the memory that it takes."""

    def is_same(self, again: torch.Tensor, original: torch.Tensor) -> bool:
        """Whether a tensor that was made again is right."""


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
        call: The number of the noted call that saves it.
        asked: Event, -1 if it never does.
        end: Event, -1 if it is still there.
    """

    call: int
    asked: int = -1
    end: int = -1


@dataclass(slots=True)
class _Noted:
    """A call of the step that is watched.

    Attributes:
        call: Which.
        parent: The one that it is made in.
        begin: Event.
        first: The number of the first tensor that autograd saves in it.
        given: What it takes: the tensor or a copy of it, or the value that is saved; in the order of its arguments.
        allocations: Of what it takes.
        end: Event.
        count: Tensors that are saved in it.
        random: The state of the generators when the last of them was saved.
        met: The collectives in it, as far as they are needed to make it again.
    """

    call: Call
    parent: int
    begin: int
    first: int
    given: list[Any] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    end: int = -1
    count: int = 0
    random: int | None = None
    met: list[Collective] = field(default_factory=list)
    seconds: float = 0.0
    most: int = 0
    again: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # by storage: bytes, numbers of tensors


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
        self._noted: list[_Noted] = []
        self._open: list[int] = []
        self._buckets: list[tuple[Any, int]] = []  # what autograd holds, weakly; and its elements
        self._hold_of: dict[int, int] = {}  # by the number of the tensor
        self._holds: list[tuple[str, str, int]] = []  # name, running call, number of the noted one
        self._random: tuple[int, int] | None = None  # the number of the last tensor, and the state then
        self._right = set[int]()  # numbers of calls that gave the same when they were made again
        self._small: list[_Span] = []
        self._small_bytes: dict[int, int] = {}  # by the number of the tensor
        self._begun = set[int]()  # calls of whose small tensors backward has asked for one
        self._collectives = _NotedCollectives(self, trace)

    @property
    def num_packed(self) -> int:
        """How many tensors autograd has saved so far."""
        return len(self._buckets)

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
        begin = self._trace.mark() if self._is_compiled(call) else self._trace.now
        noted = _Noted(call, parent, begin, len(self._buckets))
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
        noted = self._noted[self._open.pop()]
        if noted.call is not call:  # some call has ended without telling, so the numbers are wrong
            self._open.clear()
            self._noted.clear()
            return
        # It is kept until the calls are tried, and the graph that it stands in must not be.
        noted.call = call.apart()
        noted.end = self._trace.mark() if self._is_compiled(call) else self._trace.now
        noted.count = len(self._buckets) - noted.first
        # Compiled code has no operators that could be repeated one by one.
        fewest = 1 if self._is_compiled(call) else _FEWEST_TENSORS
        # Otherwise the last state was noted before this call began to save.
        if self._random is not None and self._random[0] >= noted.first:
            noted.random = self._random[1]
        if (
            call.obstacle
            or noted.count < fewest
            or self.units.holds_units(call.name.partition("#")[0])
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

    def _can_be_given_again(self, noted: _Noted) -> bool:
        """Whether what collectives gave in the call is there for a replay, which asks no other process."""
        if not noted.met:
            return True
        # What is compiled would run eagerly where operators are watched, and give other bits.
        if not noted.call.is_distributed or self._names.compiled:
            return False
        # A replay that draws from unknown states goes on to the call's end.
        if not noted.call.draws.drew or noted.random is not None:
            noted.met = needed(noted.met, len(self._buckets))
        return not any(collective.obstacle for collective in noted.met)

    def packed(self, elements: int, held: Any, hold: int, name: str) -> None:
        """Autograd saves a tensor of so many elements, and holds ``held`` for it."""
        number = len(self._buckets)
        self._buckets.append((weakref.ref(held), elements))
        innermost = self._open[-1] if self._open else -1
        if innermost >= 0 and not self._noted[innermost].call.obstacle:
            # A call that is made again ends with the last tensor that it saved, and the generators
            # are compared there. Which tensor is the last shows only when the call is over.
            self._random = number, self._noted[innermost].call.draws.digest()
        if hold >= 0:
            self._hold_of[number] = hold
            stack = self._names.stack
            self._holds.append((name, stack[-1][0] if stack else "", innermost))

    def part(self, tensor: torch.Tensor, held: Unnamed) -> Unnamed | SmallPart:
        """What autograd is to hold for a tensor without a name: the next one that is packed."""
        innermost = self._open[-1] if self._open else -1
        if innermost < 0:
            return held
        # What was there before the step gives no memory free, whatever is replayed.
        made = [part for part in with_memory_in(tensor) if _allocation_of(part, self._trace) is not None]
        if not made:
            return held
        self._small_bytes[len(self._buckets)] = sum(part.nbytes for part in made)
        self._small.append(_Span(innermost))
        return SmallPart(held, self, len(self._small) - 1)

    def small_is_asked(self, number: int) -> None:
        """Backward asks for a small tensor; for the first one of a call that is an event of its own."""
        span = self._small[number]
        if span.asked < 0:
            span.asked = self._trace.now if span.call in self._begun else self._trace.mark()
            self._begun.add(span.call)

    def small_goes(self, number: int) -> None:
        """Autograd lets go of a small tensor."""
        self._small[number].end = self._trace.now

    def try_all(self, costs: TriesReplays) -> None:
        """Makes calls again, outer ones first; those that do not give the same are no longer considered.

        All of a kind are tried or none: a plan is to treat equal layers alike.
        """
        left = _MOST_TRIES * len(self._buckets)
        most = _LARGEST_PART * len(self._buckets)
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for number, noted in enumerate(self._noted):
            if noted.end >= 0 and noted.given and noted.count <= most and self._saves_enough(noted):
                kinds.setdefault(self._kind(noted), []).append(number)
        # A call saves at least as much as those within it, so the most tensors are those of outer
        # calls.
        for numbers in sorted(kinds.values(), key=lambda numbers: -self._noted[numbers[0]].count):
            tensors = sum(self._noted[number].count for number in numbers)
            if tensors > left:  # a smaller kind may still be tried
                continue
            left -= tensors
            self._right.update(self._right_of(numbers, costs))
        for noted in self._noted:
            noted.given = []
            for collective in noted.met:
                collective.result = None

    def _right_of(self, numbers: Sequence[int], costs: TriesReplays) -> list[int]:
        """Those of a kind that give the same when they are made again.

        Each is tried, also within a call that was right: one of them alone may depend on what that call does round it
        unseen, such as a context variable.
        """
        right = list[int]()
        for number in numbers:
            like = self._noted[right[0]] if right else None
            if self._is_faithful(self._noted[number], costs, like):
                right.append(number)
        # One of them may have been hit by whatever else the machine did at that moment; equal layers
        # are to have equal prices.
        typical = statistics.median_low([self._noted[number].seconds for number in right]) if right else 0.0
        for number in right:
            self._noted[number].seconds = typical
        return right

    def _is_faithful(self, noted: _Noted, costs: TriesReplays, like: _Noted | None) -> bool:
        try:
            return self._is_right(noted, costs, like)
        # That says nothing of the call: whatever is alive then, the profile needs fewer rows.
        except HostFullError:
            raise
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
            return False
        except Exception:  # noqa: BLE001  a call of a module runs whatever its author wrote
            return False

    def _saves_enough(self, noted: _Noted) -> bool:
        """Whether a replay of the call would give memory free that a plan can count on."""
        numbers = range(noted.first, noted.first + noted.count)
        if any(at in self._hold_of for at in numbers):
            return True
        return sum(self._small_bytes.get(at, 0) for at in numbers) >= _FEWEST_BYTES

    def _numbered(self, noted: _Noted) -> list[tuple[int, tuple[Any, int]]]:
        """What autograd holds of a call, each with its number among all that the step saves."""
        return [(at, self._buckets[at]) for at in range(noted.first, noted.first + noted.count)]

    def _kind(self, noted: _Noted) -> tuple[Any, ...]:
        """Equal for calls that save tensors of the same sizes for modules of one class."""
        sizes = tuple(size for _, (_, size) in self._numbered(noted))
        met = tuple((one.operator, one.number - noted.first) for one in noted.met)
        return type(noted.call.module), len(noted.call.arguments.tensors), noted.call.draws.drew, sizes, met

    def _is_right(self, noted: _Noted, costs: TriesReplays, like: _Noted | None) -> bool:
        """Makes the call again; ``like`` is one of its kind that was watched already."""
        given = _given_to(noted)
        if given is None:
            return False
        sizes = [size for _, (_, size) in self._numbered(noted)]

        def replay() -> Replay:
            return Replay.noted(noted.call, given, sizes, noted.random, noted.met)

        # Calls of one kind take the same memory: the first of them is watched, and the others are
        # only timed and compared.
        if like is None:
            watched = costs.watched_replay(replay())
            self._watch(noted, watched)
            # Both times: what gives other numbers every second time would be right the next.
            if not self._are_right(noted, watched.found, costs):
                return False
        else:
            noted.most = like.most
            noted.again = {key: (size, list(at)) for key, (size, at) in like.again.items()}
        trial = costs.timed_replay(replay())
        noted.seconds = trial.seconds
        return self._are_right(noted, trial.found, costs)

    def _are_right(self, noted: _Noted, found: Sequence[torch.Tensor | None], costs: TriesReplays) -> bool:
        """Whether these are what the call saved; of bytes, some may be what a library keeps and never writes."""
        for again, (_, (held, _)) in zip(found, self._numbered(noted), strict=True):
            original = _tensor_of(held)
            if original is None or again is None or again.dtype == torch.uint8:
                continue
            again, original = part_here(again), part_here(original)
            if again.shape != original.shape or again.dtype != original.dtype or not costs.is_same(again, original):
                return False
        return True

    def _watch(self, noted: _Noted, trial: WatchedReplay) -> None:
        """Notes what a call takes that was watched while it was made again."""
        trace = trial.trace
        noted.most = max(trace.curve, default=0)
        for at, tensor in enumerate(trial.found):
            for part in () if tensor is None else with_memory_in(tensor):
                allocation = _allocation_of(part, trace)
                if allocation is not None:
                    noted.again.setdefault(id(allocation), (allocation.num_bytes, []))[1].append(at)

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
        """The calls of compiled parts whose backward asks for something, in order."""
        asked: dict[int, int] = {}
        over: dict[int, int] = {}
        for span in self._small:
            if span.asked >= 0:
                asked[span.call] = min(asked.get(span.call, span.asked), span.asked)
                end = self._trace.now if span.end < 0 else span.end
                over[span.call] = max(over.get(span.call, end), end)
        found = []
        for number, noted in enumerate(self._noted):
            if number in asked and self._is_compiled(noted.call):
                found.append(CompiledCall(noted.call.name, noted.begin, noted.end, asked[number], over[number]))
        return tuple(found)

    def _is_compiled(self, call: Call) -> bool:
        return call.name.partition("#")[0] in self._names.compiled

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

    def _memory_kept_for(self, noted: _Noted) -> list[Allocation]:
        """Of what the call was given by its caller, and by collectives, where that was made in the step."""
        by_collectives = [self._collectives.memory.get(collective) for collective in noted.met]
        return [*noted.allocations, *(allocation for allocation in by_collectives if allocation is not None)]

    def _made_again(self, noted: _Noted, ends: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], int]:
        """What a replay of a call makes: bytes with the events at which they go, and bytes of which none is known."""
        again = []
        small = 0
        for size, numbers in noted.again.values():
            goes = [ends[self._hold_of[noted.first + at]] for at in numbers if noted.first + at in self._hold_of]
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


def _given_to(noted: _Noted) -> list[torch.Tensor] | None:
    """The tensors that a call was given; nothing where one of them is gone.

    Raises:
        NotRecomputable: one was written to since.
    """
    for argument in noted.call.arguments.tensors:
        argument.tensor()  # what is kept here is a copy, and shows no writes
    given: list[torch.Tensor] = []
    for held in noted.given:
        tensor = _tensor_of(held)
        if tensor is None:
            return None
        given.append(tensor)
    return given


def _allocation_of(tensor: torch.Tensor, trace: MemoryTrace) -> Allocation | None:
    """What ``trace`` knows of the memory of ``tensor``, if that has one block of memory."""
    if tensor.layout is torch.strided:
        return trace.allocation_of(tensor.untyped_storage())
    return None


def _tensor_of(held: Any) -> torch.Tensor | None:
    """The tensor itself, behind weak references and values."""
    if isinstance(held, weakref.ref):
        held = held()
    if isinstance(held, Unnamed | Value):
        return held.tensor
    if isinstance(held, View):
        if held.value.tensor is None:
            return None
        return held.read()
    if isinstance(held, torch.Tensor):
        return held
    return None
