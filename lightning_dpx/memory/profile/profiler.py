"""What a step saves, what it would cost to compute it again, and when it is needed: the input of every planner.

One run in which autograd keeps copies that are not counted tells how long each tensor lives anyway. One in which
everything is kept tells the rest, and repeats the operator behind every saved tensor once: that gives its time, and
proves on the spot that the result is the same. A :class:`CostModel` watches and tries, on a device or without one.

A step may run any number of backwards of its own: forces are gradients of an energy, a GAN optimizes twice. Whenever
one begins, what was saved since the last one is tried, because it will soon be gone::

    forward of F, grad(F, create_graph=True) -> B, backward of F and B

    saves F | tries F | asks for F, saves B | tries B | asks for B and F again

What is asked for several times is computed as often, unless something else keeps it in between: see ``saves``.
"""

import statistics
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import synchronize
from lightning_dpx.errors import PlanError
from lightning_dpx.memory.execute.calls import Argument, Replay, select_output
from lightning_dpx.memory.execute.gc_pause import COLLECTOR
from lightning_dpx.memory.execute.module_calls import CallNames, compiled_parts
from lightning_dpx.memory.execute.recipes import NotRecomputable
from lightning_dpx.memory.execute.saved_tensor_hooks import Rematerialisation, identity_of
from lightning_dpx.memory.execute.sharded_units import ShardedUnits
from lightning_dpx.memory.execute.values import Unnamed, Value, View, forget_recipe, used
from lightning_dpx.memory.profile.call_course import CallCourse
from lightning_dpx.memory.profile.compiled_code import with_compiled_code
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import Hold, Profile, Request, SavedCall, SavedStorage, SavedValue
from lightning_dpx.memory.profile.known_steps import KNOWN_STEPS
from lightning_dpx.memory.profile.noted_calls import NotedCalls, SmallPart
from lightning_dpx.memory.profile.planned_steps import measured_in_step, with_bookkeeping
from lightning_dpx.memory.tracing.memory_trace import Allocation, MemoryTrace
from lightning_dpx.progress import at
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.torch_compat import disable_current_modes, key_of, version_counter, view_base

Run = Callable[[], torch.Tensor | None]
_NO_LOSS = "There is nothing to plan: the loss does not depend on any parameter that requires grad."
_OFFLOADED = "it cannot be made again, and a step that runs a backward of its own offloads nothing"
_IN_CODE = "compiled code saves it, too"


class _Every:
    """Contains all names."""

    def __contains__(self, _name: object) -> bool:
        return True


class _Dead:
    """A value that forward itself let go, because nothing leads from it to the loss."""

    def __init__(self, value: Value, span: Allocation, saved: int, refused: str) -> None:
        self.name = value.name
        self.operator = value.operator
        self.num_bytes = value.held().nbytes
        self.span = span
        self.saved = saved
        self.sources = [weakref.ref(source) for source in value.sources]
        self.refused = "" if value.make is not None else refused or "it does not come from the graph"


class _Traced:
    """Tells when autograd lets go of it."""

    __slots__ = ("entry", "index", "notes")

    def __init__(self, entry: Value | View, index: int, notes: "_Profiler") -> None:
        self.entry = entry
        self.index = index
        self.notes = notes

    def __del__(self) -> None:
        self.notes.released(self.index, self.entry)


class _AsksItselfError(Exception):
    """A run in which nothing was kept has a backward of its own."""


class _Profiler(Rematerialisation):
    """Keeps everything and notes who asks for it; or, for the first run, nothing, or ``copies`` that are not counted.

    Attributes:
        asks_itself: Whether a backward of the step's own found nothing.
        spans: The memory of every value that was saved, by name.
        values: What was found out about them, and about what they are computed from.
        memories: The name of the first value in each storage, and its memory.
        asks: The event of every request, and what autograd holds that it was for.
        uses: By the event of a request, the one at which what autograd got is gone; of backwards of the step's own.
        numbers: By what autograd holds, the number of the value.
        ends: By what autograd holds, the event at which it let go of it.
    """

    def __init__(
        self,
        names: CallNames,
        trace: MemoryTrace,
        meter: CostModel,
        units: ShardedUnits,
        *,
        keep: bool,
        copies: bool = False,
    ) -> None:
        super().__init__(names)
        self.kinds = meter.kinds
        self._trace = trace
        self._meter = meter
        self._keep = keep
        self._copies = copies
        self.asks_itself = False
        self.spans: dict[str, Allocation | None] = {}
        self.saved: dict[str, int] = {}  # the events, by name
        self.values: list[SavedValue] = []
        self.memories: list[tuple[str, Allocation]] = []
        self.storages: dict[int, int] = {}  # by the id of the memory
        self.asks: list[tuple[int, int]] = []
        self.uses: dict[int, int] = {}
        self.is_over = False  # and the backward that comes is the last one
        self.numbers: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        # Weak, because the step lets go of values as it would without anybody watching.
        self._found: weakref.WeakKeyDictionary[Value, Allocation | None] = weakref.WeakKeyDictionary()
        self._untried: list[tuple[int, weakref.ref[Value]]] = []  # of what autograd holds
        self._tried: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()  # their numbers
        self._held: list[int] = []  # the event at which autograd got each of the things that it holds
        self._watched: list[Any] = []
        self._holders: dict[str, int] = {}  # how often autograd holds a value
        self.dead: list[_Dead] = []  # what forward itself lets go
        self.calls = NotedCalls(names, trace, self._saved_as, units)

    def _saved_as(self, tensor: torch.Tensor) -> Value | None:
        """The value that is that tensor, if autograd has saved it."""
        known = self._values.get(identity_of(tensor))
        return None if known is None else known()

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = self._packed(tensor)
        if self.names.in_compiled_code and tensor.layout is torch.strided:
            self._note_in_code(tensor)
        if self._keep:
            if isinstance(packed, _Traced):
                value = packed.entry if isinstance(packed.entry, Value) else packed.entry.value
                self.calls.packed(tensor, packed.entry, packed.index, value.name)
            else:
                held = self.calls.part(tensor, packed)
                self.calls.packed(tensor, packed, -1, "")
                return held
        return packed

    def _note_in_code(self, tensor: torch.Tensor) -> None:
        """Compiled code saves it: to drop it elsewhere would make no room."""
        identity = identity_of(tensor if view_base(tensor) is None else view_base(tensor))
        self.calls.in_code.add(identity)
        known = self._values.get(identity)
        value = None if known is None else known()
        if value is not None and value.make is not None:
            forget_recipe(value)
            self.refused[value.name] = _IN_CODE

    def _packed(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor if view_base(tensor) is None else view_base(tensor), nn.Parameter):
            return Unnamed(
                tensor.detach(), version_counter(tensor)
            )  # a fake one has no type, a frozen one needs no name
        packed = super().pack(tensor)
        if isinstance(packed, Unnamed):
            return packed
        value = packed if isinstance(packed, Value) else packed.value
        if value.name not in self.spans:
            self.spans[value.name] = self._trace.allocation_of(tensor.untyped_storage())
            if self._keep:
                self._found[value] = self.spans[value.name]
                self.saved[value.name] = self._trace.now
            elif self._copies:
                self._keep_copy(value, tensor if view_base(tensor) is None else view_base(tensor))
        if not self._keep:
            if not self._copies:
                value.let_go(tensor)
            return packed
        self._holders[value.name] = self._holders.get(value.name, 0) + 1
        self._untried.append((len(self._held), weakref.ref(value)))
        self._held.append(self._trace.now)
        return _Traced(packed, len(self._held) - 1, self)

    def _keep_copy(self, value: Value, tensor: torch.Tensor) -> None:
        """A backward of the step's own finds the numbers, and ``tensor`` goes when nothing else needs it."""
        if value.tensor is None:
            return
        with disable_current_modes(), torch.no_grad():
            copied = value.tensor.clone()
        value.let_go(tensor)
        value.keep(copied)
        self.know_again(value, copied)  # where a backward that records gradients saves it once more

    def consider(self, value: Value, node: Any | None, output: int) -> bool:
        if value.identity in self.calls.in_code:
            self.refused[value.name] = _IN_CODE
        elif self._keep and value not in self._tried:
            self.find_recipe(value, node, output)
            units = self.calls.units
            if units.paths and value.make is not None and not units.allows(value, value.name.rpartition(":")[0]):
                forget_recipe(value)
                self.refused[value.name] = "it is made from parameters of another unit of fully_shard"
        return False

    def keep_constant(self, tensor: torch.Tensor) -> Value:
        value = super().keep_constant(tensor)
        self._found[value] = self._trace.allocation_of(tensor.untyped_storage())  # what is made from it keeps it
        return value

    def keep_argument(self, argument: Argument, tensor: torch.Tensor) -> Value:
        """A copy of it that is not counted, so that the tensor itself goes when it would go without a plan."""
        with disable_current_modes(), torch.no_grad():
            argument.watch(tensor)
            value = super().keep_argument(argument, copy_as_it_lies(tensor))
        self._found[value] = self._trace.allocation_of(tensor.untyped_storage())
        return value

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, SmallPart):
            saved.asked()
            return super().unpack(saved.entry)
        if not isinstance(saved, _Traced):
            if not self._keep and not self._copies:
                self.asks_itself = True
                raise _AsksItselfError
            return super().unpack(saved)
        self.try_new_values()
        event = self._trace.mark()
        self.asks.append((event, saved.index))
        if self.is_over:
            return super().unpack(saved.entry)
        return self._copy_for(event, saved.entry, super().unpack(saved.entry))

    def _copy_for(self, event: int, entry: Value | View, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is not counted: autograd may ask once more, so only the end of what it got tells that it is done.

        Args:
            event: Of the request.
            entry: What was asked for.
            tensor: It.
        """
        value = entry if isinstance(entry, Value) else entry.value
        if value.tensor is None:
            return tensor
        with disable_current_modes(), torch.no_grad():
            copied = value.tensor.clone()
            found = copied if isinstance(entry, Value) else entry.look(copied)
        if torch.is_grad_enabled():
            self.know_again(value, copied)
        self._watched.append(weakref.ref(copied.untyped_storage(), lambda _: self._used(event)))
        return found

    def _used(self, event: int) -> None:
        self.uses[event] = self._trace.mark()

    def packed(self, node: Any, saved: Any) -> Any:
        found = super().packed(node, saved)
        return found.entry if isinstance(found, _Traced | SmallPart) else found

    def released(self, index: int, entry: Value | View) -> None:
        self.ends[index] = self._trace.mark()
        value = entry if isinstance(entry, Value) else entry.value
        if value in self._found:  # which no backward has begun to need
            self._let_die(value)

    def _let_die(self, value: Value) -> None:
        """A part of the graph goes while forward still runs: nothing leads from it to the loss.

        What only that part has saved goes as well, unless others are made from it.
        """
        self._holders[value.name] -= 1
        value.num_uses -= 1
        if self._holders[value.name] or value.num_uses:
            return
        span = self._found.pop(value)
        if span is not None:
            self.dead.append(_Dead(value, span, self.saved[value.name], self.refused.get(value.name, "")))

    def try_new_values(self) -> None:
        """A backward begins: makes again what was saved since the last one; from now on only autograd holds it."""
        if not self._untried:
            return
        self._holders.clear()
        synchronize(self._meter.device)
        try:
            with disable_current_modes(), self._meter.trying():
                tried = _measure(self, dict(self._found), self._tried, self._meter)
                if self.is_over and not self.asks:
                    self.calls.try_all(self._meter)
        finally:
            self._found.clear()  # also where memory runs out: then all that is held goes
        for index, reference in self._untried:
            value = reference()
            if value is not None and value in self._tried:
                self.numbers[index] = self._tried[value]
        self._untried.clear()
        for value in tried:
            value.learn(None, ())  # they would keep each other longer than autograd does

    def requests(self, end: int) -> tuple[list[Request], list[tuple[int, int]]]:
        """What autograd has asked for in a step of ``end`` events; and what it has saved, if that was not once each."""
        times = Counter(index for _, index in self.asks)
        requests = []
        for event, index in self.asks:
            if index in self.numbers:
                ends = self.ends if times[index] == 1 else {}
                released = ends.get(index, self.uses.get(event, self.ends.get(index, end)))
                requests.append(Request(event, self.numbers[index], released, index))
        if max(times.values(), default=0) < 2:
            return requests, []
        return requests, [(event, self.numbers[i]) for i, event in enumerate(self._held) if i in self.numbers]

    def calls_of(self, end: int) -> tuple[tuple[SavedCall, ...], tuple[Hold, ...]]:
        """What can be replayed as a whole in a step of ``end`` events, and what autograd holds."""
        asked = [-1] * len(self._held)
        for event, index in reversed(self.asks):
            asked[index] = event
        ends = [self.ends.get(index, end) for index in range(len(self._held))]
        calls = self.calls.calls(ends, self.storages, end)
        return calls, self.calls.holds(asked, ends) if calls else ()

    def offload_nothing(self) -> None:
        """A copy to the host's memory is awaited when the forward is over, and here a backward may come before that."""
        for number, value in enumerate(self.values):
            if value.copying:
                refused = _OFFLOADED if value.offloaded else value.refused
                self.values[number] = replace(value, copying=0.0, offloaded=False, refused=refused)


def profile_step(
    module: nn.Module,
    run: Run,
    device: torch.device,
    *,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    meter: CostModel | None = None,
    accumulates: bool = False,
) -> Profile:
    """Runs a step and tells what it saved; parameters, gradients, buffers and random generators stay as they were.

    Args:
        module: The model; names of values are relative to it.
        run: One forward that returns the loss, or any tensor that requires grad; ``None`` from a step that runs all
            its backwards itself.
        device: Where to look at the memory.
        backward: What to do with the result of ``run``.
        context: Entered for every forward, for example autocast.
        meter: What watches the step; one that measures on ``device`` unless given.
        accumulates: Whether every parameter that is trained has a gradient already, to which backward adds another
            that is there at the same time. Unless given, those have that have one now.

    Raises:
        PlanError: the step leads to no backward.
    """
    if (compiled := compiled_parts(module)) == [""]:
        warnings.warn(
            "The model is compiled as a whole, and keeps what its code saves: a plan has nothing to drop. Compile its "
            "blocks instead (block.compile() for each), which can be called again one by one.",
            stacklevel=2,
        )
    elif compiled:
        warnings.warn(
            f"{compiled[0]} is compiled ({len(compiled)} such parts): what compiled code takes inside itself is "
            "predicted from its operators one by one, and it is kept or called again as a whole. The peak may be "
            "another one.",
            stacklevel=2,
        )
    with COLLECTOR.resting():  # it would search all that is watched, again and again, for a third of the time
        meter = meter or CostModel(device)
        try:
            return _profiled(module, run, meter, backward, context, accumulates, bool(compiled))
        finally:
            meter.forget_reach()


def _profiled(
    module: nn.Module,
    run: Run,
    meter: CostModel,
    backward: Callable[[torch.Tensor], None],
    context: Callable[[], AbstractContextManager[Any]],
    accumulates: bool,
    compiled: bool,
) -> Profile:
    with disable_current_modes():
        meter.bookkeeping()  # before hooks of ours are on
    forward = FreshForward(module, run, context)
    timer = meter.timer(module)
    times = None
    if meter.times_steps:
        at("timing steps")
        with uncompiled(), torch.enable_grad():
            times = timer.least(forward, backward)
    had_gradients = accumulates or any(parameter.grad is not None for parameter in module.parameters())
    names = CallNames(module)
    try:
        # A step by hand always runs backwards, and one that is broken off would leave half of its optimizers' work.
        at("watching a forward")
        by_hand = not getattr(module, "automatic_optimization", True)
        try:
            with uncompiled(), meter.preserve_module_state(module), torch.enable_grad():
                lifetimes, operators = _natural_lifetimes(names, run, meter, context, copies=by_hand)
        except _AsksItselfError as asked:
            traceback.clear_frames(asked.__traceback__)
            with uncompiled(), meter.preserve_module_state(module), torch.enable_grad():
                lifetimes, operators = _natural_lifetimes(names, run, meter, context, copies=True)
        with uncompiled(), meter.preserve_module_state(module), torch.enable_grad():
            at("watching a step")
            COLLECTOR.collect_young()
            names.again = _Every()
            _stand_in_for_gradients(module, accumulates)
            profile = _full_step(module, names, run, meter, backward, context, lifetimes, operators)
    finally:
        names.listener = None
        names.remove()
    if compiled and times is not None and not by_hand:
        at("watching compiled code")

        def step() -> None:
            result = forward()
            if result is not None:
                backward(result)

        profile = with_compiled_code(profile, module, step, meter.device, accumulates=had_gradients)
    bookkeeping = meter.bookkeeping()
    if times is None:
        return with_bookkeeping(profile, bookkeeping)
    profile = replace(profile, step_seconds=times[0], forward_seconds=times[1])
    if not (compiled or by_hand or profile.saves):
        at("timing planned steps")
        with torch.enable_grad():
            measure = partial(
                measured_in_step, profile, module, timer, forward=forward, backward=backward, known=bookkeeping
            )
            bookkeeping = KNOWN_STEPS.measured_once(profile, module, measure)
        if bookkeeping.step_seconds:
            step_seconds = min(times[0], bookkeeping.step_seconds)
            profile = replace(profile, step_seconds=step_seconds, forward_seconds=min(times[1], step_seconds))
    return with_bookkeeping(profile, bookkeeping)


class FreshForward:
    """A forward of a step that finds no gradients, as it is without anybody who watches."""

    def __init__(self, module: nn.Module, run: Run, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._module = module
        self._run = run
        self._context = context

    def __call__(self) -> torch.Tensor | None:
        for parameter in self._module.parameters():
            parameter.grad = None
        with self._context():
            result = self._run()
        if result is not None and not result.requires_grad:
            raise PlanError(_NO_LOSS)
        return result


def _stand_in_for_gradients(module: nn.Module, accumulates: bool) -> None:
    """Zeros in place of the gradients that backward will add to; elsewhere it leaves its own, as in a first step."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = torch.zeros_like(parameter.grad)
        elif accumulates and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


class _Gradients:
    """The memory of the parameters' gradients, also of those that the step forgets: it is no activation.

    Attributes:
        allocations: Ids of what they have occupied.
    """

    def __init__(self, module: nn.Module, trace: MemoryTrace) -> None:
        self._parameters = list(module.parameters())
        self._trace = trace
        self._handles: list[Any] = []
        self.allocations: set[int] = set()

    def __enter__(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._note))  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided:
            self.allocations.add(id(self._trace.allocation_of(gradient.untyped_storage())))


def _natural_lifetimes(
    names: CallNames,
    run: Run,
    meter: CostModel,
    context: Callable[[], AbstractContextManager[Any]],
    *,
    copies: bool = False,
) -> tuple[dict[str, int | None], int]:
    """The operator after which each value is no longer used by the run itself, and the number of operators.

    Raises:
        _AsksItselfError: the run has a backward of its own, for which ``copies`` of what autograd saves must be kept.
    """
    trace = meter.trace().follow_storages_only()
    profiler = _Profiler(names, trace, meter, ShardedUnits(nn.Module()), keep=False, copies=copies)
    with trace, context(), profiler.active():
        result = run()
        count = len(trace.operators)
    if profiler.asks_itself:  # and the error was caught
        raise _AsksItselfError
    lives = {name: (span.died_operator if span is not None else None) for name, span in profiler.spans.items()}
    del result
    return lives, count


def _full_step(
    module: nn.Module,
    names: CallNames,
    run: Run,
    meter: CostModel,
    backward: Callable[[torch.Tensor], None],
    context: Callable[[], AbstractContextManager[Any]],
    lifetimes: dict[str, int | None],
    operators: int,
) -> Profile:
    trace = meter.trace()
    profiler = _Profiler(names, trace, meter, ShardedUnits(module), keep=True)
    names.listener = profiler.calls
    gradients = _Gradients(module, trace)
    with trace, gradients:
        with context(), profiler.active():
            result = run()
        synchronize(meter.device)
        forward_events = trace.now
        forward_operators = len(trace.operators)
        forward_seconds = trace.seconds
        asks_itself = bool(profiler.asks)
        profiler.is_over = True
        same = forward_operators == operators
        if result is None:  # by hand; without a backward that needs what was saved, all of it is a forward
            forward_events = profiler.asks[0][0] if profiler.asks else forward_events
        elif not result.requires_grad:
            raise PlanError(_NO_LOSS)
        else:
            profiler.try_new_values()
            backward(result)
        synchronize(meter.device)
    end = trace.now
    del result
    if asks_itself:
        profiler.offload_nothing()
    storages = []
    for name, span in profiler.memories:
        unused = lifetimes.get(name) if same else forward_operators  # it is not known: it may be used to the last
        freed = end if span.died is None else min(span.died, end)  # some go with the step itself
        last_forward = trace.operators[unused - 1] if unused else None
        storages.append(SavedStorage(span.num_bytes, freed if last_forward is None else last_forward, freed))
    requests, saves = profiler.requests(end)
    calls, holds = ((), ()) if asks_itself or saves else profiler.calls_of(end)
    return Profile(
        values=tuple(profiler.values),
        storages=tuple(storages),
        requests=tuple(requests),
        curve=tuple(trace.passing(gradients.allocations)[:end]),
        forward_events=forward_events,
        step_seconds=trace.seconds,
        forward_seconds=forward_seconds,
        offloading_room=meter.offloading_room(),
        basis=meter.basis,
        saves=tuple(saves),
        operators=tuple(zip(trace.operators, (func.overloadpacket.__name__ for func in trace.called), strict=True)),
        calls=calls,
        holds=holds,
    )


def _measure(
    profiler: _Profiler,
    found: dict[Value, Allocation | None],
    tried: "weakref.WeakKeyDictionary[Value, int]",
    meter: CostModel,
) -> list[Value]:
    """Makes every value again that can be; in the order of backward, because that is when it will happen.

    Args:
        profiler: Gets what is found out.
        found: The values, with their memory.
        tried: The numbers of those of earlier backwards; gets those of the new ones.
        meter: Tries them.

    Returns:
        The new values, with those that are not saved on the way to them.
    """
    compact, seconds = _compressed_masks(found, meter)
    order: dict[Value, int] = dict(tried)
    new = _in_order(found, order, len(profiler.values))
    trials = _Trials(order, meter)
    trials.compact = compact
    trials.seconds.update(seconds)
    trials.refused = {value: "" if value.make is not None else profiler.refused.get(value.name, "") for value in new}
    _try_all(found, trials, meter)
    _judge_calls(found, trials.refused)
    if meter.offloads:
        _offload_refused(found, trials, meter)
    trials.seconds = _typical(trials.seconds, trials.sizes)
    _number_storages(found, trials, profiler, meter.device)
    for value in new:
        why = trials.refused[value] if value in found else ""  # on the way to others, it is made again whatever it is
        profiler.values.append(trials.saved_value(value, why, profiler.saved.get(value.name, 0)))
    tried.update((value, order[value]) for value in new)
    # Whether what has gone in a step with backwards of its own is needed in another one, who knows.
    if profiler.is_over:
        profiler.values += [_dead_value(dead, order, profiler.storages, profiler.memories) for dead in profiler.dead]
    return new


class _Trials:
    """What is found out about values when they are made again.

    Args:
        order: Their numbers.
        meter: Tries them.

    Attributes:
        order: Likewise.
        seconds: That they take.
        sizes: Their bytes on the device.
        refused: Why they cannot be made again; empty if they can.
        memory: What they take beyond their own bytes.
        compact: Bytes of those that are masks, compressed.
        copying: Seconds of a copy to the host's memory, of those that may go there.
        offloaded: Those that go there because nothing else is possible.
        storages: The number of the storage that each is in, of those that the step has allocated.
    """

    def __init__(self, order: dict[Value, int], meter: CostModel) -> None:
        self.order = order
        self.seconds = dict.fromkeys(order, 0.0)
        self.sizes = {value: _bytes_on(meter.device, value) for value in order}
        self.refused: dict[Value, str] = {}
        self.memory = _Beside()
        self.compact: dict[Value, int] = {}
        self.copying: dict[Value, float] = {}
        self.offloaded: set[Value] = set()
        self.storages: dict[Value, int] = {}

    def saved_value(self, value: Value, refused: str, saved: int) -> SavedValue:
        """``value`` for planners; ``saved`` is the event before which it was."""
        is_offloaded = value in self.offloaded
        return SavedValue(
            name=value.name,
            operator=value.operator,
            num_bytes=self.sizes[value],
            storage=self.storages.get(value, -1),
            inputs=() if is_offloaded else tuple(self.order[source] for source in value.sources),
            seconds=self.seconds[value],
            refused=refused,
            compact=self.compact.get(value, 0),
            offloaded=is_offloaded,
            copying=self.copying.get(value, 0.0),
            saved=saved,
            call=value.make.call.name if isinstance(value.make, Replay) else "",
            beside=self.memory.beside.get(value, 0),
            picked=value.make is select_output and not is_offloaded,
            stretches=self.memory.stretches_of(value),
            gone=self.memory.gone_of(value),
            state=value.make.call.draws.num_bytes if isinstance(value.make, Replay) else 0,
        )


def _compressed_masks(
    found: dict[Value, Allocation | None], meter: CostModel
) -> tuple[dict[Value, int], dict[Value, float]]:
    """Bytes and seconds of the masks among ``found``, compressed."""
    compact = dict[Value, int]()
    seconds = dict[Value, float]()
    for value, span in found.items():
        if value.operator or span is None:
            continue
        known = meter.compressed(value, span)
        if known is None:
            continue
        compact[value], seconds[value] = known
        if value.make is select_output:  # masks are small in another way than by making their call again
            value.inputs[0].make.forgo(value.inputs[1])
            forget_recipe(value)
    return compact, seconds


def _try_all(found: dict[Value, Allocation | None], trials: _Trials, meter: CostModel) -> None:
    """Makes them again, and notes why where that fails."""
    refused = trials.refused
    for number, value in enumerate(reversed(list(found))):
        at("trying operators", number, len(found))
        if value.make is None:
            refused[value] = "" if value in trials.compact else refused[value] or "it does not come from the graph"
            continue
        try:
            # Also what is elsewhere or was there before: others may be made from it.
            refused[value] = _try(value, meter, trials.seconds, trials.sizes, trials.memory)
        except torch.OutOfMemoryError:
            raise  # fewer rows may do, and the caller knows how to get them
        except Exception as error:  # noqa: BLE001  a call of a module runs whatever its author wrote
            refused[value] = f"{value.operator} failed when repeated: {error}"


def _offload_refused(found: dict[Value, Allocation | None], trials: _Trials, meter: CostModel) -> None:
    """What cannot be made again may still go to the host's memory and come back."""
    named = [value for value, span in found.items() if value.name and span is not None]
    trials.copying = _copying(named, meter)
    trials.offloaded = {value for value in trials.copying if trials.refused[value]}
    for value in trials.offloaded:
        trials.seconds[value] = 2 * trials.copying[value]
        trials.refused[value] = ""


def _number_storages(
    found: dict[Value, Allocation | None], trials: _Trials, profiler: _Profiler, device: torch.device
) -> None:
    """Values in one storage get the same number; those in none that the step has allocated are refused."""
    for value, span in found.items():
        if span is None:
            here = value.tensor is None or value.tensor.device == device
            why = "it was there before the step" if here else "it is on another device"
            trials.refused[value] = trials.refused[value] or why
            continue
        if id(span) not in profiler.storages:
            profiler.storages[id(span)] = len(profiler.memories)
            profiler.memories.append((value.name, span))
        trials.storages[value] = profiler.storages[id(span)]


def _dead_value(
    dead: _Dead, order: dict[Value, int], storages: dict[int, int], spans: list[tuple[str, Allocation]]
) -> SavedValue:
    """It is never asked for, so that it can be dropped for nothing; that it comes out the same need not be shown."""
    if id(dead.span) not in storages:
        storages[id(dead.span)] = len(spans)
        spans.append((dead.name, dead.span))
    sources = [source for reference in dead.sources if (source := reference()) is not None]
    return SavedValue(
        dead.name,
        dead.operator,
        dead.num_bytes,
        storages[id(dead.span)],
        tuple(order[source] for source in sources if source in order),
        0.0,
        dead.refused,
        saved=dead.saved,
    )


def _judge_calls(found: Collection[Value], refused: dict[Value, str]) -> None:
    """A call that is wrong in one value is trusted in none; in its scratch memory, if it is right in the others."""
    picked = [value for value in refused if value.make is select_output]
    unfaithful = {value.inputs[0] for value in picked if refused[value] and not _is_scratch(value)}
    for value in picked:
        if value.inputs[0] in unfaithful:
            refused[value] = refused[value] or "its module gave other numbers elsewhere when it was called again"
    right = {
        value.inputs[0]
        for value in picked
        if value in found and not refused[value] and value.tensor is not None and value.tensor.is_floating_point()
    }
    for value in picked:
        if _is_scratch(value) and value.inputs[0] in right:
            refused[value] = ""


def _typical(seconds: dict[Value, float], sizes: dict[Value, int]) -> dict[Value, float]:
    """The median time of all values that the same operator makes from as many bytes: one of them may have been hit by
    whatever else the machine did at that moment, and a plan for twenty equal layers should not depend on it."""
    alike: dict[tuple[Any, ...], list[float]] = {}
    kinds = {value: (value.operator, sizes[value], *(sizes[source] for source in value.sources)) for value in seconds}
    for value, spent in seconds.items():
        if spent:
            alike.setdefault(kinds[value], []).append(spent)
    medians = {kind: statistics.median(spent) for kind, spent in alike.items()}
    return {value: medians[kinds[value]] if spent else spent for value, spent in seconds.items()}


def _in_order(found: Iterable[Value], order: dict[Value, int], first: int) -> list[Value]:
    """Numbers ``found`` and what they are computed from, but for what is in ``order`` already; inputs first."""
    new: list[Value] = []
    for value in found:
        stack = [value]
        while stack:
            top = stack[-1]
            missing = [source for source in top.sources if source not in order]
            if missing:
                stack += missing
                continue
            stack.pop()
            if top not in order:
                order[top] = first + len(new)
                new.append(top)
    return new


class _Beside:
    """What values take beyond themselves while they are made.

    Attributes:
        beside: Bytes at the most.
        courses: Of calls.
    """

    def __init__(self) -> None:
        self.beside: dict[Value, int] = {}
        self.courses: dict[Value, CallCourse] = {}

    def stretches_of(self, value: Value) -> tuple[int, ...]:
        """Of a call."""
        return self.courses[value].stretches if value in self.courses else ()

    def gone_of(self, value: Value) -> int:
        """The first stretch of its call without a tensor that is picked."""
        course = self.courses.get(value.inputs[0]) if value.make is select_output else None
        return 0 if course is None else course.gone.get(value.inputs[1], len(course.stretches))


def _try(value: Value, meter: CostModel, seconds: dict[Value, float], sizes: dict[Value, int], memory: _Beside) -> str:
    """Repeats the operator of ``value``, and unsaved ones on the way; says what is wrong with the result."""
    stack = [source for source in value.sources if source.tensor is None]
    while stack:
        top = stack[-1]
        if top.tensor is not None:
            stack.pop()
            continue
        missing = [source for source in top.sources if source.tensor is None]
        if missing:
            stack += missing
            continue
        if isinstance(top.make, Replay):
            for argument in top.make.call.arguments:
                argument.tensor()  # refuses what was written to since; what is kept here is a copy
            memory.courses[top] = _course_of(top, meter)
        top.tensor, seconds[top], most = meter.tried(top)
        sizes[top] = 0 if _is_view_of(top) else _bytes_on(meter.device, top)
        memory.beside[top] = max(0, most - sizes[top])
        stack.pop()
        used(top)
    again, seconds[value], most = meter.tried(value)
    memory.beside[value] = max(0, most - sizes[value])
    used(value)
    original = value.held()  # the profile keeps everything
    operator = value.operator or "the call that saves it"
    if again.shape != original.shape or again.dtype != original.dtype:
        return f"{operator} gave another shape or dtype when repeated"
    return "" if meter.is_same(again, original) else f"{operator} gave other numbers when repeated"


def _course_of(call: Value, meter: CostModel) -> CallCourse:
    try:
        return meter.course_of(call)
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
        raise NotRecomputable(f"there was no room to try {call.operator} once more") from None


def copy_as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of ``tensor``: what a call makes of its arguments may depend on them."""
    whole = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            whole = whole.narrow(dim, 0, 1)
    # Where windows overlap, each place is written several times with the same number.
    copied = tensor.new_empty_strided(whole.size(), whole.stride())  # of a fake a fake one
    return copied.copy_(whole).expand(tensor.size())


def _bytes_on(device: torch.device, value: Value) -> int:
    """What the tensor of ``value`` takes there: nothing if it is on another device, as in parts that are shifted."""
    return value.tensor.nbytes if value.tensor is not None and value.tensor.device == device else 0


def _copying(values: Iterable[Value], meter: CostModel) -> dict[Value, float]:
    """What a copy of each takes; equal sizes are measured once."""
    by_size: dict[int, float] = {}
    found: dict[Value, float] = {}
    for value in values:
        if (tensor := value.tensor) is not None:
            if tensor.nbytes not in by_size:
                by_size[tensor.nbytes] = meter.copy_seconds(tensor)
            found[value] = by_size[tensor.nbytes]
    return found


def _is_scratch(value: Value) -> bool:
    """Whether it may be what a library keeps for itself: bytes, some of which are never written or read.

    They differ from call to call; that the call's other results are the same tells that they will do.
    """
    return (
        value.make is select_output
        and not value.operator
        and value.tensor is not None
        and value.tensor.dtype == torch.uint8
    )


def _is_view_of(value: Value) -> bool:
    if isinstance(value.make, Replay):
        return False
    address = key_of(value.held().untyped_storage())
    given = [*(source.tensor for source in value.sources), *value.inputs]
    given += [one.tensor for one in value.inputs if isinstance(one, Unnamed)]
    return any(key_of(one.untyped_storage()) == address for one in given if isinstance(one, torch.Tensor))
