"""The step of a module outside of a Trainer: run as it is written, and profiled where it is, or where it shall be."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.activations import Inputs, inputs_of, step_on
from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import PlanError
from lightning_dpx.memory.execute.flat_units import unwrapped
from lightning_dpx.memory.execute.sharded_units import sharded_units
from lightning_dpx.memory.profile.abstract import first_rows, profile_absent, target_of
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.fake import fake_device_for
from lightning_dpx.memory.profile.profiled_step import Run
from lightning_dpx.memory.profile.profiler import profile_step
from lightning_dpx.memory.sharding import profile_unsharded
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.torch_compat import tree_leaves


def profile_module(
    module: nn.Module,
    *batch: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    accumulates: bool = False,
) -> Profile:
    """What a step of ``module`` on ``batch`` saves; see :func:`search_plan` and :func:`profile_step`."""
    return profile_inputs(module, inputs_of(module, batch, kwargs), device=device, accumulates=accumulates)


def profile_inputs(
    module: nn.Module, inputs: Inputs, device: torch.device | str | None = None, accumulates: bool = False
) -> Profile:
    """What a step of ``module`` saves, as :func:`profile_module`, of inputs that :func:`inputs_of` has checked."""
    # Sharded parameters are whole only in their unit's forward and backward, so their steps are
    # always profiled on fakes.
    if sharded_units(module):
        home = device or device_of(module, inputs)
        with unwrapped(module) as whole:
            return profile_unsharded(whole, inputs, home, partial(run_to_loss, whole), accumulates=accumulates)
    if device is not None:
        target = target_of(device)
        return profile_absent(
            module,
            inputs,
            target,
            partial(run_to_loss, module),
            here=fake_device_for(target),
            few=lambda: first_rows(inputs),
            accumulates=accumulates,
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise PlanError('On the meta device nothing can run; give device="cuda", or what else is to be planned for.')
    return profile_step(module, run_to_loss(module, inputs), device_of(module, inputs), accumulates=accumulates)


def run_to_loss(module: nn.Module, inputs: Inputs) -> Run:
    """One forward that ends in something to run backward from."""
    step = step_on(module, inputs)

    def run() -> torch.Tensor:
        with _muted(module) if hasattr(module, "training_step") else nullcontext():
            out = step()
        if isinstance(out, dict) and "loss" in out:
            out = out["loss"]
        return sum_of(out)

    return run


def sum_of(outputs: Any) -> torch.Tensor:
    """Something to run backward from, whatever a module returns.

    Raises:
        PlanError: no output requires grad.
    """
    results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not results:
        raise PlanError("There is nothing to plan: no output of the module depends on its parameters.")
    # A loss is taken as it is: no operator of ours in the step that is profiled.
    if len(results) == 1 and results[0].ndim == 0:
        return results[0]
    return torch.stack([result.float().sum() for result in results]).sum()


def _muted(module: nn.Module) -> AbstractContextManager[None]:
    """What a training step logs outside of a Trainer goes nowhere."""
    names = [name for name in ("log", "log_dict") if hasattr(module, name) and name not in vars(module)]
    return overridden(module, **dict.fromkeys(names, _logs_nothing))


def _logs_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def device_of(module: nn.Module, batch: Any) -> torch.device:
    """Where the module lives; with parts on several devices, the one of them where the batch is."""
    homes = [canonical_device(parameter.device) for parameter in module.parameters()]
    given = [canonical_device(leaf.device) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    for device in given:
        if device in homes:
            return device
    return next(iter([*homes, *given]), torch.device("cpu"))
