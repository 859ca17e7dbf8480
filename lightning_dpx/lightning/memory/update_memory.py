"""What steps of optimizers take on the host beside parameters, gradients and states, where nothing measures it.

Some take as much as all parameters together (``foreach=True`` keeps a list of what it computes for each of them), some
as much as the largest. Which it is shows on a small shadow.
"""

from collections.abc import Collection, Sequence
from typing import Any

from lightning_dpx.devices import canonical_device, is_host
from lightning_dpx.lightning.memory.shadow_optimizer import ShadowOptimizer, trained_by, with_shadow_optimizer
from lightning_dpx.memory import HostAccount


def bytes_of_update(optimizers: Sequence[Any], idle: Collection[int] = ()) -> int:
    """Bytes on the host that come and go in a step of one of the optimizers, at the most; 0 where that is not known.

    Args:
        optimizers: Which.
        idle: Ids of parameters without gradients, which a step leaves alone.
    """
    most = 0
    for optimizer in optimizers:
        if _is_on_host(optimizer):
            most = max(most, int(with_shadow_optimizer(optimizer, _taken, idle=idle) or 0))
    return most


def _is_on_host(optimizer: Any) -> bool:
    return all(is_host(canonical_device(parameter.device)) for parameter in trained_by(optimizer))


def _taken(shadow: ShadowOptimizer) -> float:
    """Bytes that come and go in a step of the optimizer that a shadow is of."""
    account = HostAccount()
    started = account.start()
    try:
        shadow.step()
    finally:
        taken = account.stop(started)
    return taken.most * shadow.scale
