"""What a step saves, what it would cost to compute it again, and when it is needed: the input of every planner.

One forward in which autograd keeps nothing tells how long each tensor lives anyway; where that runs a backward of its
own, autograd keeps copies that are not counted. A step in which everything is kept tells the rest, and repeats the
operator behind every saved tensor once: that gives its time, and proves on the spot that the result is the same. A
:class:`CostModel` watches and tries, on a device or without one.

:func:`profile_step` goes through these, one after the other::

    time the step, as it is            step_timer.py           seconds; not on fake tensors
    watch it, with nothing kept        watched_step.py         how long tensors live by themselves
    watch it, with everything kept     full_step.py            what is saved, asked for, repeated; bytes at every event
    run compiled parts                 compiled_code.py        what they take inside themselves
    time steps that follow plans       bookkeeping_in_step.py  what a plan costs beside its operators

A step may run any number of backwards of its own: forces are gradients of an energy, a GAN optimizes twice. Whenever
one begins, what was saved since the last one is tried, because it will soon be gone::

    forward of F, grad(F, create_graph=True) -> B, backward of F and B

    saves F | tries F | asks for F, saves B | tries B | asks for B and F again

What is asked for several times is computed as often, unless something else keeps it in between: see ``saves``.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import is_host, keeps_workspaces, raises_out_of_memory, take_workspaces
from lightning_dpx.errors import PlanError
from lightning_dpx.memory.execute.module_calls import CallNames, compiled_parts
from lightning_dpx.memory.profile.ambient_autocast import AmbientAutocast
from lightning_dpx.memory.profile.bookkeeping import Bookkeeping
from lightning_dpx.memory.profile.bookkeeping_in_step import measured_in_step, with_bookkeeping
from lightning_dpx.memory.profile.compiled_code import with_compiled_code
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import IsWorth, Profile
from lightning_dpx.memory.profile.held_output import end_run
from lightning_dpx.memory.profile.known_steps import KNOWN_STEPS
from lightning_dpx.memory.profile.profiled_step import ProfiledStep, Run
from lightning_dpx.memory.profile.step_timer import StepTimer
from lightning_dpx.memory.profile.watched_step import watch_step
from lightning_dpx.progress import at
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.python_objects.gc_pause import COLLECTOR
from lightning_dpx.torch_compat import disable_current_modes


class NotWorthProfilingError(PlanError):
    """A step was timed, and takes too long for anything else of it to matter.

    Args:
        seconds: That it takes.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"A step takes {seconds:.3g} s, which is too long to be planned for.")
        self.seconds = seconds


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
    step = ProfiledStep(
        module=module,
        run=run,
        backward=backward,
        context=autocast.entered_by(context),
        costs=costs or CostModel(device),
        accumulates=accumulates,
        counts_gradients=counts_gradients,
        is_worth=is_worth,
    )
    with _prepared(step, device, autocast):
        timer = step.costs.timer(module)
        times = _times_of(step, timer)
        accumulates = step.finds_gradients  # the steps below leave some
        profile, names = watch_step(step)
        if compiled:
            runs = times is not None and is_host(step.costs.device)
            profile = _with_compiled_code(step, profile, names, accumulates=accumulates, runs=runs)
        bookkeeping = step.costs.bookkeeping()
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


@contextmanager
def _prepared(step: ProfiledStep, device: torch.device, autocast: AmbientAutocast) -> Iterator[None]:
    """Around all runs of a step: what would be measured along with it is there before, and what they left goes."""
    costs = step.costs
    # The garbage collector would search all that is watched, again and again, for a third of the time.
    with COLLECTOR.resting(), autocast.suspended():
        try:
            costs.note_sizes(step.module)
            # What libraries keep from their first call on is no part of the step that comes first.
            if costs.times_steps and keeps_workspaces(device):
                take_workspaces(device)
            with disable_current_modes():
                # It runs a small model for real, which the modes of fake tensors and of whoever calls this
                # would change; the figure is remembered, and asked for again once the step was watched.
                costs.bookkeeping()  # before hooks of ours are on
            yield
        finally:
            end_run(step.run)
            costs.forget_reach()


def _times_of(step: ProfiledStep, timer: StepTimer) -> tuple[float, float] | None:
    """Seconds of the step and of its forward; ``None`` where steps are not timed, as on fake tensors.

    Raises:
        NotWorthProfilingError: ``is_worth`` says no.
    """
    if not step.costs.times_steps:
        return None
    # Steps are timed before anything watches them, and uncompiled, as they are watched later: the
    # extra time of a plan is a share of the same operators.
    at("timing steps")
    with uncompiled(), torch.enable_grad():
        times = timer.least(step.forward, step.backward)
    if step.is_worth is not None and not step.is_worth(times[0]):
        raise NotWorthProfilingError(times[0])
    return times


def _with_compiled_code(
    step: ProfiledStep, profile: Profile, names: CallNames, *, accumulates: bool, runs: bool
) -> Profile:
    """The profile of a step that was watched uncompiled, with what its compiled parts take and could save less."""
    if runs and not step.by_hand:
        at("watching compiled code")
        return with_compiled_code(profile, step.module, names, step, step.costs.device, accumulates=accumulates)
    warnings.warn(
        "What compiled code takes inside itself is predicted from its operators one by one, as it was not run, and the "
        "peak may be another one.",
        stacklevel=4,
    )
    return replace(profile, codes=())


def _with_planned_steps(
    step: ProfiledStep, profile: Profile, timer: StepTimer, known: Bookkeeping
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
