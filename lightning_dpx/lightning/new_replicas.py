"""Replicas of a module as the strategy wants them, for a run or for a rehearsal of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.lightning.lightning_api import pl, rank_zero_warn
from lightning_dpx.lightning.lightning_compat import trainer_of
from lightning_dpx.lightning.metrics.metrics import KINDS, ReplicaMetrics
from lightning_dpx.replicas import MicroBatches, ReplicaSet, parse_micro_batches

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy


def new_replicas(
    strategy: "DPXStrategy",
    module: pl.LightningModule,
    devices: Sequence[torch.device],
    metrics: ReplicaMetrics,
    kind: type[ReplicaSet] = ReplicaSet,
    **changes: Any,
) -> ReplicaSet:
    """Replicas of ``module`` as the strategy wants them; a rehearsal wants some of it otherwise.

    Raises:
        ReplicationError: the module cannot be copied faithfully.
    """
    # Copies of the module share these: a Trainer leads to loggers, loaders and the module itself.
    keep: list[object] = [strategy, trainer_of(module), *(module.trainer.loggers if trainer_of(module) else [])]
    given = strategy.options
    options: dict[str, Any] = {
        "workload": given.workload,
        "batch_dim": given.batch_dim,
        "batch_slicer": given.batch_slicer,
        "execution": given.execution,
        "buffers": given.buffers,
        "micro_batches": first_micro_batches(strategy),
        "join_slices": True,
        "keep": [item for item in keep if item is not None],
        "private": private_attributes(),
        # Metrics are the user's own on every replica: see metrics/metrics.py.
        "shared": list(metrics.named.values()),
        "skip": KINDS,
        "deadline": float(given.timeout),
        "check_every": given.check_replicas_every_n_steps,
        "beyond": strategy.ranks.reach_other_processes if strategy.num_processes > 1 else None,
    }
    return kind(module, devices, **{**options, **changes})


def replicas_by_hand(
    strategy: "DPXStrategy", module: pl.LightningModule, devices: Sequence[torch.device], metrics: ReplicaMetrics
) -> ReplicaSet:
    """Replicas of a module that optimizes by hand.

    Micro-batches of one device are replicas there that take turns, with gradients of their own: they meet in
    ``optimizer.step()`` and the like, and what a ``manual_backward`` has freed is free before the next one runs. With
    several devices slices are not cut, which is announced.

    Raises:
        ReplicationError: the module cannot be copied faithfully.
    """
    numbers = parse_micro_batches(first_micro_batches(strategy), len(devices))
    if max(numbers) == 1:
        return new_replicas(strategy, module, devices, metrics)
    if len(devices) > 1:
        rank_zero_warn(
            "dpx: micro_batches cuts no slices here: steps by hand are cut into micro-batches on one device only."
        )
        return new_replicas(strategy, module, devices, metrics, micro_batches=1)
    # The device once for each micro-batch: every replica has gradients of its own, in turn.
    turns = list(devices) * numbers[0]
    alone: dict[str, Any] = {"micro_batches": 1, "workload": "even", "join_slices": False, "execution": "inline"}
    return new_replicas(strategy, module, turns, metrics, **alone)


def first_micro_batches(strategy: "DPXStrategy") -> MicroBatches:
    """Into how many micro-batches slices are cut from the first step on: as asked for, or as the given plan says."""
    asked = strategy.options.micro_batches
    if asked == "auto":
        return strategy.planning.given_micro_batches
    return asked


def private_attributes() -> frozenset[str]:
    """What every LightningModule has, and is none of the user's."""
    module = pl.LightningModule()
    before = dict(vars(module))
    # A hook may do so between the epochs, and the step asks for it on every replica.
    module.automatic_optimization = False
    return frozenset(key for key, value in vars(module).items() if before[key] is value)
