"""A training step of one replica, profiled on a shadow module before it happens."""

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torchmetrics import Metric

from lightning_dpx.devices import free_garbage
from lightning_dpx.errors import PlanError
from lightning_dpx.lightning.expected_gradient import names_gradients, zeroes_unseen
from lightning_dpx.lightning.lightning_api import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    Trainer,
    is_overridden,
    rank_zero_info,
)
from lightning_dpx.lightning.lightning_compat import set_trainer, trainer_of
from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.lightning.rehearsal.manual_shadow_step import hide_optimizers
from lightning_dpx.memory import Profile, extrapolate, profile_absent, profile_step, sum_of
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.data import IsWorth
from lightning_dpx.memory.profile.held_output import HeldOutput
from lightning_dpx.memory.profile.profiler import FreshForward, Run
from lightning_dpx.memory.profile.roofline import Rates
from lightning_dpx.memory.profile.step_seconds import StepSeconds, step_seconds
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.python_objects.trial_garbage import TRIAL_GARBAGE
from lightning_dpx.replicas import BatchSlice, Replica, ReplicaSet, UncuttableBatch, first_loss
from lightning_dpx.replicas.error_notes import trial_noted
from lightning_dpx.shifting import applied_shift
from lightning_dpx.torch_compat import tree_leaves, tree_map_only

Step = Callable[[Any, Any, int], Any]
_FEWEST_ROWS = 4  # of a step that is extrapolated from two smaller ones
_NO_BACKWARD = "The first training step ran no backward, so there is nothing to plan from."
_PURPOSE = "from which memory is planned; nothing of it stays"


class NoLossError(PlanError):
    """A profiled training step returned no loss, which a training step may do: the next one may return one."""

    lacks = "returned no loss"
    advice = "A step that runs a backward of its own is planned with self.automatic_optimization = False."


class NoBackwardError(NoLossError):
    """A profiled step by hand ran no backward: the next one may, or a hook after the step."""

    lacks = "ran no backward"
    advice = "What a hook runs a backward of, such as on_train_batch_end, is in no plan: run it in training_step."


class DoesNotFitError(PlanError):
    """A step does not fit on its device without a plan, and neither do the few rows that would tell of all."""


def loss_to_plan_from(output: Any) -> torch.Tensor:
    """The loss of a profiled training step.

    Raises:
        NoLossError: there is none.
    """
    loss: torch.Tensor | None = first_loss(output)
    if loss is None:
        raise NoLossError("The first training step returned no loss, so there is nothing to plan from.")
    return loss


def keeps_gradients(trainer: Trainer) -> bool:
    """Whether backward finds gradients, to which it adds: of earlier batches, or zeros that a hook leaves."""
    # The scheduler sets accumulate_grad_batches epoch by epoch, so its value now
    # says nothing of later ones.
    scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    # A hook of the user's may fill gradients with zeros where Lightning sets them to None.
    overridden = is_overridden("optimizer_zero_grad", trainer.lightning_module)
    return scheduled or overridden or trainer.accumulate_grad_batches > 1


def keeps_earlier_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether gradients of the batch before are there while micro-batches of the next one run: added to, or read."""
    if keeps_gradients(trainer) or names_gradients(module):
        return True
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return not zeroes_unseen(module, callbacks, trainer.strategy.optimizers)


def devices_of(replica: Replica) -> list[torch.device]:
    """The devices that a step of ``replica`` runs on: its own, and that of the parts that are shifted."""
    shift = applied_shift(replica.module)
    if shift is None:
        return [replica.device]
    return [replica.device, shift.target]


def merges_outputs(replicas: ReplicaSet) -> bool:
    """Whether what the slices of a batch return is merged before any of them runs its backward."""
    return len(replicas.devices) > 1 and replicas.cuts_batches and not replicas.cuts_slices


def announce_profile(rows: int, device: torch.device) -> None:
    """Logs that a step is being profiled, which takes a while."""
    some_rows = "1 row" if rows == 1 else f"{rows} rows"
    rank_zero_info(f"dpx: profiles a step on {some_rows} to plan the memory of {device} ...")


def profile_slice(
    replicas: ReplicaSet,
    batch_slice: BatchSlice,
    run: Step,
    device: torch.device | None = None,
    *,
    accumulates: bool = False,
    counts_gradients: bool = False,
    parts: int = 1,
    by_forward: bool = False,
    is_worth: IsWorth | None = None,
) -> Profile:
    """A step on ``batch_slice``, run by a shadow module; extrapolated from fewer rows where all do not fit.

    Args:
        replicas: All of them.
        batch_slice: What one of them gets.
        run: ``run(module, rows, num_rows)``: the training step of a replica's shadow module.
        device: The device whose memory is looked at; the replica's own unless given.
        accumulates: Whether gradients are added to those of earlier batches.
        counts_gradients: As :func:`profile_step` takes it; not where gradients are added.
        parts: Of so many such slices a replica's rows will consist.
        by_forward: Whether a step by hand that runs no backward is profiled as a forward.
        is_worth: As :func:`profile_step` takes it.

    Raises:
        NoLossError: there is nothing to plan from yet.
        NotWorthProfilingError: ``is_worth`` says no.
        PlanError: the step cannot be planned for, or does not fit and too few rows do to extrapolate from.
    """
    noted = trial_noted(batch_slice.replica.index, batch_slice.replica.device, "training_step", _PURPOSE)
    profiler = _SliceProfiler(
        replicas=replicas,
        batch_slice=batch_slice,
        run=run,
        device=device or batch_slice.replica.device,
        accumulates=accumulates,
        counts_gradients=counts_gradients and not accumulates,
        parts=parts,
        by_forward=by_forward,
        is_worth=is_worth,
    )
    with noted, TRIAL_GARBAGE.freed():
        return profiler.profile()


@dataclass(frozen=True, slots=True, kw_only=True)
class _SliceProfiler:
    """Profiles a step on a slice: the arguments of :func:`profile_slice`."""

    replicas: ReplicaSet
    batch_slice: BatchSlice
    run: Step
    device: torch.device
    accumulates: bool
    counts_gradients: bool
    parts: int
    by_forward: bool
    is_worth: IsWorth | None

    def profile(self) -> Profile:
        """The step on all rows, or if need be from steps on fewer.

        Raises:
            PlanError: it cannot be had from either.
        """
        try:
            return self._on_rows(self.batch_slice.batch, self.batch_slice.num_rows, self.is_worth)
        # That the step does not fit is the usual reason for a budget, and fewer rows tell as much.
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
        free_garbage()  # a shadow module and its gradients are in reference cycles
        return self._from_fewer_rows()

    def _on_rows(self, batch: Any, rows: int, is_worth: IsWorth | None = None) -> Profile:
        shadow = _shadow_of(self.replicas, self.batch_slice)
        end = _EndOfSlice(self.replicas, shadow, self.parts)
        # The real step must draw what it would have drawn without a profile.
        with preserve_rng_state(self.replicas.devices, [self.replicas.root.module]), _Backwards(shadow) as backwards:
            profile = profile_step(
                shadow,
                end.run_of(partial(self.run, shadow, batch, rows)),
                self.device,
                costs=_costs_of(self.device, rows, self.batch_slice.num_rows),
                accumulates=self.accumulates,
                counts_gradients=self.counts_gradients,
                is_worth=is_worth,
            )
        runs_none = profile.peak and not profile.requests and not backwards.have_run
        if runs_none and not shadow.automatic_optimization and not self.by_forward:
            raise NoBackwardError(_NO_BACKWARD)
        return profile

    def _from_fewer_rows(self) -> Profile:
        """The line through steps on two numbers of rows, the most that fit.

        Raises:
            PlanError: too few rows fit, or the batch cannot be cut.
        """
        all_rows = self.batch_slice.num_rows
        home = self.batch_slice.replica.device
        # A line needs two profiles, on two rows at the least: batch norm does not train on one.
        if all_rows < _FEWEST_ROWS:
            raise DoesNotFitError(
                f"A step on {all_rows} rows does not fit on {home} without a plan, and fewer rows to extrapolate from "
                "there are not. Plan it without running it (dpx.search_plan with device) and give plan."
            )
        for rows in _fewer_rows(all_rows):
            try:
                few, more = (self._on_rows(_first_rows(self.replicas, self.batch_slice, n), n) for n in rows)
            # Rows are cut off by the slicer, which may not have been needed before: one
            # replica takes batches whole.
            except UncuttableBatch as error:
                raise DoesNotFitError(
                    f"The step does not fit on {home} without a plan, and fewer rows to extrapolate from cannot be "
                    f"had. {error} Or plan the step without running it (dpx.search_plan with device) and give plan."
                ) from error
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)
            else:
                return extrapolate(few, more, rows, all_rows)
            free_garbage()
        raise DoesNotFitError(
            f"Not even {rows[1]} of {all_rows} rows fit on {home} without a plan, beside what is there already. Use a "
            "smaller batch, or plan the step without running it (dpx.search_plan with device) and give plan."
        )


def _fewer_rows(all_rows: int) -> Iterator[tuple[int, int]]:
    """The pairs of numbers of rows that are tried, the larger ones first; the last is (2, 4)."""
    more = all_rows
    while True:
        more = max(_FEWEST_ROWS, more // 4)
        # Two sizes, as parameters and what libraries keep do not grow with the rows.
        yield max(2, more // 2), more
        if more == _FEWEST_ROWS:
            return


def _costs_of(device: torch.device, rows: int, all_rows: int) -> CostModel:
    """Measures a step on ``rows``, which stand for all."""
    # What little is left on the host may do, and fewer rows there are not.
    watches_room = all_rows >= _FEWEST_ROWS
    if rows == all_rows:
        return CostModel(device, watches_room=watches_room)
    # The plan is for all rows, and finds values by the names that they have there.
    return CostModel(device, watches_room=watches_room, part=(rows, all_rows))


class _Backwards:
    """Whether any backward gives gradients to parameters of a module.

    What autograd asks for in a profile does not tell: of small tensors no profile knows.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._handles: list[Any] = []
        self.have_run = False

    def __enter__(self) -> "_Backwards":
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._note))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, _parameter: torch.Tensor) -> None:
        self.have_run = True


def profile_absent_slice(
    replicas: ReplicaSet,
    batch_slice: BatchSlice,
    run: Step,
    target: torch.device,
    *,
    accumulates: bool = False,
    counts_gradients: bool = False,
) -> Profile:
    """A step on ``batch_slice`` as it would be on ``target``, run by a shadow on the host; see :func:`profile_absent`.

    Raises:
        PlanError: the step cannot be planned for.
    """
    with _on_shadow(replicas, batch_slice, run, target) as (shadow, step):
        return profile_absent(
            shadow,
            batch_slice.batch,
            target,
            step,
            # The device of the plan need not be there.
            here=torch.device("cpu"),
            few=partial(_rows_and_cut, replicas, batch_slice),
            accumulates=accumulates,
            counts_gradients=counts_gradients and not accumulates,
        )


def seconds_of_slice(
    replicas: ReplicaSet, batch_slice: BatchSlice, run: Step, target: torch.device, rates: Rates
) -> StepSeconds:
    """How long a step on ``batch_slice`` takes on a device with these rates, run by a shadow; see :func:`step_seconds`.

    Raises:
        PlanError: fake tensors cannot run the step, and there are no numbers to run it on.
    """
    with _on_shadow(replicas, batch_slice, run, target) as (shadow, step):
        return step_seconds(
            shadow,
            batch_slice.batch,
            target,
            step,
            rates,
            few=partial(_rows_and_cut, replicas, batch_slice),
        )


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
    with _on_shadow(replicas, batch_slice, run, device) as (shadow, step), TRIAL_GARBAGE.freed():
        forward = FreshForward(shadow, step(batch_slice.batch), nullcontext)
        timer = CostModel(device).timer(shadow)
        with torch.enable_grad():
            seconds, _ = timer.least(forward, torch.Tensor.backward)
    return TimedSlice(seconds, timer.queued)


def run_once(replicas: ReplicaSet, batch_slice: BatchSlice, run: Step) -> None:
    """Runs the step on ``batch_slice`` by a shadow, for what ``run`` sees of it; all that it changes is put back."""
    # The shadow is in reference cycles, and would count among what the device holds beside a step.
    with TRIAL_GARBAGE.freed(), _on_shadow(replicas, batch_slice, run, batch_slice.replica.device) as (shadow, step):
        forward = step(batch_slice.batch)
        with torch.no_grad() if shadow.automatic_optimization else nullcontext():
            CostModel(batch_slice.replica.device).timer(shadow).timed(forward, _no_backward)


class _Saved:
    """What autograd holds in place of a tensor: it goes with the graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def look_for_loss(replicas: ReplicaSet, batch_slice: BatchSlice, run: Step) -> None:
    """Runs the step once, as a profile of it runs many times; where all rows do not fit, a profile may know of fewer.

    Raises:
        NoLossError: there is nothing to plan from yet.
    """
    try:
        with _on_shadow(replicas, batch_slice, run, batch_slice.replica.device) as (shadow, step):
            with _Backwards(shadow) as backwards, _only_run(shadow, batch_slice):
                step(batch_slice.batch)()
            if not shadow.automatic_optimization and not backwards.have_run:
                raise NoBackwardError(_NO_BACKWARD)
        return
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
    free_garbage()


def leaves_graph(replicas: ReplicaSet, batch_slice: BatchSlice, run: Step) -> bool:
    """Whether a step by hand leaves a graph behind, of which something may run a backward after it."""
    try:
        with _on_shadow(replicas, batch_slice, run, batch_slice.replica.device) as (shadow, step):
            shadow.training_step = _GraphWatch(shadow.training_step)
            with _only_run(shadow, batch_slice):
                step(batch_slice.batch)()
        return False
    except _GraphLeftError:
        return True
    # It has not come to its end, so it may.
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
    free_garbage()
    return True


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


@contextmanager
def _only_run(shadow: Any, batch_slice: BatchSlice) -> Iterator[None]:
    """Around a step that is not timed; all that it changes is put back."""
    costs = CostModel(batch_slice.replica.device)
    # The trace tells of writes to parameters, which a shadow shares with the module, before they happen.
    with TRIAL_GARBAGE.freed(), costs.preserve_module_state(shadow), costs.trace():
        with torch.enable_grad():
            yield


def _no_backward(loss: torch.Tensor) -> None:
    """What is looked at is over by then."""


@contextmanager
def _on_shadow(
    replicas: ReplicaSet, batch_slice: BatchSlice, run: Step, target: torch.device
) -> Iterator[tuple[Any, Callable[[Any], Run]]]:
    """A shadow for a slice, and its step on any batch; errors in here say that it was no step of the run."""
    shadow = _shadow_of(replicas, batch_slice)
    end = _EndOfSlice(replicas, shadow)
    noted = trial_noted(batch_slice.replica.index, target, "training_step", _PURPOSE)
    with noted, preserve_rng_state(replicas.devices, [replicas.root.module]):
        yield shadow, lambda batch: end.run_of(partial(run, shadow, batch, batch_slice.num_rows))


def end_of_step(shadow: Any, output: Any) -> torch.Tensor | None:
    """The loss to run a backward of; ``None`` for a step by hand, which has run its own."""
    if shadow.automatic_optimization:
        return loss_to_plan_from(output)
    return None


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


class _EndOfSlice:
    """The scalar that a profile runs a backward of, also with a ``training_step_end``.

    On all rows that is its loss. A slice ends with outputs, whose gradients come from the loss of all: the outputs of
    all rows are there by then, with their gradients and, on the first device, what that loss takes. It is tried on the
    outputs of one slice in the place of all others; they count as held, and are not part of what is planned.

    Args:
        replicas: All of them.
        shadow: The shadow module that runs the step.
        parts: Of so many such slices a replica's rows will consist.
    """

    def __init__(self, replicas: ReplicaSet, shadow: Any, parts: int = 1) -> None:
        self._shadow = shadow
        self._finish: Callable[[Any], Any] | None = None
        if shadow.automatic_optimization:
            self._finish = getattr(shadow, "training_step_end", None)
        # A batch that is not cut has its loss from the one output that there is.
        self._num_slices = parts * (len(replicas.replicas) if replicas.cuts_batches else 1)
        # Micro-batches have their backwards before anything is merged.
        self._is_merged = merges_outputs(replicas) and parts == 1
        self._dim = replicas.output_dim
        # The loss of all rows is computed on the first device alone; the others hold
        # outputs and their gradients.
        self._has_loss = torch.device(shadow.device) == replicas.root.device
        self._held: list[torch.Tensor] = []

    def run_of(self, step: Callable[[], Any]) -> Run:
        """A run of ``step`` that returns the scalar to run a backward of."""
        if self._finish is not None and self._num_slices > 1:
            return lambda: self._sum_for_all(step())
        return HeldOutput(lambda: self._finished(step()), partial(end_of_step, self._shadow), is_merged=self._is_merged)

    def _sum_for_all(self, output: Any) -> torch.Tensor | None:
        """The sum of the outputs of a slice, beside which those of all slices are held.

        Raises:
            NoLossError: there is no loss.
        """
        # A profile runs the step several times, and what one run held must not count in the next.
        self._held.clear()
        finish = self._finish
        if finish is None or output is None:
            return end_of_step(self._shadow, output)
        # A backward of the slice needs a scalar: with the sum of its outputs
        # each of them gets a gradient.
        total = sum_of(output)
        # Hooks of the profile would take what this loss saves for a part of the
        # step; the innermost ones win.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            self._hold_all(output)
        return total

    def _hold_all(self, output: Any) -> None:
        """Allocates outputs of all rows and their gradients, until the step is profiled again."""
        merged = tree_map_only(torch.Tensor, self._of_all_rows, output)
        leaves = [leaf for leaf in tree_leaves(merged) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if self._has_loss:
            loss = loss_to_plan_from(self._finished(merged))
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            for gradient in gradients:
                if gradient is not None:
                    self._held += [gradient, gradient.clone()]  # the slices get theirs in parts
        else:
            self._held += [torch.zeros_like(leaf) for leaf in leaves]
        self._held += leaves

    def _finished(self, output: Any) -> Any:
        """What ``training_step_end`` returns for an output, if there is one; what it logs goes nowhere."""
        finish = self._finish
        if finish is None or output is None:
            return output
        batch_slice = BatchSlice(Replica(0, self._shadow.device, self._shadow), 1, None)
        # The real log waits for the step that counts.
        with StepLog(batch_slice).recording(self._shadow):
            return finish(output)

    def _of_all_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        # Gradients of the loss end at the outputs, from where each replica goes on by itself.
        rows = tensor.detach()
        if rows.dim() > self._dim:
            # The outputs of the other slices are taken to be as large as this one's.
            parts = [rows.clone() for _ in range(self._num_slices)]
            self._held += parts
            rows = torch.cat(parts, self._dim)
        return rows.requires_grad_(tensor.requires_grad)


def _shadow_of(replicas: ReplicaSet, batch_slice: BatchSlice) -> Any:
    shadow: Any = replicas.make_shadow_module(batch_slice.replica)
    set_trainer(shadow, trainer_of(batch_slice.replica.module))  # LightningModule drops it from its copies
    # They lead to the strategy and all that it holds, which a profile would look through.
    if not shadow.automatic_optimization:
        hide_optimizers(shadow)
    # Replicas share the metrics of the first, whose states are on its device, and in a real step hand them their rows.
    # The step of a shadow module updates them itself.
    for child in shadow.modules():
        if isinstance(child, Metric):
            child.to(batch_slice.replica.device)
    return shadow


def first_rows_of(replicas: ReplicaSet, batch_slice: BatchSlice) -> tuple[int, Callable[[int], Any]]:
    """The rows of a slice, and what gives its first ones, as many as wanted.

    Raises:
        UncuttableBatch: it cannot be cut.
    """
    rows = replicas.slicer.num_rows(batch_slice.batch)
    whole = BatchSlice(batch_slice.replica, rows, batch_slice.batch)
    return _rows_and_cut(replicas, whole)


def _rows_and_cut(replicas: ReplicaSet, batch_slice: BatchSlice) -> tuple[int, Callable[[int], Any]]:
    return batch_slice.num_rows, partial(_first_rows, replicas, batch_slice)


def _first_rows(replicas: ReplicaSet, batch_slice: BatchSlice, rows: int) -> Any:
    # Also where the batch cannot be cut at all.
    if rows == batch_slice.num_rows:
        return batch_slice.batch
    return replicas.slicer.cut(batch_slice.batch, [rows, batch_slice.num_rows - rows])[0]
