"""Optimizers follow their parameters to other copies of them: to their owners, or back to the user's module."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_dpx.torch_compat import tree_map_only


def move_optimizers(optimizers: Sequence[Optimizer], counterparts: Mapping[Any, torch.nn.Parameter]) -> None:
    """Has ``optimizers`` change other copies of the parameters; state that they hold moves along.

    Args:
        optimizers: The user's optimizers.
        counterparts: By the parameter that an optimizer holds, the one that it shall hold.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [counterparts.get(parameter, parameter) for parameter in group["params"]]
        for parameter in list(optimizer.state):
            other = counterparts.get(parameter, parameter)
            if other is not parameter:
                optimizer.state[other] = _moved(optimizer.state.pop(parameter), parameter.device, other.device)


def _moved(state: Any, source: torch.device, target: torch.device) -> Any:
    """Step counters that an optimizer keeps on the host stay there."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(target) if tensor.device == source else tensor, state)
