"""Whether gradients of earlier batches are there in a step, as Lightning and its hooks leave them."""

from lightning_dpx.lightning.expected_gradient import names_gradients, zeroes_unseen
from lightning_dpx.lightning.lightning_api import (
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    Trainer,
    is_overridden,
)


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
