"""What steps of optimizers take on the host beside parameters, gradients and states, where nothing measures it.

Some take as much as all parameters together (``foreach=True`` keeps a list of what it computes for each of them), some
as much as the largest. Which it is shows on a small twin: the same settings, and parameters of a part of the rows.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import canonical_device, is_host
from lightning_dpx.memory import HostAccount

_ELEMENTS = 2**18  # of a twin's parameters, about


def bytes_of_update(optimizers: Sequence[Any]) -> int:
    """Bytes on the host that come and go in a step of one of the optimizers, at the most; 0 where that is not known."""
    most = 0
    for optimizer in optimizers:
        # A class of the user's may do anything when it is made.
        if f"{type(optimizer).__module__}.".startswith("torch.optim."):
            most = max(most, _bytes_of(optimizer))
    return most


def _bytes_of(optimizer: Any) -> int:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not all(is_host(canonical_device(parameter.device)) for parameter in trained):
        return 0
    # Large enough that what Python objects take does not count, and small beside any model that needs a budget.
    divisor = max(1, sum(parameter.numel() for parameter in trained) // _ELEMENTS)
    groups = []
    small: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        mine = [_part_of(parameter, divisor) for parameter in group["params"] if parameter.requires_grad]
        if mine:
            groups.append({"params": mine, **options})
        small += mine
    try:
        taken = _taken(type(optimizer)(groups))
    except Exception:  # noqa: BLE001  such as one that takes its step with a closure only
        return 0
    real: int = sum(parameter.nbytes for parameter in trained)
    parts: int = sum(parameter.nbytes for parameter in small)
    # What comes and goes is tensors of the shapes of parameters, so it grows as these do.
    return taken * real // parts


def _part_of(parameter: nn.Parameter, divisor: int) -> nn.Parameter:
    """A parameter of a part of the rows, with a gradient; where there are too few rows, of a part of the columns."""
    shape = []
    for size in parameter.shape:
        shape.append(max(1, size // divisor))
        divisor = max(1, divisor // size)
    part = nn.Parameter(torch.ones(shape, dtype=parameter.dtype, device="cpu"))
    part.grad = torch.ones_like(part)
    return part


@torch.no_grad()
def _taken(twin: Any) -> int:
    """Bytes that come and go in a step of a twin."""
    # Past the hooks that users have on the steps of all optimizers, and past what turns gradients off for a step.
    step = inspect.unwrap(type(twin).step)
    step(twin)  # states are made in the first one, and stay
    account = HostAccount()
    started = account.start()
    try:
        step(twin)
    finally:
        taken = account.stop(started)
    return taken.most
