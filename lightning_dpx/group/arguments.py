"""Checks of what a user gives to a group, before anything is changed by it."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import nn

from lightning_dpx.arguments import check_choice
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.replicas import check_batch_dim
from lightning_dpx.shifting import applied_shift

GradReq = Literal["write", "add", "null"]


def gradient_requests(module: nn.Module, grad_req: GradReq | Mapping[str, GradReq]) -> dict[str, GradReq]:
    """What is done with the gradient of each parameter, by name.

    Raises:
        ConfigurationError: ``grad_req`` names a parameter that is not there, or asks for something else.
    """
    names = [name for name, _ in module.named_parameters()]
    if not isinstance(grad_req, Mapping):
        check_choice("grad_req", grad_req, get_args(GradReq))
        return dict.fromkeys(names, grad_req)
    # A misspelled name would silently leave its parameter at "write".
    for name, request in grad_req.items():
        if name not in names:
            raise ConfigurationError(f"grad_req names {name!r}; the parameters are: {', '.join(names)}.")
        check_choice(f"grad_req[{name!r}]", request, get_args(GradReq))
    return {name: grad_req.get(name, "write") for name in names}


def check_fixed_params(fixed_params: Sequence[str], names: Collection[str]) -> None:
    """Whether ``fixed_params`` is a list of some of these ``names``.

    Raises:
        ConfigurationError: it is not.
    """
    # A text is a collection as well, of its letters.
    if isinstance(fixed_params, str):
        raise ConfigurationError(f"fixed_params={fixed_params!r} is not allowed; give a list: [{fixed_params!r}].")
    if not isinstance(fixed_params, Collection):
        raise ConfigurationError(f"fixed_params={fixed_params!r} is not allowed; give a list of names of parameters.")
    for name in fixed_params:
        if name not in names:
            raise ConfigurationError(f"fixed_params names {name!r}; the parameters are: {', '.join(names)}.")


def check_inputs_named(module: nn.Module, batch_dim: int | Mapping[str, int]) -> None:
    """Whether the inputs that ``batch_dim`` names are those of ``module``, where its signature says so.

    Raises:
        ConfigurationError: one is not, or the dims are no ints.
    """
    check_batch_dim(batch_dim)
    if not isinstance(batch_dim, Mapping):
        return
    parameters = inspect.signature(module.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    # A forward with `*args` or `**kwargs` takes inputs of any name.
    if not kinds.isdisjoint({inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}):
        return
    known = [*map(str, range(len(parameters))), *parameters, "output", "labels"]
    for path in batch_dim:
        # What lies within an input is known only when it comes.
        if path.partition(".")[0] not in known:
            raise ConfigurationError(
                f"batch_dim names {path!r}; {type(module).__name__}.forward takes {', '.join(parameters)}, by position "
                '"0" and so on; what it returns is "output", and what a metric compares that with is "labels".'
            )


def check_not_shifted(module: nn.Module) -> None:
    """Whether all of ``module`` is on the device of its replica, where its gradients are summed.

    Raises:
        ConfigurationError: a part is not.
    """
    shift = applied_shift(module)
    if shift is not None:
        raise ConfigurationError(
            f"The module is shifted, {shift.entry}, and a replica of a group is on one device: call "
            "unshift_activations(module) first, or train with DPXStrategy(shifts=...), which shifts every replica."
        )


def check_value(name: str, value: object, own: torch.Tensor) -> None:
    """Whether ``value`` may be written to ``own``.

    Raises:
        ConfigurationError: it may not.
    """
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(f"The value of {name!r} is {type(value).__name__}; give a tensor.")
    # A copy would stretch one value over all elements.
    if value.shape != own.shape:
        raise ConfigurationError(
            f"The value of {name!r} has shape {tuple(value.shape)}, the module's has {tuple(own.shape)}; they must be "
            "equal."
        )
