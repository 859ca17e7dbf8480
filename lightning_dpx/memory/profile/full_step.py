"""A step in which everything is kept: what it saves, asks for and takes, as a profile."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lightning_dpx.devices import is_host, pins_offloaded, synchronize
from lightning_dpx.errors import PlanError
from lightning_dpx.memory.execute.call_counts import CallCounts
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.recipes import own_recipes
from lightning_dpx.memory.execute.sharded_units import ShardedUnits
from lightning_dpx.memory.profile.data import Profile, SavedStorage
from lightning_dpx.memory.profile.gradient_memory import GradientMemory
from lightning_dpx.memory.profile.held_output import HeldOutput, end_run
from lightning_dpx.memory.profile.lifetimes import Lifetimes
from lightning_dpx.memory.profile.profiled_step import NO_LOSS, ProfiledStep
from lightning_dpx.memory.profile.profiling_hooks import ProfilingHooks
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.torch_compat import has_storage, key_of


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


def full_step(step: ProfiledStep, names: CallNames, lifetimes: Lifetimes, counts: CallCounts) -> Profile:
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
    gradients = GradientMemory(step.module, trace)
    # Asked of devices alone, see _left_behind.
    attributes = {} if is_host(step.costs.device) else _sizes_of_attributes(step.module)
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
        pins_offloaded=pins_offloaded(costs.device),
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
        left_behind=_left_behind(step, trace, gradients, attributes),
    )


def _run_with_everything_kept(
    step: ProfiledStep, hooks: ProfilingHooks, trace: MemoryTrace, gradients: GradientMemory, counts: CallCounts
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
            raise PlanError(NO_LOSS)
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


def _left_behind(
    step: ProfiledStep, trace: MemoryTrace, gradients: GradientMemory, before: dict[tuple[int, str], tuple[int, int]]
) -> int:
    """Bytes that the step has made and that outlast it, such as what a module keeps of its last call.

    Args:
        step: Has run.
        trace: Of it.
        gradients: Which are counted apart.
        before: Where attributes of the module were before it, and their bytes.
    """
    # What a step by hand leaves is its optimizers', which are counted with their states. A run that holds no output
    # holds something in place of those of other slices, which no step leaves.
    if step.by_hand or not isinstance(step.run, HeldOutput):
        return 0
    # A new buffer in the place of another one is left as well: a replica lists its buffers until the next step, so both
    # are there.
    apart = gradients.allocations
    left = sum(one.num_bytes for one in trace.allocations if one.died is None and id(one) not in apart)
    # What a device holds is measured there before a plan, what the attributes of its modules hold with it: sums of a
    # metric come in the place of others. Of the host nobody can tell what it held.
    if is_host(step.costs.device):
        return left
    after = _sizes_of_attributes(step.module)
    replaced = sum(place[1] for key, place in before.items() if key in after and after[key] != place)
    return max(0, left - replaced)


def _sizes_of_attributes(module: nn.Module) -> dict[tuple[int, str], tuple[int, int]]:
    """Where the tensors are that submodules hold as plain attributes, and their bytes; by submodule and name."""
    found: dict[tuple[int, str], tuple[int, int]] = {}
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, torch.Tensor) and has_storage(value):
                storage = value.untyped_storage()
                found[id(child), name] = (key_of(storage), storage.nbytes())
    return found


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
