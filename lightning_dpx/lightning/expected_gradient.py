"""What Lightning's backward of the merged loss will begin with, and which gradients it will have zeroed before.

Micro-batches run their backward inside training_step, where both lie ahead; see ``replicas/early_backward.py``. What is
expected here is made good if it turns out otherwise; only what is certain is relied on.
"""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from lightning_dpx.lightning.gradient_hooks import has_hooks
from lightning_dpx.lightning.lightning_api import Callback, LightningModule
from lightning_dpx.lightning.lightning_compat import skips_backward
from lightning_dpx.lightning.transfers import TRANSFER_HOOKS
from lightning_dpx.python_objects.origin import is_installed, is_library, runs_steps
from lightning_dpx.replicas import ExpectedGradient
from lightning_dpx.torch_compat import forward_hooks_of, forward_pre_hooks_of

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

_OF_BACKWARD = frozenset({"backward", "on_before_backward"})
_OF_ZEROING = frozenset({"on_before_zero_grad", "optimizer_zero_grad"})
# Of what LightningModule has beside nn.Module, what is called when the last step's gradients may be gone.
_WITHIN_STEPS = frozenset({"training_step", "on_before_batch_transfer", *TRANSFER_HOOKS})


def names_gradients(module: LightningModule) -> bool:
    """Whether code of the user's, but for hooks after the step, says ``.grad`` anywhere, and so may read gradients."""
    kinds: set[type] = set()
    for child in module.modules():
        kinds.update(type(child).__mro__)
    for kind in itertools.filterfalse(is_library, kinds):
        for name, value in vars(kind).items():
            # What LightningModule has beside nn.Module are hooks; those that run within a step are
            # asked about one by one, in has_hooks().
            is_hook = hasattr(LightningModule, name) and not hasattr(Module, name) and name not in _WITHIN_STEPS
            if not is_hook and _may_read(value.fget if isinstance(value, property) else value, set()):
                return True
    return any(map(_object_may_read, _held_by(module)))


def _held_by(module: Module) -> Iterator[Any]:
    """What its parts call beside their own methods: hooks round their forwards, and objects that they keep."""
    for child in module.modules():
        yield from forward_hooks_of(child).values()
        yield from forward_pre_hooks_of(child).values()
        yield from vars(child).values()


def _object_may_read(value: Any) -> bool:
    """Whether a function, or a method of an object's class, says ``grad``, where it is the user's own."""
    value = value.func if isinstance(value, partial) else value
    value = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(value, FunctionType):
        return not is_installed(value.__module__) and _may_read(value, set())
    members: list[Any] = []
    for kind in type(value).__mro__:
        if not is_installed(kind.__module__):
            members += vars(kind).values()
    return any(_may_read(member, set()) for member in members if isinstance(member, FunctionType))


def _may_read(function: Any, seen: set[int]) -> bool:
    """Whether a function, or one that it names or holds and that is none of a library's, says ``grad``."""
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return False
    seen.add(id(code))
    if _names_grad(code):
        return True
    known = getattr(function, "__globals__", {})
    for other in (*_held_by_closure(function), *map(known.get, code.co_names)):
        if not isinstance(other, FunctionType):
            continue
        # Of a library's only itself: what it calls has nothing to do with a user's parameters, as a rule.
        inner = getattr(inspect.unwrap(other), "__code__", None)
        if inner is not None and (_names_grad(inner) if is_installed(other.__module__) else _may_read(other, seen)):
            return True
    return False


def _held_by_closure(function: Any) -> list[Any]:
    found: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty until what it is for has been assigned
            found.append(cell.cell_contents)
    return found


def _names_grad(code: CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    # Names of attributes are in the bytecode, so no source is needed; those that getattr takes are constants.
    return "grad" in code.co_names or "grad" in code.co_consts or any(map(_names_grad, inner))


def zeroes_unseen(module: LightningModule, callbacks: Sequence[Callback], optimizers: Sequence[Any]) -> bool:
    """Whether nothing of the user's sees gradients between a step and when they are zeroed after it."""
    # An overridden zero_grad may keep or read what is there.
    plain = all(type(optimizer).zero_grad is Optimizer.zero_grad for optimizer in optimizers)
    return plain and not has_hooks(module, callbacks, _OF_ZEROING)


class LossGradient:
    """Looks ahead to the backward of a session's steps.

    Args:
        session: Whose.

    Attributes:
        is_read_by_steps: Whether steps may look for the gradients of earlier ones.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._zeroed: frozenset[int] = frozenset()
        self._zeroed_of: tuple[int, ...] = ()
        self.is_read_by_steps: bool = names_gradients(session.module)

    def expected(self) -> ExpectedGradient:
        """The gradient of the merged loss in the step that has begun."""
        session = self._session
        precision = session.strategy.dpx_precision
        value: float | torch.Tensor = 1.0
        if precision.scaler is not None:
            # As a tensor: get_scale() would wait for the accelerator.
            value = precision.scaler.scale(torch.ones((), device=session.strategy.root_device))
        # Lightning divides the loss of a batch by the number of batches in its window.
        return ExpectedGradient(value=value / session.trainer.accumulate_grad_batches, is_certain=self._is_certain)

    @property
    def _is_certain(self) -> bool:
        """On an accelerator to look at the gradient is to wait for it; on the host it costs nothing."""
        session = self._session
        if session.strategy.root_device.type == "cpu":
            return False
        plain = runs_steps(type(session.strategy.dpx_precision.wrapped))
        return plain and not has_hooks(session.module, self._callbacks, _OF_BACKWARD)

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self._session.trainer.callbacks
        return callbacks

    def zeroed(self) -> frozenset[int]:
        """Ids of the parameters whose gradients Lightning zeroes right after training_step, seen by nothing until then.

        They are freed before it, so after an error in it there are none; on one device those of the step before are.
        """
        if self.is_read_by_steps:
            return frozenset()
        trainer = self._session.trainer
        # Lightning zeroes gradients before the first backward of a window, between training_step
        # and that backward.
        begins_window = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        if not begins_window or skips_backward(trainer):
            return frozenset()
        optimizers: list[Any] = self._session.strategy.optimizers
        # Optimizers may get groups or parameters in the middle of a fit.
        groups = _groups_of(optimizers)
        key = tuple(len(group["params"]) for group in groups)
        if key != self._zeroed_of:
            self._zeroed_of = key
            self._zeroed = self._zeroed_by(optimizers)
        return self._zeroed

    def _zeroed_by(self, optimizers: list[Any]) -> frozenset[int]:
        if not zeroes_unseen(self._session.module, self._callbacks, optimizers):
            return frozenset()
        zeroed: set[int] = set()
        for group in _groups_of(optimizers):
            zeroed.update(map(id, group["params"]))
        return frozenset(zeroed)


def _groups_of(optimizers: list[Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        groups += optimizer.param_groups
    return groups
