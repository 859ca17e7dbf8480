"""Whether a step returns a loss, runs a backward or leaves a graph: looked at once, before it is profiled."""

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from lightning_dpx.devices import free_garbage
from lightning_dpx.lightning.memory.shadow_slice import Step, on_shadow
from lightning_dpx.lightning.memory.slice_loss import NoBackwardError
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.python_objects.trial_garbage import TRIAL_GARBAGE
from lightning_dpx.replicas import BatchSlice, ReplicaSet

NO_BACKWARD = "The first training step ran no backward, so there is nothing to plan from."


def look_for_loss(replicas: ReplicaSet, batch_slice: BatchSlice, run: Step) -> None:
    """Runs the step once, as a profile of it runs many times; where all rows do not fit, a profile may know of fewer.

    Raises:
        NoLossError: there is nothing to plan from yet.
    """
    try:
        with on_shadow(replicas, batch_slice, run, batch_slice.replica.device) as (shadow, step):
            with Backwards(shadow) as backwards, only_run(shadow, batch_slice):
                step(batch_slice.batch)()
            if not shadow.automatic_optimization and not backwards.have_run:
                raise NoBackwardError(NO_BACKWARD)
        return
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
    free_garbage()


def leaves_graph(replicas: ReplicaSet, batch_slice: BatchSlice, run: Step) -> bool:
    """Whether a step by hand leaves a graph behind, of which something may run a backward after it."""
    try:
        with on_shadow(replicas, batch_slice, run, batch_slice.replica.device) as (shadow, step):
            shadow.training_step = _GraphWatch(shadow.training_step)
            with only_run(shadow, batch_slice):
                step(batch_slice.batch)()
        return False
    except _GraphLeftError:
        return True
    # It has not come to its end, so it may.
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
    free_garbage()
    return True


class Backwards:
    """Whether any backward gives gradients to parameters of a module.

    What autograd asks for in a profile does not tell: of small tensors no profile knows.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._handles: list[Any] = []
        self.have_run = False

    def __enter__(self) -> "Backwards":
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._note))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, _parameter: torch.Tensor) -> None:
        self.have_run = True


@contextmanager
def only_run(shadow: Any, batch_slice: BatchSlice) -> Iterator[None]:
    """Around a step that is not timed; all that it changes is put back."""
    costs = CostModel(batch_slice.replica.device)
    # The trace tells of writes to parameters, which a shadow shares with the module, before they happen.
    with TRIAL_GARBAGE.freed(), costs.preserve_module_state(shadow), costs.trace():
        with torch.enable_grad():
            yield


class _Saved:
    """What autograd holds in place of a tensor: it goes with the graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _GraphLeftError(Exception):
    """A step has left a part of its graph."""


class _GraphWatch:
    """A training step that looks for what it leaves of its graph, and returns nothing.

    What a step by hand sets is put back right after it, and so would be what is noted here of it: so it is raised.

    Args:
        step: Of a shadow.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._saved: list[weakref.ref[_Saved]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, attrgetter("tensor")):
            self._step(*args, **kwargs)
        free_garbage()  # a graph in reference cycles only is none that anything runs a backward of
        if any(held() is not None for held in self._saved):
            raise _GraphLeftError

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # Detached, as a result that leads to its own graph would hold it.
        held = _Saved(tensor.detach())
        self._saved.append(weakref.ref(held))
        return held
