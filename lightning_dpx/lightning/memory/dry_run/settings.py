"""What of a strategy decides about the memory and the time of a step that is only predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.memory.micro_batch_obstacles import RunToCut
from lightning_dpx.lightning.memory.step_times import Machines
from lightning_dpx.memory import Planner
from lightning_dpx.memory.plan_cache import PlanCache
from lightning_dpx.reducers import GradientReducer
from lightning_dpx.replicas import (
    BatchDim,
    MicroBatches,
    parse_workload,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What of the strategy decides about memory.

    Attributes:
        devices: One per replica; they need not exist.
        workload: As in the strategy; ``"auto"`` counts as even.
        batch_dim: As in the strategy.
        batch_slicer: As in the strategy.
        reducer: As in the strategy.
        budget: On each device, by device where they differ; or ``None``. An ``int`` is in bytes, a ``float`` a share
            of what the device would take without a plan.
        planner: As in the strategy.
        cache: Where profiles and plans of earlier dry runs are.
        micro_batches: As in the strategy; ``"auto"`` without a budget is 1.
        machines: What steps are timed for; ``None`` if they are not.
        run: What else decides whether micro-batches are chosen.
        keeps_buckets: Whether DDP holds every gradient once more, in the buckets that it sends.
    """

    devices: tuple[torch.device, ...]
    workload: str | Sequence[float] = "even"
    batch_dim: BatchDim = 0
    batch_slicer: Any = None
    reducer: str | GradientReducer = "auto"
    budget: int | float | Mapping[torch.device, int | float] | None = None
    planner: str | Planner = "auto"
    cache: PlanCache = field(default_factory=lambda: PlanCache(False))
    micro_batches: MicroBatches | Literal["auto"] = 1
    machines: Machines | None = None
    run: RunToCut = field(default_factory=RunToCut)
    keeps_buckets: bool = False

    def budget_of(self, device: torch.device) -> int | float | None:
        """What one device is allowed, in bytes or as a share."""
        return self.budget[device] if isinstance(self.budget, Mapping) else self.budget


def with_merged_replicas(settings: Settings) -> Settings:
    """``settings`` with one entry for replicas that are neighbors on one device, and take their slices as one.

    Raises:
        ConfigurationError: replicas on one device are no neighbors.
    """
    # Of each group of neighbors, their places.
    groups: list[list[int]] = []
    for index, device in enumerate(settings.devices):
        if groups and settings.devices[groups[-1][0]] == device:
            groups[-1].append(index)
        else:
            groups.append([index])
    devices = tuple(settings.devices[group[0]] for group in groups)
    again = [str(device) for index, device in enumerate(devices) if device in devices[:index]]
    if again:
        raise ConfigurationError(
            f"{again[0]} is named in two places, with other devices between them, and what replicas take that run "
            "beside each other on one device is not predicted; name it once, or its replicas one after the other."
        )
    if len(groups) == len(settings.devices):
        return settings
    # The rows of a slice are the sum of its neighbors', whatever they were given by.
    shares = parse_workload(settings.workload, len(settings.devices))
    merged = replace(settings, devices=devices, workload=[sum(shares[index] for index in group) for group in groups])
    if not isinstance(settings.micro_batches, int | str):
        numbers = [settings.micro_batches[group[0]] for group in groups]
        merged = replace(merged, micro_batches=numbers)
    return merged
