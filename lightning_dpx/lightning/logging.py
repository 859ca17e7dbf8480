"""``self.log`` inside a step of several replicas: collected per replica, logged once."""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torchmetrics import Metric

from lightning_dpx.lightning.instance_methods import InstanceMethods
from lightning_dpx.lightning.lightning_api import LightningModule, MisconfigurationException
from lightning_dpx.lightning.lightning_compat import hook_of, trainer_of
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.lightning.step_metrics import as_metric, metrics_shown, names_of
from lightning_dpx.lightning.transfers import TRANSFER_HOOKS
from lightning_dpx.replicas import BatchSlice, MergeRules, Weights, weights_of

_SIGNATURE = inspect.signature(LightningModule.log)


@dataclass(slots=True)
class StepLog:
    """What one replica logged in one step, in order of its calls."""

    batch_slice: BatchSlice
    entries: dict[tuple[str, int], tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    given: dict[tuple[str, int], Any] = field(default_factory=dict)  # what was logged, by whose memory metrics know it
    read_back: set[str] = field(default_factory=set)  # what a step that runs alone has read of what it logged

    def record(self, name: str, value: Any, *settings: Any, **options: Any) -> None:
        """Takes the place of ``LightningModule.log`` for the duration of a step."""
        hook = hook_of(self.batch_slice.replica.module)
        if hook in TRANSFER_HOOKS:
            raise MisconfigurationException(
                f"You can't `self.log()` inside `{hook}`. Log it in the step, or in a hook of the batch."
            )
        # All of Lightning's arguments may be given by place. Most calls name them, and are spared the look-up.
        if settings:
            bound = _SIGNATURE.bind(None, name, value, *settings, **options).arguments
            options = {key: one for key, one in bound.items() if key not in ("self", "name", "value")}
        given = value
        if isinstance(value, torch.Tensor):
            # Lightning detaches what is logged, too. A graph that waits here would hold
            # the slice's activations.
            if not options.get("enable_graph"):
                value = value.detach()
            given = value
            # As it is now, and as Lightning takes it: a step may go on to add to a loss in place.
            value = value.clone()
        call = next(call for call in itertools.count() if (name, call) not in self.entries)
        self.given[name, call] = given
        self.entries[name, call] = value, {"prog_bar": False, "logger": None, **options}

    def recording(self, module: LightningModule) -> InstanceMethods:
        """Within the returned block ``module.log`` (and so ``log_dict``) writes here."""
        return InstanceMethods(module, {"log": self.record})

    @contextmanager
    def recording_alone(self, module: LightningModule) -> Iterator[None]:
        """The same for a step that no other slice runs beside: what it has logged it finds in the Trainer's metrics."""
        trains = bool(getattr(trainer_of(module), "training", True))

        def logged() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for (name, _), (value, options) in self.entries.items():
                if isinstance(value, torch.Tensor | int | float):
                    found.update(dict.fromkeys(names_of(name, options, trains=trains), as_metric(value)))
            return found

        with self.recording(module), metrics_shown(module, logged, self.read_back):
            yield


def path_of(key: tuple[str, int]) -> str:
    """The name of a logged value; one that is logged again in the same step is told apart."""
    name, call = key
    if call == 0:
        return name
    return f"{name} (call {call + 1})"


def replay(
    logs: Sequence[StepLog],
    module: LightningModule,
    device: torch.device,
    metrics: ReplicaMetrics,
    rules: MergeRules,
) -> None:
    """Logs every entry once, merged over the replicas that logged it; a metric object as the user's own.

    Values are merged by ``rules``. Where those know nothing, means are weighted by each replica's ``batch_size`` (its
    rows unless given), sums, minima and maxima merge by their own operation. Lightning sees the batch size of the whole
    batch.
    """
    # In the order of the first call, also of keys that not all replicas have logged.
    keys = dict.fromkeys(key for log in logs for key in log.entries)
    for key in keys:
        present = [(log.batch_slice, *log.entries[key]) for log in logs if key in log.entries]
        options = dict(present[0][2])
        counts = weights_of([batch_slice for batch_slice, _, _ in present])
        given = [options.get("batch_size") for _, _, options in present]
        rows = [one or count for one, count in zip(given, counts.rows, strict=True)]
        if any(given):  # else Lightning counts the rows of the whole batch, as it always does
            options["batch_size"] = rules.merge_batch_sizes(path_of(key), rows)
        if isinstance(present[0][1], Metric):
            module.log(key[0], present[0][1], **options)  # the replicas share it
            continue
        if all(metrics.is_whole(log.given[key]) for log in logs if key in log.entries):
            module.log(key[0], present[0][1].to(device), **options)
            continue
        reduce_fx = options.get("reduce_fx", "mean")
        # A function such as torch.max is known by its name.
        operation = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        weights = Weights(rows=rows, of_loss=counts.of_loss)
        value = rules.merge_logged(path_of(key), [value for _, value, _ in present], weights, device, operation)
        module.log(key[0], _on(value, device), **options)


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return value
