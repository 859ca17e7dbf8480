"""Shadows of a module and its replicas: they run the user's step and leave no trace.

A shadow shares the parameters of the real module, with gradients of its own, and holds deep copies of its Python state,
buffers and metrics. While it runs, the strategy and the trainer point at it; loggers are Lightning's dummy, callbacks
are not called, and whatever the step may have changed outside the shadow is put back (:mod:`.sandbox`).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

from lightning_dpx.lightning.lightning_api import LightningModule
from lightning_dpx.lightning.lightning_compat import set_trainer, trainer_of
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.lightning.rehearsal.sandbox import Sandbox
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from lightning_dpx.replicas.batch_norm import batch_norms_by_slice
from lightning_dpx.replicas.copying.own_parameters import like_parameter
from lightning_dpx.replicas.shared_iterators import guard_iterators, iterators_that_cannot_be_copied


class ShadowReplicas(ReplicaSet):
    """Replicas of a shadow, whose steps run in the sandbox.

    Attributes:
        sandbox: Set right after they are made.
        metrics: The metrics of the shadow, which its replicas share.
        saves_on_host: Whether what backward needs waits on the host.
    """

    sandbox: Sandbox
    metrics: ReplicaMetrics
    saves_on_host = False

    def run(self, stage: str, slices: Sequence[BatchSlice], call: Callable[[BatchSlice], Any]) -> list[Any]:
        """Runs a stage as all replicas do, in the sandbox."""

        def watched(batch_slice: BatchSlice) -> Any:
            with self.sandbox.in_step(stage), save_on_cpu() if self.saves_on_host else nullcontext():
                return call(batch_slice)

        return super().run(stage, slices, watched)


def make_shadow(
    replicas: ReplicaSet, requested: list[str], *, own_parameters: bool
) -> tuple[LightningModule, list[str]]:
    """A shadow of the real module, and the names of its batch norms that normalize by their slice.

    Those run in eval mode on both sides of a comparison; else everything behind them would differ by design.

    Args:
        replicas: The real ones.
        requested: Gets the paths of iterators that cannot be copied, if the shadow takes an item of one.
        own_parameters: The step will write them, as manual optimization does.

    Raises:
        ReplicationError: something cannot be copied; names the attribute.
    """
    iterators = iterators_that_cannot_be_copied(replicas.root.module)
    shadow: Any = replicas.make_shadow_module(keep=iterators)
    guard_iterators(shadow, iterators, requested)
    set_trainer(shadow, trainer_of(replicas.root.module))  # LightningModule drops it from its copies
    if own_parameters:
        # Memory of its own: its optimizers really write it.
        for parameter in shadow.parameters():
            parameter.data = parameter.data.clone()
    norms = batch_norms_by_slice(shadow)
    for name in norms:
        norm = shadow.get_submodule(name)
        # Without running statistics batch norm normalizes by its slice in either mode.
        norm.training = norm.running_mean is None
    return shadow, norms


def shared_parameters(replicas: ReplicaSet, shadow: nn.Module) -> list[dict[str, nn.Parameter]]:
    """For every device's replica of a shadow, parameters that share the storage of the real one's."""
    named = list(shadow.named_parameters())
    shared = []
    for replica in replicas.primaries:
        parameters: dict[str, nn.Parameter] = {}
        for (name, own), real in zip(named, replica.parameters, strict=True):
            # By like_parameter, which keeps hooks of the user and flags, and
            # gives a gradient of its own.
            parameters[name] = like_parameter(own, real.detach())
        shared.append(parameters)
    return shared


def pointing_at_shadow(strategy: Any, shadow: nn.Module) -> dict[str, Any]:
    """The attributes by which a strategy, and through it the trainer, has ``shadow`` for its module, on one device."""
    attributes: dict[str, Any] = {"_lightning_module": shadow, "_model": shadow}
    # ActivationPlanner profiles steps by hand under other strategies, which know no sessions.
    if "ranks" in vars(strategy):  # a strategy of ours
        attributes |= {"session": strategy.one_device, "ranks": strategy.ranks.of_shadow(1)}
    # Only what the strategy has set itself: other strategies may not have both.
    return {name: value for name, value in attributes.items() if name in vars(strategy)}
