"""Modules that are trained either way: by Lightning, or by hand."""

from typing import Any

import torch
from lightning.pytorch import LightningModule


def loss_or_step(module: LightningModule, loss: torch.Tensor) -> torch.Tensor | None:
    """The loss, for Lightning; where ``module`` optimizes by hand, a step of its optimizer in place of it."""
    if module.automatic_optimization:
        return loss
    optimizer: Any = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return None
