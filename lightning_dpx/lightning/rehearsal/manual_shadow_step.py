"""A step by hand of a shadow module, run in a sandbox: its optimizers are copies, and all that it changes is put back.

A memory profile runs such a step several times. Every run begins at the same parameters, optimizers, schedulers and
Python state, so it takes the same branches. Optimizers really step, on parameters that belong to the shadow alone:
how often they call a closure, and what they need meanwhile, is theirs to know.
"""

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_dpx.errors import PlanError
from lightning_dpx.lightning.manual.step_snapshot import StepSnapshot
from lightning_dpx.lightning.rehearsal.optimizer_copies import attributes_stepped_in, with_copied_optimizers
from lightning_dpx.lightning.rehearsal.sandbox import Sandbox
from lightning_dpx.lightning.rehearsal.shadow import pointing_at_shadow
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.replicas import GeneratorStates
from lightning_dpx.torch_compat import disable_current_modes

_HELD = "_dpx_optimizers"  # an attribute of the shadow: optimizers outlive a real step, so their end must not be seen

_HIDDEN: "weakref.WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str, Any]]]" = weakref.WeakKeyDictionary()


def hide_optimizers(shadow: nn.Module) -> None:
    """Takes optimizers and schedulers that a shadow holds out of it, until a sandbox puts copies in their place.

    They lead to the strategy and all that it holds, which a profile would look through for what a step changes.
    """
    hidden = []
    for child in shadow.modules():
        for key, value in attributes_stepped_in(child):
            hidden.append((vars(child), key, value))
    for attributes, key, _ in hidden:
        attributes[key] = None
    _HIDDEN[shadow] = hidden


class ManualSandbox:
    """Runs steps by hand of a shadow module.

    Args:
        strategy: Whose step it is.
        module: The real module.
        owners: What its optimizers hold, for each parameter of the module.
        devices: Those with random generators.
    """

    def __init__(
        self, strategy: Any, module: nn.Module, owners: Sequence[torch.Tensor], devices: Sequence[torch.device]
    ) -> None:
        self._strategy = strategy
        self._module = module
        self._owners = owners
        self._devices = devices

    @contextmanager
    def opened(self, shadow: Any) -> Iterator[None]:
        """A step of ``shadow`` in here; what watches operators or saved tensors does not see it prepared.

        Raises:
            PlanError: no copies of the optimizers can be made.
        """
        strategy = self._strategy
        trainer: Any = shadow.trainer
        with disable_current_modes(), torch.no_grad():
            # Let go of here: they were kept past the end of the last run.
            vars(shadow).pop(_HELD, None)
            state = StepSnapshot(shadow, [], GeneratorStates(self._devices, [shadow]), parameters=False)
            for attributes, key, value in _HIDDEN.get(shadow, ()):
                # The containers are written when copies of optimizers take their place,
                # and these are the user's.
                attributes[key] = copy.copy(value) if type(value) in (list, dict) else value
            # Kept to be put back: the tensors themselves, whose memory the real module shares.
            values = [parameter.data for parameter in shadow.parameters()]
            # A step that fails between toggle_optimizer and its counterpart leaves them frozen.
            trained = [parameter.requires_grad for parameter in shadow.parameters()]
            for parameter, value in zip(shadow.parameters(), values, strict=True):
                parameter.data = value.clone()
                # As after an earlier step that has not forgotten its gradients; one that does forgets these as well.
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            try:
                optimizers = with_copied_optimizers(strategy, self._module, [shadow], self._owners)
            except Exception as error:
                raise PlanError(
                    "A step by hand is profiled with copies of its optimizers and schedulers, which cannot be made "
                    f"({type(error).__name__}: {error}). Give plan, or let them hold only what can be copied."
                ) from error
        sandbox = Sandbox(trainer, self._module, (), self._devices)
        try:
            with (
                sandbox.opened(calls_hooks=True),
                overridden(strategy, **pointing_at_shadow(strategy, shadow), **optimizers),
            ):
                yield
        finally:
            with disable_current_modes(), torch.no_grad():
                for parameter, value in zip(shadow.parameters(), values, strict=True):
                    parameter.data = value
                for parameter, is_trained in zip(shadow.parameters(), trained, strict=True):
                    parameter.requires_grad_(is_trained)
                state.restore()
                vars(shadow)[_HELD] = optimizers
