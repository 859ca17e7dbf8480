"""A step, watched operator by operator: first a forward that keeps nothing, then a step that keeps everything."""

import traceback

import torch

from lightning_dpx.memory.execute.call_counts import CallCounts
from lightning_dpx.memory.execute.module_calls import CallNames, openable
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.full_step import full_step
from lightning_dpx.memory.profile.held_output import end_run
from lightning_dpx.memory.profile.lifetimes import AsksItselfError, Lifetimes, natural_lifetimes
from lightning_dpx.memory.profile.profiled_step import ProfiledStep
from lightning_dpx.progress import at
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.python_objects.gc_pause import COLLECTOR


class _Every:
    """Contains all names."""

    def __contains__(self, _name: object) -> bool:
        return True


def watch_step(step: ProfiledStep) -> tuple[Profile, CallNames]:
    """The step operator by operator: first how long its tensors live by themselves, then all that it saves.

    Returns:
        What was found, and what has told of calls, which knows by now what is one code.
    """
    opened = openable(step.module)
    while True:
        names = CallNames(step.module, opened=opened)
        try:
            if names.is_distributed and not step.costs.times_steps:
                # The first time an operator meets distributed tensors, torch runs it on fakes to find what its
                # parts will be. In a step on fakes these would count, as if they were operators of the step.
                _watch_runs(names, step)
            profile = _watch_runs(names, step)
        finally:
            names.listener = None
            names.remove()
        if profile is not None and not names.closed:
            return profile, names
        # Compiled functions that call modules of their own: in a step that is compiled there are no hooks on these.
        opened = opened - names.closed


def _watch_runs(names: CallNames, step: ProfiledStep) -> Profile | None:
    """Both runs, their calls told by ``names``; ``None`` where code has called modules with hooks."""
    names.listener = None
    names.again = {}
    lifetimes = _lifetimes(names, step)
    end_run(step.run)
    if names.closed:
        return None
    with uncompiled(), step.costs.preserve_module_state(step.module), torch.enable_grad():
        at("watching a step")
        # Python's collector rests, so what the last run has left in cycles is still there, and
        # would be there beside all of the next one.
        COLLECTOR.collect_young()
        # All calls are noted: which of them a value needs, or is worth a replay, is what is to
        # be found out.
        names.again = _Every()
        step.stand_in_for_gradients()
        counts = CallCounts(names.parts)
        try:
            return full_step(step, names, lifetimes, counts)
        finally:
            counts.remove()


def _lifetimes(names: CallNames, step: ProfiledStep) -> Lifetimes:
    """How long tensors live by themselves, from a forward in which autograd keeps nothing."""
    costs = step.costs
    at("watching a forward")
    try:
        # A step by hand always runs backwards, and one that is broken off would leave half of its optimizers' work.
        with uncompiled(), costs.preserve_module_state(step.module), torch.enable_grad():
            return natural_lifetimes(names, step.run, costs, step.context, copies=step.by_hand)
    except AsksItselfError as asked:
        # Nothing was kept for the backward that the step runs itself: it runs again, with
        # copies. The frames of the error would hold tensors of the run that was broken off.
        traceback.clear_frames(asked.__traceback__)
    with uncompiled(), costs.preserve_module_state(step.module), torch.enable_grad():
        return natural_lifetimes(names, step.run, costs, step.context, copies=True)
