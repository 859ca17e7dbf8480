"""What a step saves, what it would cost to compute it again, and when it is needed: the input of every planner.

One forward in which autograd keeps nothing tells how long each tensor lives anyway; where that runs a backward of its
own, autograd keeps copies that are not counted. A step in which everything is kept tells the rest, and repeats the
operator behind every saved tensor once: that gives its time, and proves on the spot that the result is the same. A
:class:`CostModel` watches and tries, on a device or without one.

A step may run any number of backwards of its own: forces are gradients of an energy, a GAN optimizes twice. Whenever
one begins, what was saved since the last one is tried, because it will soon be gone::

    forward of F, grad(F, create_graph=True) -> B, backward of F and B

    saves F | tries F | asks for F, saves B | tries B | asks for B and F again

What is asked for several times is computed as often, unless something else keeps it in between: see ``saves``.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import is_host, keeps_workspaces, raises_out_of_memory, synchronize, take_workspaces
from lightning_dpx.errors import PlanError
from lightning_dpx.memory.execute.call_counts import CallCounts
from lightning_dpx.memory.execute.module_calls import CallNames, compiled_parts, openable
from lightning_dpx.memory.execute.recipes import own_recipes
from lightning_dpx.memory.execute.sharded_units import ShardedUnits
from lightning_dpx.memory.profile.ambient_autocast import AmbientAutocast
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping
from lightning_dpx.memory.profile.bookkeeping_in_step import measured_in_step, with_bookkeeping
from lightning_dpx.memory.profile.compiled_code import with_compiled_code
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import IsWorth, Profile, SavedStorage
from lightning_dpx.memory.profile.held_output import HeldOutput, end_run
from lightning_dpx.memory.profile.known_steps import KNOWN_STEPS
from lightning_dpx.memory.profile.lifetimes import AsksItselfError, Lifetimes, natural_lifetimes
from lightning_dpx.memory.profile.profiling_hooks import ProfilingHooks
from lightning_dpx.memory.profile.step_timer import StepTimer
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.progress import at
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.python_objects.gc_pause import COLLECTOR
from lightning_dpx.torch_compat import disable_current_modes

Run = Callable[[], torch.Tensor | None]
_NO_LOSS = "There is nothing to plan: the loss does not depend on any parameter that requires grad."


class NotWorthProfilingError(PlanError):
    """A step was timed, and takes too long for anything else of it to matter.

    Args:
        seconds: That it takes.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"A step takes {seconds:.3g} s, which is too long to be planned for.")
        self.seconds = seconds


class _Every:
    """Contains all names."""

    def __contains__(self, _name: object) -> bool:
        return True


@raises_out_of_memory
def profile_step(
    module: nn.Module,
    run: Run,
    device: torch.device,
    *,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    costs: CostModel | None = None,
    accumulates: bool = False,
    counts_gradients: bool = False,
    is_worth: IsWorth | None = None,
) -> Profile:
    """Runs a step and tells what it saved; parameters, gradients, buffers and random generators stay as they were.

    Args:
        module: The model; names of values are relative to it.
        run: One forward that returns the loss, or any tensor that requires grad; ``None`` from a step that runs all
            its backwards itself. A :class:`HeldOutput` where its caller holds what else it returns.
        device: Where to look at the memory.
        backward: What to do with the result of ``run``.
        context: Entered for every forward, for example autocast.
        costs: What watches the step; one that measures on ``device`` unless given.
        accumulates: Whether every parameter that is trained has a gradient already, to which backward adds another
            that is there at the same time. Unless given, those have that have one now.
        counts_gradients: Whether new gradients of parameters count as activations do, from when backward makes them to
            the end of the step; those of trained parameters that it makes none for count all the time.
        is_worth: Asked with the seconds of the step, where it is timed, before anything else is found out.

    Raises:
        NotWorthProfilingError: ``is_worth`` says no. There is no profile of it then that anything could keep.
        PlanError: the step leads to no backward.
    """
    # Hooks inside a compiled part would be compiled with it, so nothing in there gets a name: such
    # a part is kept, called again as a whole, or saves less.
    compiled = bool(compiled_parts(module))
    autocast = AmbientAutocast()
    step = _Step(
        module=module,
        run=run,
        backward=backward,
        context=autocast.entered_by(context),
        costs=costs or CostModel(device),
        accumulates=accumulates,
        counts_gradients=counts_gradients,
        is_worth=is_worth,
    )
    # The garbage collector would search all that is watched, again and again, for a third of the time.
    with COLLECTOR.resting(), autocast.suspended():
        try:
            step.costs.note_sizes(module)
            # What libraries keep from their first call on is no part of the step that comes first.
            if step.costs.times_steps and keeps_workspaces(device):
                take_workspaces(device)
            return _profiled(step, compiled)
        finally:
            end_run(run)
            step.costs.forget_reach()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The step that is profiled, and what watches it: the arguments of :func:`profile_step`."""

    module: nn.Module
    run: Run
    backward: Callable[[torch.Tensor], None]
    context: Callable[[], AbstractContextManager[Any]]
    costs: CostModel
    accumulates: bool
    counts_gradients: bool
    is_worth: IsWorth | None

    @property
    def forward(self) -> "FreshForward":
        """Its forward, as that of a step after ``zero_grad``."""
        return FreshForward(self.module, self.run, self.context)

    @property
    def by_hand(self) -> bool:
        """Whether the step runs its backwards itself."""
        return not getattr(self.module, "automatic_optimization", True)

    @property
    def finds_gradients(self) -> bool:
        """Whether backward adds to gradients that are there."""
        return self.accumulates or any(parameter.grad is not None for parameter in self.module.parameters())

    def stand_in_for_gradients(self) -> None:
        """Zeros in place of the gradients that backward adds to; elsewhere it leaves its own, as in a first step."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)
            elif self.accumulates and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def __call__(self, look: Callable[[torch.Tensor], None]) -> None:
        """Forward and backward; ``look`` gets what the forward returns, before the backward."""
        result = self.forward()
        if result is not None:
            look(result)
            self.backward(result)


def _profiled(step: _Step, compiled: bool) -> Profile:
    """All that is found out about a step, some of whose parts may be compiled."""
    costs = step.costs
    with disable_current_modes():
        # It runs a small model for real, which the modes of fake tensors and of whoever calls this
        # would change; the figure is remembered, and asked for again below.
        costs.bookkeeping()  # before hooks of ours are on
    timer = costs.timer(step.module)
    # Steps are timed before anything watches them, and uncompiled, as they are watched below: the
    # extra time of a plan is a share of the same operators.
    times = None
    if costs.times_steps:
        at("timing steps")
        with uncompiled(), torch.enable_grad():
            times = timer.least(step.forward, step.backward)
        if step.is_worth is not None and not step.is_worth(times[0]):
            raise NotWorthProfilingError(times[0])
    accumulates = step.finds_gradients  # the steps below leave some
    profile, names = _watched(step)
    if compiled:
        runs = times is not None and is_host(costs.device)
        profile = _with_compiled_code(step, profile, names, accumulates=accumulates, runs=runs)
    bookkeeping = costs.bookkeeping()
    if times is None:
        return with_bookkeeping(profile, bookkeeping)
    profile = replace(profile, step_seconds=times[0], forward_seconds=times[1])
    # How often planned steps are timed depends on the times, which differ between processes: a
    # step that meets the others in a collective would wait for them for ever.
    if timer.communicates:
        profile = replace(profile, communicates=True)
    # Planned steps are measured as they are followed, and those with compiled parts are not.
    elif not (compiled or step.by_hand):
        profile, bookkeeping = _with_planned_steps(step, profile, timer, bookkeeping)
    return with_bookkeeping(profile, bookkeeping)


def _with_compiled_code(step: _Step, profile: Profile, names: CallNames, *, accumulates: bool, runs: bool) -> Profile:
    """The profile of a step that was watched uncompiled, with what its compiled parts take and could save less."""
    if runs and not step.by_hand:
        at("watching compiled code")
        return with_compiled_code(profile, step.module, names, step, step.costs.device, accumulates=accumulates)
    warnings.warn(
        "What compiled code takes inside itself is predicted from its operators one by one, as it was not run, and the "
        "peak may be another one.",
        stacklevel=5,
    )
    return replace(profile, codes=())


def _with_planned_steps(
    step: _Step, profile: Profile, timer: StepTimer, known: Bookkeeping
) -> tuple[Profile, Bookkeeping]:
    """The profile, and what planned steps spend beside their operators, from some that were run.

    Args:
        step: What was profiled.
        profile: With the times of its steps.
        timer: Times others.
        known: What bookkeeping takes elsewhere.
    """
    at("timing planned steps")
    with torch.enable_grad():
        measure = partial(
            measured_in_step,
            profile,
            step.module,
            timer,
            forward=step.forward,
            backward=step.backward,
            known=known,
            hides=not is_host(step.costs.device),
        )
        bookkeeping = KNOWN_STEPS.measured_once(profile, step.module, step.costs.device, measure)
    if bookkeeping.step_seconds:
        # What others do on the processor only ever adds to a time, so the lesser of both counts.
        step_seconds = min(profile.step_seconds, bookkeeping.step_seconds)
        forward_seconds = min(profile.forward_seconds, step_seconds)
        profile = replace(profile, step_seconds=step_seconds, forward_seconds=forward_seconds)
    return profile, bookkeeping


def _watched(step: _Step) -> tuple[Profile, CallNames]:
    """The step operator by operator: first how long its tensors live by themselves, then all that it saves.

    Returns:
        What was found, and what has told of calls, which knows by now what is one code.
    """
    opened = openable(step.module)
    while True:
        names = CallNames(step.module, opened=opened)
        profile = _watched_with(names, step)
        if profile is not None and not names.closed:
            return profile, names
        # Compiled functions that call modules of their own: in a step that is compiled there are no hooks on these.
        opened = opened - names.closed


def _watched_with(names: CallNames, step: _Step) -> Profile | None:
    """The step with its calls told by ``names``; ``None`` where code has called modules with hooks."""
    try:
        if names.is_distributed and not step.costs.times_steps:
            # The first time an operator meets distributed tensors, torch runs it on fakes to find what its
            # parts will be. In a step on fakes these would count, as if they were operators of the step.
            _watched_by(names, step)
        return _watched_by(names, step)
    finally:
        names.listener = None
        names.remove()


def _watched_by(names: CallNames, step: _Step) -> Profile | None:
    """The step operator by operator, its calls told by ``names``, as :func:`_watched_with` gives it."""
    costs = step.costs
    counts = CallCounts()
    names.listener = None
    names.again = {}
    try:
        # A step by hand always runs backwards, and one that is broken off would leave half of its optimizers' work.
        at("watching a forward")
        try:
            with uncompiled(), costs.preserve_module_state(step.module), torch.enable_grad():
                lifetimes = natural_lifetimes(names, step.run, costs, step.context, copies=step.by_hand)
        except AsksItselfError as asked:
            # Nothing was kept for the backward that the step runs itself: it runs again, with
            # copies. The frames of the error would hold tensors of the run that was broken off.
            traceback.clear_frames(asked.__traceback__)
            with uncompiled(), costs.preserve_module_state(step.module), torch.enable_grad():
                lifetimes = natural_lifetimes(names, step.run, costs, step.context, copies=True)
        end_run(step.run)
        if names.closed:
            return None
        with uncompiled(), costs.preserve_module_state(step.module), torch.enable_grad():
            at("watching a step")
            # Python's collector rests, so what the last run has left in cycles is still there, and
            # would be there beside all of the next one.
            COLLECTOR.collect_young()
            # All calls are noted: which of them a value needs, or is worth a replay, is what is to
            # be found out.
            names.again = _Every()
            step.stand_in_for_gradients()
            counts = CallCounts(names.parts)
            return _full_step(step, names, lifetimes, counts)
    finally:
        counts.remove()


class FreshForward:
    """A forward that finds no gradients on the parameters, as a training step does after ``zero_grad``."""

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
        self._new: list[tuple[Allocation, int]] = []  # with the event at which it becomes a parameter's gradient
        self._found = {id(parameter) for parameter in self._parameters if parameter.grad is not None}

    def __enter__(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._note))  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        # A sparse gradient has no storage that could be looked for.
        if gradient is not None and gradient.layout is torch.strided:
            # The trace holds its allocations, so no id is given twice.
            allocation = self._trace.allocation_of(gradient.untyped_storage())
            self.allocations.add(id(allocation))
            if allocation is not None and id(parameter) not in self._found:
                self._new.append((allocation, self._trace.now))

    def adding(self, curve: Sequence[int]) -> Iterator[tuple[int, int]]:
        """What is there beside ``curve`` if each is added to another one: events and bytes."""
        gone = {id(allocation): event for allocation, event in self._new}
        bytes_with = self._trace.passing(self.allocations, gone)
        for event, (without, num_bytes) in enumerate(zip(curve, bytes_with, strict=False)):
            if num_bytes > without:
                yield event, num_bytes - without

    def counted(self, end: int, device: torch.device) -> tuple[int, ...]:
        """The curve of the step up to the event ``end``, with the new gradients in it from when they come."""
        # Those that parameters have by now: a hook may have put others in their places. What became of earlier ones
        # the trace knows by itself.
        lasting: dict[int, int] = {}
        absent = 0
        for parameter in self._parameters:
            if not parameter.requires_grad or id(parameter) in self._found:
                continue
            gradient = parameter.grad
            allocation = None
            if gradient is not None and gradient.layout is torch.strided:
                allocation = self._trace.allocation_of(gradient.untyped_storage())
            if allocation is not None:
                lasting[id(allocation)] = end
            elif parameter.device == device:
                # Other steps may make one, and nothing tells when.
                absent += parameter.nbytes
        return tuple(num_bytes + absent for num_bytes in self._trace.passing(gone=lasting)[:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """Where the parts of a watched step begin and end.

    Attributes:
        forward_events: The number of events of its forward.
        forward_operators: The number of operators of that.
        forward_seconds: That these took.
        asks_itself: Whether the step runs a backward of its own.
        end: The event with which the step ends.
        returned: Bytes of what it returns: of the memory, and of the tensors in it.
    """

    forward_events: int
    forward_operators: int
    forward_seconds: float
    asks_itself: bool
    end: int
    returned: tuple[int, int]


def _full_step(step: _Step, names: CallNames, lifetimes: Lifetimes, counts: CallCounts) -> Profile:
    """What a forward and its backward save, ask for and take, with everything kept.

    Args:
        step: Whose.
        names: Tells which module call is running.
        lifetimes: How long its tensors live by themselves.
        counts: Counts calls.
    """
    costs = step.costs
    trace = costs.trace()
    hooks = ProfilingHooks(names, trace, costs, ShardedUnits(step.module))
    names.listener = hooks.calls
    gradients = _Gradients(step.module, trace)
    course = _run_with_everything_kept(step, hooks, trace, gradients, counts)
    end = course.end
    if course.asks_itself:
        hooks.found.offload_nothing()
    requests, saves = hooks.log.requests(end)
    # A call cannot be made again before it is over, and a replay gives each tensor once: neither
    # will do where backwards run within the forward or ask again.
    calls, holds = ((), ()) if course.asks_itself or saves else hooks.calls_of(end)
    codes = () if course.asks_itself or saves else hooks.calls.compiled()
    curve = tuple(trace.passing(gradients.allocations)[:end])
    adding = dict(gradients.adding(curve))
    if step.counts_gradients:
        apart = curve
        curve = gradients.counted(end, costs.device)
        # Beside gradients that are there already, new ones are activations only until they are added to them.
        changes = ((event, size - curve[event] + adding.get(event, 0)) for event, size in enumerate(apart))
        adding = {event: change for event, change in changes if change}
    last_use = partial(lifetimes.last_use, num_operators=course.forward_operators)
    return Profile(
        values=tuple(hooks.found.values),
        storages=tuple(_storages(hooks, trace, last_use, end)),
        requests=tuple(requests),
        curve=curve,
        forward_events=course.forward_events,
        step_seconds=trace.seconds,
        forward_seconds=course.forward_seconds,
        offloading_room=costs.offloading_room(),
        hides_copies=costs.hides_copies,
        basis=costs.basis,
        recipes=own_recipes(),
        saves=tuple(saves),
        operators=tuple(zip(trace.operators, (func.overloadpacket.__name__ for func in trace.called), strict=True)),
        calls=calls,
        holds=holds,
        codes=codes,
        adding=tuple(adding.items()),
        called=tuple(sorted(counts.found.pop())),
        returned=course.returned[0],
        merged=course.returned[1],
    )


def _run_with_everything_kept(
    step: _Step, hooks: ProfilingHooks, trace: MemoryTrace, gradients: _Gradients, counts: CallCounts
) -> _Course:
    """Runs the step, and tries between its forward and its backward what was saved.

    Raises:
        PlanError: the step leads to no backward.
    """
    device = step.costs.device
    with trace, gradients:
        with step.context(), hooks.active(), counts.active(), hooks.calls.recording():
            result = step.run()
        synchronize(device)
        forward_events = trace.now
        forward_operators = len(trace.operators)
        forward_seconds = trace.seconds
        # Autograd asks before the forward is over only where the step runs a backward of its own.
        asks_itself = bool(hooks.log.asks)
        returned = (0, 0)
        if isinstance(step.run, HeldOutput):
            returned = step.run.bytes_in(trace)
            trace.mark()  # the moment at which outputs of slices are merged
            step.run.end_forward()
        # From here on every request may be the last one of its value, and gets no copy.
        hooks.is_over = True
        if result is None:  # by hand; without a backward that needs what was saved, all of it is a forward
            forward_events = hooks.log.asks[0][0] if hooks.log.asks else forward_events
        elif not result.requires_grad:
            raise PlanError(_NO_LOSS)
        else:
            hooks.try_new_values()
            step.backward(result)
        # Within the trace: what is there at its end does not count as a part of the step.
        end_run(step.run)
        synchronize(device)
    # The graph goes with the loss when this function returns: that is not part of the step any more.
    return _Course(
        forward_events=forward_events,
        forward_operators=forward_operators,
        forward_seconds=forward_seconds,
        asks_itself=asks_itself,
        end=trace.now,
        returned=returned,
    )


def _storages(
    hooks: ProfilingHooks, trace: MemoryTrace, last_use: Callable[[str], int | None], end: int
) -> list[SavedStorage]:
    """The memory of what was saved, and until when the step would hold it by itself.

    Args:
        hooks: Have seen what was saved.
        trace: Of the step.
        last_use: The number of operators of the forward after which a value is let go.
        end: The event with which the step ends.
    """
    storages = []
    for name, span in hooks.found.memories:
        unused = last_use(name)
        freed = end if span.died is None else min(span.died, end)  # some go with the step itself
        # The run without anything kept had other events; what both runs have in common are the
        # operators, so their number is translated into an event of this run.
        last_forward = trace.operators[unused - 1] if unused else None
        # What outlives the step, as the graph of what the module keeps of it, is no activation: it is
        # not in the curve, and to drop it would make no room there.
        last_event = freed if last_forward is None or span.died is None else last_forward
        storages.append(SavedStorage(span.num_bytes, last_event, freed))
    return storages
