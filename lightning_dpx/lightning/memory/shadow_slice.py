"""A step on the slice of one replica, or on some of its rows, by a shadow module: it is no step of the run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torchmetrics import Metric

from lightning_dpx.lightning.lightning_compat import set_trainer, trainer_of
from lightning_dpx.lightning.memory.slice_loss import SliceLoss
from lightning_dpx.lightning.rehearsal.manual_shadow_step import hide_optimizers
from lightning_dpx.memory.profile.profiled_step import Run
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from lightning_dpx.replicas.error_notes import trial_noted

Step = Callable[[Any, Any, int], Any]  # of a module, on a batch of so many rows
PURPOSE = "from which memory is planned; nothing of it stays"


@contextmanager
def on_shadow(
    replicas: ReplicaSet, batch_slice: BatchSlice, run: Step, target: torch.device
) -> Iterator[tuple[Any, Callable[[Any], Run]]]:
    """A shadow for a slice, and its step on any batch; errors in here say that it was no step of the run."""
    shadow = shadow_of(replicas, batch_slice)
    end = SliceLoss(replicas, shadow)
    noted = trial_noted(batch_slice.replica.index, target, "training_step", PURPOSE)
    with noted, preserve_rng_state(replicas.devices, [replicas.root.module]):
        yield shadow, lambda batch: end.run_of(partial(run, shadow, batch, batch_slice.num_rows))


def shadow_of(replicas: ReplicaSet, batch_slice: BatchSlice) -> Any:
    """A shadow of the slice's replica, that runs the step as the replica would, and trains nothing."""
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
    return rows_and_cut(replicas, whole)


def rows_and_cut(replicas: ReplicaSet, batch_slice: BatchSlice) -> tuple[int, Callable[[int], Any]]:
    """The rows of a slice, and what gives its first ones, for a slice whose rows are known."""
    return batch_slice.num_rows, partial(rows_of_slice, replicas, batch_slice)


def rows_of_slice(replicas: ReplicaSet, batch_slice: BatchSlice, rows: int) -> Any:
    """The first ``rows`` rows of a slice."""
    # Also where the batch cannot be cut at all.
    if rows == batch_slice.num_rows:
        return batch_slice.batch
    return replicas.slicer.cut(batch_slice.batch, [rows, batch_slice.num_rows - rows])[0]
