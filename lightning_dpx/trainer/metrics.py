"""Metric objects on replicas: the states of every step are merged into the user's own metrics.

Each replica updates its own copy. During a step the user's metric holds the step alone, so that the value of
``forward`` can be computed over the whole batch; afterwards the step is merged into what was there before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_dpx.errors import UnsupportedError
from lightning_dpx.replicas import Replica


@dataclass(frozen=True, slots=True)
class _State:
    """What a metric holds, and after how many updates."""

    values: dict[str, Any]
    updates: int
    computed: Any
    forward_cache: Any

    @classmethod
    def of(cls, metric: Metric) -> "_State":
        values = {name: getattr(metric, name) for name in metric._defaults}
        values = {name: list(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(values, metric._update_count, metric._computed, metric._forward_cache)

    def put_back(self, metric: Metric) -> None:
        for name, value in self.values.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed, metric._forward_cache = self.updates, self.computed, self.forward_cache


class ReplicaMetrics:
    """The metric objects of a module and their copies on the replicas."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        columns = [[metric for _, metric in _found(replica.module)] for replica in replicas]
        names = [name for name, _ in _found(replicas[0].module)]
        self._rows: list[tuple[str, tuple[Metric, ...]]] = list(zip(names, zip(*columns, strict=True), strict=True))
        self._owner = {id(copied): copies[0] for _, copies in self._rows for copied in copies}

    def owner_of(self, metric: Metric) -> Metric:
        """The user's metric behind a replica's copy."""
        return self._owner.get(id(metric), metric)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Merges what the replicas update inside the block; after an error nothing has changed."""
        if not self._rows:
            yield
            return
        before = [_State.of(copies[0]) for _, copies in self._rows]
        for _, copies in self._rows:
            for metric in copies:
                metric.reset()
        try:
            yield
            merged = [self._merged_step(name, copies) for name, copies in self._rows]
        except BaseException:
            for (_, copies), state in zip(self._rows, before, strict=True):
                state.put_back(copies[0])
            raise
        for (name, copies), earlier, new in zip(self._rows, before, merged, strict=True):
            if new is None:
                earlier.put_back(copies[0])
            else:
                _merge(name, copies[0], earlier, new).put_back(copies[0])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is updated inside the block, nothing has changed afterwards."""
        before = [(metric, _State.of(metric)) for _, copies in self._rows for metric in copies]
        try:
            yield
        finally:
            for metric, state in before:
                state.put_back(metric)

    def _merged_step(self, name: str, copies: tuple[Metric, ...]) -> _State | None:
        """The step's own state on the user's metric; ``None`` if no replica updated."""
        mine, *others = (_State.of(metric) for metric in copies)
        updated = [state for state in (mine, *others) if state.updates]
        if not updated:
            return None
        total = updated[0]
        for state in updated[1:]:
            total = _merge(name, copies[0], total, state)
        if any(state.forward_cache is not None for state in updated):
            total.put_back(copies[0])
            copies[0]._computed = None
            value = copies[0].compute()
            total = _State(total.values, total.updates, None, value)
        return total


def _found(module: nn.Module) -> list[tuple[str, Metric]]:
    """All metrics of ``module``, each once: submodules, and those in plain lists and dicts."""
    found: dict[int, tuple[str, Metric]] = {}
    for path, child in module.named_modules():
        if isinstance(child, Metric):
            found.setdefault(id(child), (path, child))
            continue
        for key, value in vars(child).items():
            if type(value) in (list, dict, tuple) and not key.startswith("_"):
                for keys, leaf in _pytree.tree_leaves_with_path(value):
                    if isinstance(leaf, Metric):
                        name = f"{path}.{key}".lstrip(".") + _pytree.keystr(keys)
                        found.setdefault(id(leaf), (name, leaf))
    return list(found.values())


def _merge(name: str, metric: Metric, first: _State, second: _State) -> _State:
    """``second`` after ``first``, by the metric's own reductions; keeps ``second``'s value of ``forward``.

    Raises:
        UnsupportedError: a state that has no reduction.
    """
    if not first.updates:
        values = {key: _moved(value, metric.device) for key, value in second.values.items()}
        return _State(values, second.updates, None, second.forward_cache)
    counts = first.updates, second.updates
    values = {}
    for key, earlier in first.values.items():
        later = _moved(second.values[key], metric.device)
        values[key] = _reduced(name, metric, key, earlier, later, counts)
    return _State(values, sum(counts), None, second.forward_cache)


def _reduced(name: str, metric: Metric, key: str, first: Any, second: Any, counts: tuple[int, int]) -> Any:
    reduction = metric._reductions[key]
    if isinstance(first, list):
        return [*first, *second]
    if reduction is dim_zero_sum:
        return first + second
    if reduction is dim_zero_cat:
        return torch.cat([first, second])
    if reduction is dim_zero_mean:
        return (first * counts[0] + second * counts[1]) / sum(counts)
    if reduction is dim_zero_max:
        return torch.max(first, second)
    if reduction is dim_zero_min:
        return torch.min(first, second)
    if callable(reduction):
        return reduction(torch.stack([first, second]))
    raise UnsupportedError(
        f"{name} ({type(metric).__name__}): its state {key!r} says of no reduction how replicas are merged. Use "
        "devices=1, execution='auto' on one physical device, or a metric whose states have one."
    )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
