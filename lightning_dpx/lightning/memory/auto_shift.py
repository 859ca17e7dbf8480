"""Chooses the shifts of ``shifts="auto"`` at the first training step, when a batch is there to be traced."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_dpx.activations import Activation, trace_run
from lightning_dpx.devices import spare_devices
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.lightning_api import rank_zero_info
from lightning_dpx.lightning.lightning_compat import set_trainer, trainer_of
from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.lightning.memory.budgets import Budgets
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.replicas import BatchSlice, Replica, ReplicaSet, UncuttableBatch
from lightning_dpx.shifting import BetweenSteps, Part, Shift, applied_shift, apply_shift, choose_parts, parts_of, scaled
from lightning_dpx.torch_compat import tree_leaves
from lightning_dpx.units import format_mib

Step = Callable[[Any, Any, int], Any]


@dataclass(frozen=True, slots=True)
class _Cut:
    """What is shifted of one replica.

    Attributes:
        replica: Whose parts.
        target: Where they go; ``None`` where all fits.
        names: The parts.
        needs: Bytes on the replica's device and on the target, beside what is there.
        room: Bytes that both may still take.
    """

    replica: Replica
    target: torch.device | None
    names: list[str]
    needs: tuple[int, int]
    room: tuple[int, int]


def shift_what_does_not_fit(
    replicas: ReplicaSet, slices: Sequence[BatchSlice], run: Step, optimizers: Sequence[Any], budgets: Budgets
) -> list[Shift]:
    """Traces a few rows on one replica, predicts the whole slice, and shifts what does not fit on any device.

    Args:
        replicas: The replicas.
        slices: The parts of the first batch.
        run: ``run(module, rows, num_rows)``: the training step of a replica's shadow module.
        optimizers: Their state follows the parameters.
        budgets: What each device may take. Where no cut meets them, the one that lacks least is taken, and a plan meets
            the budgets by computing again.

    Raises:
        ConfigurationError: too few rows to extrapolate from, no spare device, or no cut that fits.
    """
    with preserve_rng_state(replicas.devices, [replicas.root.module]):
        # The real step must draw what it would have drawn without the trace.
        kept, total = _predict(replicas, slices[0], run)
    # A gradient, and what the optimizer keeps; of no optimizer as much as of Adam.
    per_parameter = 1 + most_states_of(optimizers, default=2)
    parts = parts_of(replicas.root.module, kept)
    # What the step keeps outside of parts that could be moved stays on the replica's device.
    elsewhere = total - sum(part.kept for part in parts)
    if len(slices) > 1:  # gradients on their way between the replicas, in buckets
        elsewhere += 3 * sum(part.parameters for part in parts)
    room = partial(budgets.room, homes=replicas.devices)
    cuts = partial(_cuts, replicas, slices, parts, elsewhere, per_parameter, room)
    try:
        found = cuts()
    except ConfigurationError as error:
        if budgets.given is None:
            raise
        found = cuts(nearest=True)
        rank_zero_info(f"dpx: a plan is to meet the budget, as shifts alone cannot: {error}")
    chosen = []
    for cut in found:
        if cut.target is not None:
            chosen.append(_applied(cut, cut.target))
        else:
            takes = f"{format_mib(cut.needs[0], 0)} of its {format_mib(cut.room[0], 0)}"
            rank_zero_info(f"dpx: {cut.replica.device} needs {takes}; nothing is shifted.")
    _move_states(optimizers)
    return chosen


def _cuts(
    replicas: ReplicaSet,
    slices: Sequence[BatchSlice],
    parts: Sequence[Part],
    elsewhere: int,
    per_parameter: int,
    room_on: Callable[[torch.device], int],
    *,
    nearest: bool = False,
) -> list[_Cut]:
    """What is to be shifted of every replica, so that no device takes more than it has room for.

    With ``nearest`` it may take more, where nothing else can be.

    Raises:
        ConfigurationError: no spare device, or no cut that fits.
    """
    spares = spare_devices(replicas.devices)
    cuts = []
    for batch_slice in slices:
        device = batch_slice.replica.device
        # Every replica has a target of its own, or two would fill one spare device.
        target = max(spares, key=room_on, default=None)
        room = room_on(device), room_on(target) if target is not None else 0
        rows = bytes_of_tensors(batch_slice.batch)
        # Without a device to go to all stays, whatever that takes.
        free = (sys.maxsize, 0) if nearest and target is None else room
        names, needs = choose_parts(parts, elsewhere + rows, free, per_parameter, nearest=nearest)
        if not names:
            cuts.append(_Cut(batch_slice.replica, None, names, needs, room))
            continue
        if target is None:
            raise ConfigurationError(
                f"shifts='auto': {device} needs more than its {format_mib(room[0], 0)}, and no device is spare; "
                "start fewer replicas."
            )
        spares.remove(target)
        cuts.append(_Cut(batch_slice.replica, target, names, needs, room))
    return cuts


def _applied(cut: _Cut, target: torch.device) -> Shift:
    device = cut.replica.device
    shift = apply_shift(cut.replica.module, cut.names, {device: target})
    here = f"{device}: {format_mib(cut.needs[0], 0)} of {format_mib(cut.room[0], 0)}"
    there = f"{target}: {format_mib(cut.needs[1], 0)} of {format_mib(cut.room[1], 0)}"
    rank_zero_info(f"dpx: shifts {device} -> {target}: {', '.join(cut.names)}\n     {here}    {there}")
    return shift


def _move_states(optimizers: Sequence[Any]) -> None:
    """A resumed run has optimizer state by now, from before the parameters were moved."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                # Scalars such as Adam's step counter stay: torch keeps them on the host on purpose.
                if isinstance(value, torch.Tensor) and value.ndim:
                    state[name] = value.to(parameter.device)


def _predict(replicas: ReplicaSet, batch_slice: BatchSlice, run: Step) -> tuple[dict[str, int], int]:
    if batch_slice.num_rows < 4:
        raise ConfigurationError(
            f"shifts='auto' extrapolates from two and four rows, and a replica gets {batch_slice.num_rows}; give "
            "shifts and shift_activations by hand."
        )
    traces: list[list[Activation]] = []
    # Two sizes, as what does not grow with the rows must not be scaled with them.
    for rows in (2, 4):
        few = _first_rows(replicas, batch_slice, rows)
        shadow: Any = replicas.make_shadow_module()
        set_trainer(shadow, trainer_of(batch_slice.replica.module))  # LightningModule drops it from its copies
        traces.append(trace_run(shadow, lambda t=shadow, b=few, n=rows: run(t, b, n), tree_leaves(few)))  # type: ignore[misc]
    kept = scaled(traces[0], traces[1], (2, 4), batch_slice.num_rows)
    return kept, sum(kept.values())


def _first_rows(replicas: ReplicaSet, batch_slice: BatchSlice, rows: int) -> Any:
    try:
        return replicas.slicer.cut(batch_slice.batch, [rows, batch_slice.num_rows - rows])[0]
    except UncuttableBatch as error:
        raise ConfigurationError(
            f"shifts='auto' extrapolates from two and four rows of the first batch. {error} Or give shifts and "
            "shift_activations by hand."
        ) from error


def most_states_of(optimizers: Iterable[Any], *, default: int = 0) -> int:
    """What :func:`states_of` finds at the most: which optimizer has which parameter is not asked.

    Args:
        optimizers: Of a run.
        default: Where there are none.
    """
    return max(map(states_of, optimizers), default=default)


def states_of(optimizer: Any) -> int:
    """Tensors of a parameter's size that the optimizer keeps for it."""
    defaults = optimizer.defaults
    # By the names of its settings: what an optimizer will keep can be seen
    # only after its first step.
    if "betas" in defaults:
        if defaults.get("amsgrad"):
            return 3
        return 2
    # RMSprop keeps a mean of squares beside it, and one of gradients where it is centered.
    if "centered" in defaults:
        return 1 + bool(defaults["momentum"]) + bool(defaults["centered"])
    # L-BFGS keeps the last steps and the changes of the gradient in them, and runs a training step within its own: by
    # then its direction, gradients and their differences are there as well, and more of them while it searches a line.
    if "history_size" in defaults:
        passing = 11 if defaults.get("line_search_fn") else 7  # measured, with torch 2.13
        return 2 * int(defaults["history_size"]) + passing
    # Adagrad keeps a sum of squares.
    if "initial_accumulator_value" in defaults:
        return 1
    if "momentum" in defaults:  # of SGD's kind, which keeps one tensor if it has momentum at all
        if defaults["momentum"]:
            return 1
        return 0
    return 2  # nobody knows: as many as Adam keeps


def note_shifts(replicas: Sequence[Replica], hooks_mode: BetweenSteps | None) -> None:
    """From now on, hooks may use parameters of both sides of these cuts at once."""
    if hooks_mode is not None:
        found = [applied_shift(replica.module) for replica in replicas]
        hooks_mode.pairs = [(shift.source, shift.target) for shift in found if shift is not None]
