"""How long a step on a slice takes, on the device that it is on or by the rates of another one."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_dpx.lightning.memory.shadow_slice import Step, on_shadow, rows_and_cut
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.profiled_step import FreshForward
from lightning_dpx.memory.profile.roofline import Rates
from lightning_dpx.memory.profile.step_seconds import StepSeconds, step_seconds
from lightning_dpx.python_objects.trial_garbage import TRIAL_GARBAGE
from lightning_dpx.replicas import BatchSlice, ReplicaSet


class TimedSlice(NamedTuple):
    """Seconds of forward and backward.

    Attributes:
        whole: Until their device has done them.
        queued: Until the host has handed them to it: they take no less, however fast the device is.
    """

    whole: float
    queued: float

    @property
    def busy_host(self) -> float:
        """The share of its time in which the host could do nothing else."""
        return min(1.0, self.queued / self.whole)


def timed_slice(replicas: ReplicaSet, batch_slice: BatchSlice, run: Step) -> TimedSlice:
    """Times forward and backward on ``batch_slice``, the least of a few; all that they change is put back."""
    device = batch_slice.replica.device
    with on_shadow(replicas, batch_slice, run, device) as (shadow, step), TRIAL_GARBAGE.freed():
        forward = FreshForward(shadow, step(batch_slice.batch), nullcontext)
        timer = CostModel(device).timer(shadow)
        with torch.enable_grad():
            seconds, _ = timer.least(forward, torch.Tensor.backward)
    return TimedSlice(seconds, timer.queued)


def seconds_of_slice(
    replicas: ReplicaSet, batch_slice: BatchSlice, run: Step, target: torch.device, rates: Rates
) -> StepSeconds:
    """How long a step on ``batch_slice`` takes on a device with these rates, run by a shadow; see :func:`step_seconds`.

    Raises:
        PlanError: fake tensors cannot run the step, and there are no numbers to run it on.
    """
    with on_shadow(replicas, batch_slice, run, target) as (shadow, step):
        return step_seconds(
            shadow,
            batch_slice.batch,
            target,
            step,
            rates,
            few=partial(rows_and_cut, replicas, batch_slice),
        )


def run_once(
    replicas: ReplicaSet,
    batch_slice: BatchSlice,
    run: Step,
    look: Callable[[Any, torch.Tensor], None] | None = None,
) -> None:
    """Runs the step on ``batch_slice`` by a shadow, for what ``run`` sees of it; all that it changes is put back.

    Args:
        replicas: All of them.
        batch_slice: What the step runs on.
        run: The step.
        look: Is given the shadow and the loss with its graph, in which nothing is saved; without it there is none.
    """
    # The shadow is in reference cycles, and would count among what the device holds beside a step.
    with TRIAL_GARBAGE.freed(), on_shadow(replicas, batch_slice, run, batch_slice.replica.device) as (shadow, step):
        forward = step(batch_slice.batch)
        timer = CostModel(batch_slice.replica.device).timer(shadow)
        if look is not None:
            # What a graph saves would take as much as the step itself.
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, _refuse):
                timer.timed(forward, partial(look, shadow))
            return
        with torch.no_grad() if shadow.automatic_optimization else nullcontext():
            timer.timed(forward, _no_backward)


def _drop(_: torch.Tensor) -> None:
    """In place of what a graph saves."""


def _refuse(_: Any) -> torch.Tensor:
    """In place of what a backward asks for, as one within the step does.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("A step that is looked at has saved nothing for a backward.")


def _no_backward(loss: torch.Tensor) -> None:
    """What is looked at is over by then."""
