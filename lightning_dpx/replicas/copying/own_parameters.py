"""Parameters of a copy: of the same class, flags and hooks as the originals, with values and gradients of their own."""

import copy
from collections.abc import Mapping
from itertools import filterfalse

import torch
from torch import nn

from lightning_dpx.python_objects.module_hooks import is_ours
from lightning_dpx.replicas.array_slices import copied_to
from lightning_dpx.replicas.remote_tensor import RemoteTensor, source_of


def own_parameters(
    module: nn.Module, device: torch.device | None, existing: Mapping[str, nn.Parameter]
) -> dict[int, nn.Parameter]:
    """The copy's parameters, by the originals' ids; with their storage if ``device`` is ``None``."""
    found: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if name in existing:
            found[id(parameter)] = existing[name]
            continue
        data = parameter.detach() if device is None else copied_values(parameter, device)
        found[id(parameter)] = like_parameter(parameter, data)
    return found


def like_parameter(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter of the same class, flags and hooks of the user, with other values and no gradient."""
    # A subclass (of a library, or lazy) may have attributes and a constructor of its own.
    is_plain = type(parameter) is nn.Parameter
    # An evaluation that gave it other values by .data left a tensor that can have no gradient.
    if data.is_inference() and parameter.requires_grad:
        data = data.clone()
    duplicate = nn.Parameter(data, parameter.requires_grad) if is_plain else copy.copy(parameter)
    duplicate.data = data
    duplicate.grad = None
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name)
        if hooks:
            # torch takes hooks only of what requires a gradient; a frozen one is frozen again
            # below.
            duplicate.requires_grad_(True)
            register = duplicate.register_post_accumulate_grad_hook
            if name == "_backward_hooks":
                register = duplicate.register_hook
            for hook in filterfalse(is_ours, hooks.values()):
                register(hook)  # type: ignore[no-untyped-call]
            duplicate.requires_grad_(parameter.requires_grad)
    return duplicate


def copied_values(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Values of the replica's own, without history."""
    # It would fetch its values to its own device first, to have them copied once more.
    if isinstance(tensor, RemoteTensor):
        tensor = source_of(tensor)
    return copied_to(tensor, device or tensor.device)
