"""What a module's ``example_input_array`` tells at setup: whether one row of it fits at all.

It feeds ``forward`` and not ``training_step``, and its rows are not those of a batch. So no plan is made from it; but a
budget that has no room for one row of it has none for a batch, and the fit need not wait for one to say so.
"""

import gc
from functools import partial
from typing import Any

import torch

from lightning_dpx.activations import run_on_example
from lightning_dpx.errors import PlanError, ReplicationError, SliceError
from lightning_dpx.lightning.lightning_api import rank_zero_info
from lightning_dpx.lightning.lightning_compat import before_batch_transfer, set_trainer, trainer_of, transfer_batch
from lightning_dpx.lightning.memory.profiling import devices_of
from lightning_dpx.memory import Profile, profile_step, sum_of
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.replicas import Replica, ReplicaSet, batch_size, slice_batch
from lightning_dpx.replicas.error_notes import trial_noted


def profile_example(
    replicas: ReplicaSet, replica: Replica, precision: Any, *, counts_gradients: bool = False
) -> list[Profile]:
    """Profiles forward and backward of a shadow on one row, for each device of ``replica``.

    In evaluation mode, as batch normalization refuses to train on one row: a step keeps this much and more.

    Args:
        replicas: The replicas.
        replica: One of them.
        precision: The precision plugin, in whose context forward runs.
        counts_gradients: As :func:`profile_step` takes it.

    Returns:
        Nothing where there is no example, or where no single row of it can be tried.
    """
    module: Any = replicas.root.module
    if getattr(module, "example_input_array", None) is None:
        return []
    try:
        with preserve_rng_state(replicas.devices, [module]):
            # Inside, as the user's hook may draw numbers, too.
            row = _first_row(before_batch_transfer(module, module.example_input_array), replicas)
            profiled = partial(_profile, replicas, replica, row, precision, counts_gradients=counts_gradients)
            return list(map(profiled, devices_of(replica)))
    # An example is a help and no condition: what cannot be tried is left to the first batch.
    except (PlanError, ReplicationError, SliceError, torch.OutOfMemoryError) as error:
        rank_zero_info(f"dpx: example_input_array tells nothing about memory before the first batch: {error}")
        return []
    finally:
        gc.collect()  # a shadow module and its gradients are in reference cycles


def _first_row(example: Any, replicas: ReplicaSet) -> Any:
    if not isinstance(replicas.slicer.batch_dim, int):
        raise SliceError("batch_dim names the inputs of a batch, not those of forward.")
    num_rows = batch_size(example, replicas.slicer.batch_dim)
    if num_rows == 1:
        return example
    return slice_batch(example, [1, num_rows - 1], replicas.slicer.batch_dim)[0]


def _profile(
    replicas: ReplicaSet, replica: Replica, row: Any, precision: Any, device: torch.device, *, counts_gradients: bool
) -> Profile:
    shadow: Any = replicas.make_shadow_module(replica)
    set_trainer(shadow, trainer_of(replicas.root.module))  # LightningModule drops it from its copies
    example = transfer_batch(shadow, row, replica.device)
    # Code of forward may look at the attribute, and finds it on the device of its inputs.
    shadow.example_input_array = example
    run = run_on_example(shadow, example, replica.device)
    with trial_noted(replica.index, replica.device, "setup", "of example_input_array, to see whether it fits"):
        return profile_step(
            shadow,
            lambda: sum_of(run()),
            device,
            context=precision.forward_context,
            counts_gradients=counts_gradients,
        )
