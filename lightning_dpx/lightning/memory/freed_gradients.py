"""The gradients of the step before, which a planned step frees before its forward.

Lightning sets them to None between a forward and its backward, so that all of them are there beside all activations,
where a plain loop with ``zero_grad`` at its start has none. Freed earlier, they leave their room to activations: at the
end of the forward, where most of these are there, no gradient is, and as gradients come, activations go.
"""

from typing import TYPE_CHECKING

from lightning_dpx.lightning.expected_gradient import LossGradient
from lightning_dpx.lightning.lightning_api import LightningModule, Trainer
from lightning_dpx.lightning.memory.profiling import keeps_earlier_gradients

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


def may_free_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """Whether nothing sees the gradients of a step between its update and where Lightning sets them to ``None``.

    Of all parameters that are trained: what no optimizer has, keeps its gradients.
    """
    if not module.automatic_optimization or keeps_earlier_gradients(trainer, module):
        return False
    optimized: set[int] = set()
    for optimizer in trainer.strategy.optimizers:
        for group in optimizer.param_groups:
            optimized.update(map(id, group["params"]))
    # One that is left out would be counted where it comes in the first step, and is there all through the next.
    return all(id(parameter) in optimized for parameter in module.parameters() if parameter.requires_grad)


class FreedGradients:
    """Frees them in the steps of a session that is one device.

    Args:
        session: Whose steps.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._gradient: LossGradient | None = None

    @property
    def are_freed(self) -> bool:
        """Whether every step of now on that begins a window of accumulation finds none."""
        session = self._session
        return self._is_alone() and may_free_gradients(session.trainer, session.module)

    def free(self) -> None:
        """Before a step: frees what Lightning would set to ``None`` in it, and nothing sees until then."""
        if not self._is_alone() or not self._session.module.automatic_optimization:
            return
        if self._gradient is None:  # it looks through all classes of the module
            self._gradient = LossGradient(self._session)
        # None in the middle of a window of accumulation, and where hooks look at them.
        zeroed = self._gradient.zeroed()
        for parameter in self._session.replicas.root.parameters if zeroed else ():
            if id(parameter) in zeroed:
                parameter.grad = None

    def _is_alone(self) -> bool:
        """Whether the first replica has every batch; elsewhere gradients are summed, in memory that stays."""
        session = self._session
        replicas = session.replicas
        is_first = len(replicas.replicas) == 1 or replicas.partition.always_merged
        has_others = session.has_processes or session.step.has_other_owners
        return is_first and not has_others and not replicas.cuts_slices
