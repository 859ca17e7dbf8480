"""One copy of parameters and buffers for two modules: those of a group that exists stand in another module as well."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.replicas import Replica
from lightning_dpx.torch_compat import buffers_of, parameters_of


def parameters_by_replica(theirs: Sequence[Replica], devices: Sequence[torch.device]) -> list[dict[str, nn.Parameter]]:
    """Every replica's parameters, also under the other names of tied ones.

    Args:
        theirs: The replicas of the group that exists.
        devices: Of the new one.

    Raises:
        ConfigurationError: the devices are not the same.
    """
    places = [replica.device for replica in theirs]
    # Parameters are shared replica by replica, so number and order count.
    if places != list(devices):
        raise ConfigurationError(
            f"shared_group lives on {', '.join(map(str, places))}, this group on {', '.join(map(str, devices))}; both "
            "need the same devices."
        )
    return [dict(replica.module.named_parameters(remove_duplicate=False)) for replica in theirs]


def adopt_parameters(module: nn.Module, existing: Mapping[str, nn.Parameter]) -> None:
    """Puts the existing parameters into ``module``, in the place of those of the same names.

    Raises:
        ConfigurationError: two of one name differ in shape or dtype.
    """
    # A module that is used in two places has parameters under both names.
    for path, child in module.named_modules(remove_duplicate=False):
        for key, mine in list(parameters_of(child).items()):
            name = f"{path}.{key}" if path else key
            # A layer without a bias has None in its place.
            if mine is None or name not in existing:
                continue
            theirs = existing[name]
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise ConfigurationError(
                    f"Parameter {name} has shape {tuple(mine.shape)} and {mine.dtype} here, {tuple(theirs.shape)} and "
                    f"{theirs.dtype} in shared_group; shared parameters need equal shapes and dtypes."
                )
            parameters_of(child)[key] = theirs


def adopt_buffers(module: nn.Module, source: nn.Module) -> None:
    """Puts what ``source`` counts and averages, such as running statistics, in the place of what ``module`` has."""
    theirs = source.state_dict(keep_vars=True)
    persistent = module.state_dict(keep_vars=True)
    # As for parameters: a module in two places has its buffers under both names.
    for path, child in module.named_modules(remove_duplicate=False):
        for key, mine in list(buffers_of(child).items()):
            name = f"{path}.{key}" if path else key
            # Not in the state dict: a constant, such as a mask, that follows from the shape of the module.
            if mine is None or name not in persistent or name not in theirs:
                continue
            # Buffers of other shapes belong to the other shape of the module, and stay its own.
            if mine.shape == theirs[name].shape and mine.dtype == theirs[name].dtype:
                buffers_of(child)[key] = theirs[name]
