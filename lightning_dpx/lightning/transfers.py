"""Slices to their devices: second stage of a step, through the user's own batch hooks."""

from typing import Any

import torch
from torch import Tensor

from lightning_dpx.lightning.lightning_api import pl
from lightning_dpx.lightning.lightning_compat import data_hooks, in_hook
from lightning_dpx.lightning.loaded_batches import RewindableBatches, fetches_by_itself
from lightning_dpx.replicas import BatchSlice

TRANSFER_HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")
_DEFAULTS = (pl.LightningModule.transfer_batch_to_device, pl.LightningModule.on_after_batch_transfer)


class Transfer:
    """Moves the slices of one step; what its hooks are is asked once, not by every replica.

    Args:
        trainer: Knows whether a hook is the module's or the datamodule's.
        module: The user's.
        dataloader_idx: Of an evaluation with several loaders.
    """

    __slots__ = ("_calls_of_module", "_dataloader_idx", "_others", "is_plain")

    def __init__(self, trainer: Any, module: pl.LightningModule, dataloader_idx: int) -> None:
        self._dataloader_idx = dataloader_idx
        selector = data_hooks(trainer)
        owners = [selector.get_instance(hook) for hook in TRANSFER_HOOKS]
        # A data module is one object for all; hooks of the module are called on each replica's own.
        self._others = [None if isinstance(owner, pl.LightningModule) else owner for owner in owners]
        calls = [getattr(owner or module, hook) for owner, hook in zip(self._others, TRANSFER_HOOKS, strict=True)]
        own = [getattr(call, "__func__", None) not in _DEFAULTS for call in calls]
        # Whether nothing of the user's makes something else of a batch on its way to a device.
        self.is_plain: bool = not any(own)
        self._calls_of_module = own

    def leaves(self, batch: Any, device: torch.device) -> bool:
        """Whether it would give ``batch`` itself to a replica on ``device``."""
        return self.is_plain and _lives_on(batch, device)

    def to_replica(self, batch_slice: BatchSlice) -> Any:
        """The slice where its replica lives."""
        batch = batch_slice.batch
        device = batch_slice.replica.device
        if fetches_by_itself(batch):
            if isinstance(batch, RewindableBatches):
                # This may be another run of the same step, which fetches the same batches.
                batch.rewind()
            return batch
        is_there = _lives_on(batch, device)
        if is_there and self.is_plain:
            return batch
        arguments: tuple[tuple[Any, ...], ...] = ((device,), ())
        for hook, other, is_own, extra in zip(
            TRANSFER_HOOKS, self._others, self._calls_of_module, arguments, strict=True
        ):
            # The default hook would give back the very batch.
            if is_there and not is_own:
                continue
            module = batch_slice.replica.module
            # As Lightning calls it: ``self.log`` in there is refused.
            with in_hook(module, hook):
                batch = getattr(other or module, hook)(batch, *extra, self._dataloader_idx)
            is_there = False
        return batch


def _lives_on(batch: Any, device: torch.device) -> bool:
    """Whether ``batch`` is for certain on ``device``; asked of tensors and flat lists of them only."""
    for tensor in batch if type(batch) in (list, tuple) else (batch,):
        if type(tensor) is not Tensor or tensor.device != device:
            return False
    return True
