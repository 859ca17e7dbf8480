"""``self.log`` inside a step of several replicas: collected per replica, logged once."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from lightning_dpx.errors import GatherError
from lightning_dpx.replicas import Share, weighted_mean
from lightning_dpx.trainer.instance_methods import instance_methods
from lightning_dpx.trainer.metrics import ReplicaMetrics


@dataclass(slots=True)
class StepLog:
    """What one replica logged in one step, in order of its calls."""

    share: Share
    entries: dict[tuple[str, int], tuple[Any, dict[str, Any]]] = field(default_factory=dict)

    def record(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **options: Any) -> None:
        """Takes the place of ``LightningModule.log`` for the duration of a step."""
        if isinstance(value, torch.Tensor) and not options.get("enable_graph"):
            value = value.detach()
        call = next(call for call in itertools.count() if (name, call) not in self.entries)
        self.entries[name, call] = value, {"prog_bar": prog_bar, "logger": logger, **options}

    @contextmanager
    def recording(self, module: LightningModule) -> Iterator[None]:
        """``module.log`` (and so ``log_dict``) writes here for a while."""
        with instance_methods(module, {"log": self.record}):
            yield


def replay(logs: Sequence[StepLog], module: LightningModule, device: torch.device, metrics: ReplicaMetrics) -> None:
    """Logs every entry once, merged over the replicas that logged it; a metric object as the user's own.

    Means are weighted by each replica's ``batch_size`` (its rows unless given), sums, minima and maxima merge by their
    own operation; Lightning sees the batch size of the whole batch.
    """
    keys = dict.fromkeys(key for log in logs for key in log.entries)
    for key in keys:
        present = [(log.share.num_rows, *log.entries[key]) for log in logs if key in log.entries]
        options = dict(present[0][2])
        weights = [given.get("batch_size") or rows for rows, _, given in present]
        if any(given.get("batch_size") for _, _, given in present):
            options["batch_size"] = sum(weights)  # else Lightning counts the rows of the whole batch, as it always does
        if isinstance(present[0][1], Metric):
            module.log(key[0], present[0][1], **options)  # the replicas share it
            continue
        if all(metrics.is_whole(value) for _, value, _ in present):
            module.log(key[0], present[0][1].to(device), **options)
            continue
        value = _merge([value for _, value, _ in present], weights, options.get("reduce_fx", "mean"), device, key[0])
        module.log(key[0], value, **options)


def _merge(values: list[Any], weights: list[int], reduce_fx: Any, device: torch.device, name: str) -> Any:
    operation = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if all(isinstance(value, int | float) for value in values):
        if operation == "mean":
            same = all(value == values[0] for value in values)
            return values[0] if same else sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
        return sum(values) if operation == "sum" else min(values) if operation == "min" else max(values)
    if any(isinstance(value, dict) for value in values):
        raise GatherError(
            f"self.log({name!r}, <dict>) is not supported inside a step of several replicas: use log_dict."
        )
    tensors = [torch.as_tensor(value, device=device) for value in values]
    tensors = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    if operation == "mean":
        return weighted_mean(tensors, weights, device)
    stacked = torch.stack(tensors)
    return stacked.sum(0) if operation == "sum" else stacked.amin(0) if operation == "min" else stacked.amax(0)
