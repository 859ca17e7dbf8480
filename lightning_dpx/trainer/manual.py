"""Manual optimization on replicas: backward is each replica's own, whatever touches an optimizer happens once.

``optimizer.step()``, ``clip_gradients`` and ``scheduler.step()`` are meetings: when the last replica has arrived,
gradients are summed on the owners, the user's optimizer steps once, and the new parameters go back to the replicas.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_dpx.errors import UnsupportedError
from lightning_dpx.replicas import ReplicaSet, Share, current_rank
from lightning_dpx.shifting import unshifted
from lightning_dpx.step import TrainingStep
from lightning_dpx.trainer.instance_methods import instance_methods
from lightning_dpx.trainer.precision import DPXPrecision


class ManualOptimization:
    """Takes the place of a module's optimizer methods while its replicas run a training step.

    Args:
        replicas: The replicas.
        step: Sums the gradients.
        precision: Scales losses.
        shares: The parts of the batch.
    """

    def __init__(
        self, replicas: ReplicaSet, step: TrainingStep, precision: DPXPrecision, shares: Sequence[Share]
    ) -> None:
        self._replicas, self._step, self._precision = replicas, step, precision
        self._weights = dict(zip((share.replica.index for share in shares), step.weights(shares), strict=True))
        self._root: LightningModule = replicas.root.module  # type: ignore[assignment]
        self._scaling = Lock()

    @contextmanager
    def on(self, share: Share) -> Iterator[None]:
        """The replica's module meets the others in its optimizer methods for a while."""
        module: Any = share.replica.module
        mirror = dict(zip(self._step.owner_parameters, share.replica.parameters, strict=True))
        view = _ReplicaView(self, share, module, mirror)
        methods = ("optimizers", "lr_schedulers", "manual_backward", "clip_gradients")
        toggles = ("toggle_optimizer", "untoggle_optimizer")
        with instance_methods(module, {name: getattr(view, name) for name in (*methods, *toggles)}):
            yield

    def once(self, what: str, value: Any, act: Callable[[list[Any]], Any]) -> Any:
        """``act`` of all replicas' values, run by the last one to arrive."""
        rank = current_rank()
        assert rank is not None, "only called inside a step"
        return rank.meet(what, value, act)

    def backward(self, share: Share, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The replica's own backward, of its part of the loss."""
        rank, wrapped = current_rank(), self._precision.wrapped
        first = rank is None or rank.rank == 0
        loss = loss * self._weights[share.replica.index]
        with self._scaling:
            if first:
                loss = wrapped.pre_backward(loss, self._root)
            elif self._precision.scaler is not None:
                loss = self._precision.scaler.scale(loss)
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        if first:
            wrapped.post_backward(loss, self._root)
        self._step.gradients_changed()

    def zero_idle(self, optimizer: Any) -> None:
        """Replicas without rows in this step forget their gradients too; the first active one speaks for them."""
        rank = current_rank()
        if rank is None or rank.rank != 0:
            return
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        indices = [i for i, parameter in enumerate(self._step.owner_parameters) if id(parameter) in wanted]
        for replica in self._replicas.replicas:
            if replica.index not in self._weights:
                for index in indices:
                    replica.parameters[index].grad = None

    def step(self, optimizer: Any, losses: list[Any], options: dict[str, Any]) -> Any:
        """Sums the gradients, steps once and sends the parameters back."""
        with unshifted():
            self._step.reduce()
            result = optimizer.step(**options)
            self._replicas.state.optimizer_stepped()
            self._replicas.state.synchronize_parameters()
        kept = [loss for loss in losses if loss is not None]
        return kept[0] if kept else result

    def clip(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Sums the gradients and clips them once, by the user's own settings."""
        with unshifted():
            self._step.reduce()
        type(self._root).clip_gradients(self._root, optimizer, *args, **kwargs)

    def real_optimizers(self, use_pl_optimizer: bool) -> Any:
        """The trainer's."""
        return type(self._root).optimizers(self._root, use_pl_optimizer)

    def real_schedulers(self) -> Any:
        """The trainer's."""
        return type(self._root).lr_schedulers(self._root)


class _ReplicaView:
    """The optimizer methods of one replica's module."""

    def __init__(
        self, manual: ManualOptimization, share: Share, module: Any, mirror: dict[nn.Parameter, nn.Parameter]
    ) -> None:
        self._manual, self._share, self._module, self.mirror = manual, share, module, mirror
        self._frozen: dict[nn.Parameter, bool] = {}

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """As ``LightningModule.optimizers``."""
        real = self._manual.real_optimizers(use_pl_optimizer)
        if not isinstance(real, list):
            return ReplicaOptimizer(real, self._manual, self)
        return [ReplicaOptimizer(optimizer, self._manual, self) for optimizer in real]

    def lr_schedulers(self) -> Any:
        """As ``LightningModule.lr_schedulers``."""
        real = self._manual.real_schedulers()
        if not isinstance(real, list):
            return real and ReplicaScheduler(real, self._manual)
        return [ReplicaScheduler(scheduler, self._manual) for scheduler in real]

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """As ``LightningModule.manual_backward``; gradients are summed when an optimizer next needs them."""
        self._manual.backward(self._share, loss, *args, **kwargs)

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """As ``LightningModule.clip_gradients``, of the whole batch's gradients."""
        real = _real(optimizer)
        self._manual.once("clip_gradients()", None, lambda _: self._manual.clip(real, *args, **kwargs))

    def toggle_optimizer(self, optimizer: Any) -> None:
        """As ``LightningModule.toggle_optimizer``, on the replica's parameters."""
        everyone = self._manual.real_optimizers(False)
        for other in everyone if isinstance(everyone, list) else [everyone]:
            for parameter in self.mirrored(other):
                self._frozen.setdefault(parameter, parameter.requires_grad)
                parameter.requires_grad_(False)
        for parameter in self.mirrored(_real(optimizer)):
            parameter.requires_grad_(self._frozen[parameter])

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """As ``LightningModule.untoggle_optimizer``."""
        for parameter, needed in self._frozen.items():
            parameter.requires_grad_(needed)
        self._frozen = {}

    def mirrored(self, optimizer: Any) -> list[nn.Parameter]:
        """The replica's counterparts of an optimizer's parameters."""
        return [self.mirror[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _real(optimizer: Any) -> Any:
    return optimizer.real if isinstance(optimizer, ReplicaOptimizer) else optimizer


class ReplicaOptimizer:
    """An optimizer as one replica sees it: its own gradients to zero, one step together with the others."""

    def __init__(self, real: Any, manual: ManualOptimization, view: _ReplicaView) -> None:
        self.real, self._manual, self._view = real, manual, view

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Steps once for all replicas; each runs its own ``closure`` before.

        Raises:
            UnsupportedError: a closure for an optimizer that calls it more than once.
        """
        loss = None
        if closure is not None:
            if isinstance(getattr(self.real, "optimizer", self.real), torch.optim.LBFGS):
                raise UnsupportedError(
                    "LBFGS calls its closure several times a step, which manual optimization on several replicas does "
                    "not support; use automatic optimization."
                )
            with torch.enable_grad():
                loss = closure()
        manual, real = self._manual, self.real
        return manual.once("optimizer.step()", loss, lambda losses: manual.step(real, losses, options))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the replica's own gradients."""
        self._manual.zero_idle(self.real)
        for parameter in self._view.mirrored(self.real):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                with unshifted():
                    parameter.grad.zero_()

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only this optimizer's parameters require gradients for a while; sums wait for the next step anyway."""
        self._view.toggle_optimizer(self)
        try:
            yield
        finally:
            self._view.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class ReplicaScheduler:
    """A learning rate scheduler that steps once for all replicas."""

    def __init__(self, real: Any, manual: ManualOptimization) -> None:
        self.real, self._manual = real, manual

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps once."""
        return self._manual.once("scheduler.step()", None, lambda _: self.real.step(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
