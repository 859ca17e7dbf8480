"""The precision plugin that Lightning chose, carried into a step of several replicas."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer


class DPXPrecision(Precision):
    """Wraps another precision plugin; after its backward of the merged loss the replicas run theirs.

    Args:
        wrapped: The plugin that holds the numeric policy (dtype, autocast, gradient scaler).
        after_backward: Called between the backward of the merged loss and the ``on_after_backward`` hooks.
    """

    def __init__(self, wrapped: Precision, after_backward: Callable[[], None]) -> None:
        self.wrapped = wrapped
        self.precision = wrapped.precision
        self._after_backward = after_backward

    def place(self, device: torch.device) -> None:
        """Lightning takes every accelerator that is no CPU for CUDA when it makes autocast and scaler; corrects it."""
        if isinstance(self.wrapped, MixedPrecision) and self.wrapped.device == "cuda" != device.type:
            self.wrapped.device = device.type
            if self.wrapped.scaler is not None:
                self.wrapped.scaler = torch.amp.GradScaler(device.type)

    @property
    def scaler(self) -> Any:
        """The gradient scaler of the wrapped plugin, or ``None``."""
        return vars(self.wrapped).get("scaler")

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: "pl.LightningModule", optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Backward of the (scaled) merged loss, then of every replica."""
        self.wrapped.backward(tensor, model, optimizer, *args, **kwargs)
        self._after_backward()

    def connect(self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Forwarded."""
        return self.wrapped.connect(model, optimizers, lr_schedulers)

    def convert_module(self, module: Module) -> Module:
        """Forwarded."""
        return self.wrapped.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        """Forwarded."""
        return self.wrapped.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """Forwarded."""
        return self.wrapped.convert_output(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Forwarded."""
        return self.wrapped.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Forwarded."""
        return self.wrapped.module_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Forwarded; entered once by every replica, in its own thread."""
        return self.wrapped.forward_context()

    def pre_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Forwarded."""
        return self.wrapped.pre_backward(tensor, module)

    def post_backward(self, tensor: Tensor, module: "pl.LightningModule") -> Tensor:  # type: ignore[override]
        """Forwarded."""
        return self.wrapped.post_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Forwarded."""
        return self.wrapped.optimizer_step(optimizer, model, closure, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Forwarded."""
        self.wrapped.clip_gradients(optimizer, *args, **kwargs)

    def main_params(self, optimizer: Any) -> Any:
        """Forwarded."""
        return self.wrapped.main_params(optimizer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores the wrapped plugin's state under its own class name, so that the file resumes anywhere."""
        if state := self.wrapped.state_dict():
            checkpoint[type(self.wrapped).__qualname__] = state
        self.wrapped.on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reads what :meth:`on_save_checkpoint`, or the plain plugin, stored."""
        if state := checkpoint.get(type(self.wrapped).__qualname__):
            self.wrapped.load_state_dict(state)
        self.wrapped.on_load_checkpoint(checkpoint)

    def teardown(self) -> None:
        """Forwarded."""
        self.wrapped.teardown()
