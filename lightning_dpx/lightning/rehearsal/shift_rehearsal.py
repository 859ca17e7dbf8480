"""Where an example of the inputs is known, shifts are tried at setup, before anything is trained."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_dpx.errors import ReplicationError
from lightning_dpx.lightning.lightning_api import rank_zero_info
from lightning_dpx.lightning.lightning_compat import before_batch_transfer, set_trainer, trainer_of, transfer_batch
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.replicas.error_notes import trial_noted
from lightning_dpx.shifting import shift_activations


def rehearse_shifts(
    replicas: ReplicaSet, shifts: Mapping[torch.device, torch.device], parts: Sequence[str], precision: Any
) -> None:
    """Runs a shifted shadow module for one replica on the module's ``example_input_array``, if it has one.

    The user's module takes no part in it: whatever its ``forward`` counts or appends stays as it is.

    Args:
        replicas: The replicas; all are shifted alike, so one answers for them.
        shifts: ``{from: to}``.
        parts: Names of submodules, or patterns.
        precision: The precision plugin, in whose context forward runs.

    Raises:
        UnsupportedError: something lies across the cut that cannot.
    """
    module: Any = replicas.root.module
    shifted = next((replica for replica in replicas.replicas if replica.device in shifts), None)
    if getattr(module, "example_input_array", None) is None or shifted is None:
        return
    try:
        shadow: Any = replicas.make_shadow_module(shifted)
    except ReplicationError as error:
        rank_zero_info(f"dpx: the shifts are checked in the first step, not on example_input_array: {error}")
        return
    set_trainer(shadow, trainer_of(module))  # LightningModule drops it from its copies
    example = before_batch_transfer(module, module.example_input_array)
    shadow.example_input_array = transfer_batch(module, example, shifted.device)
    noted = trial_noted(shifted.index, shifted.device, "setup", "of example_input_array in which shifts are checked")
    with noted, preserve_rng_state(replicas.devices, [module]), precision.forward_context():
        shift_activations(shadow, parts, {shifted.device: shifts[shifted.device]})
    del shadow
    gc.collect()  # modules are in reference cycles, and what it held on the target is needed there
