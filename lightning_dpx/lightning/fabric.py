"""Fabric is told what to use in the place of the strategy.

Fabric wraps one module and leaves the loop to the user, who calls ``fabric.backward(loss)`` on one loss. Replicas need
the step as a whole: the batch is cut before it, losses and outputs are merged after it, and one backward runs through
all of them. A Trainer hands a strategy that step; Fabric does not. :class:`~lightning_dpx.ReplicaGroup` is the same
machinery for a loop of one's own: ``forward``, ``backward`` and gradients on the module's own parameters.
"""

from typing import NoReturn

from lightning_dpx.errors import UnsupportedError
from lightning_dpx.lightning.lightning_api import FABRIC_STRATEGIES


def refuse_fabric() -> None:
    """Makes ``Fabric(strategy="dpx")`` an error that says what to do."""
    # Fabric's registry raises for a name that it has already.
    if "dpx" not in FABRIC_STRATEGIES:
        FABRIC_STRATEGIES.register("dpx", _refuse, description="for a Trainer; with Fabric use ReplicaGroup")


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UnsupportedError(
        'strategy="dpx" needs a Trainer, which hands it whole steps; Fabric leaves the loop to you. In a loop of your '
        "own use group = lightning_dpx.ReplicaGroup(module, devices): it has forward() and backward(), and an "
        "optimizer of module.parameters() steps as it would on one device."
    )
