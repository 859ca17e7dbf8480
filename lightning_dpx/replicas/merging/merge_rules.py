"""Last stage of a forward: the results of the replicas become the result of one device, in sample order.

What a rehearsal has found out is merged by rule. Where nothing is known, a value is merged by its type.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dpx.replicas.buffer_sync import BufferRule
from lightning_dpx.replicas.drawn_rows import DrawnRows
from lightning_dpx.replicas.draws import Source
from lightning_dpx.replicas.merging.attribute_rules import AttributeRules
from lightning_dpx.replicas.merging.by_type import merge_by_reduction, merge_by_type
from lightning_dpx.replicas.merging.merger import Merger
from lightning_dpx.replicas.merging.news import News
from lightning_dpx.replicas.merging.rules import Rule, Weights


@dataclass(slots=True)
class MergeRules:
    """How the values of a stage's replicas are merged, as far as it is known.

    Attributes:
        outputs: By path in what a step returns, "result" being all of it.
        logged: By path in what a step logs, its name being the start.
        loss_reduction: Whether the loss of the whole batch is the "mean" or the "sum" of the slices' losses.
        loss_is_open: Whether it is taken for a sum as long as all slices but one give zero.
        news: What rehearsals have not seen.
        attributes: How what steps leave in lists and attributes comes together.
        buffers: By name, the rule by which a buffer that a step writes comes together; the first replica's otherwise.
        same_batch_sizes: Names of logged values whose batch size is the whole batch's on every slice.
        metrics_give_slices: Whether a metric that is called as a function gives each slice its own value, or that of
            all, which slices wait for.
        draws_once: From where steps draw as often for a batch as for a slice, so that all slices shall draw the same.
        drawn_rows: Where rows lie in what steps draw, as far as it is not dim 0, one by one.
        draws: Whether rehearsals have seen steps draw from a generator of the host at all.
        writes_batch: Whether rehearsals have seen steps write their batch.
        drops_gradients: Whether rehearsals have seen steps run backwards themselves, and drop the gradients.
        written_buffers: Names of the buffers that steps are known to write.
    """

    outputs: dict[str, Rule] = field(default_factory=dict)
    logged: dict[str, Rule] = field(default_factory=dict)
    loss_reduction: str = "mean"
    loss_is_open: bool = False
    news: News = field(default_factory=News)
    attributes: AttributeRules = field(default_factory=AttributeRules)
    buffers: dict[str, BufferRule] = field(default_factory=dict)
    same_batch_sizes: set[str] = field(default_factory=set)
    metrics_give_slices: bool = False
    draws_once: set[Source] = field(default_factory=set)
    drawn_rows: tuple[DrawnRows, ...] = ()
    draws: bool = False
    writes_batch: bool = False
    drops_gradients: bool = False
    written_buffers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        # They have the same rehearsals.
        self.attributes.news = self.news

    @property
    def decides_buffers(self) -> bool:
        """Whether any buffer comes together by a rule."""
        return bool(self.buffers)

    def buffer_rule(self, name: str, value: Callable[[BufferRule], torch.Tensor | None]) -> BufferRule:
        """The rule by which a buffer is merged; in a rehearsal, found from what rules make of it."""
        del value
        return self.buffers.get(name, "first")

    def merge_batch_sizes(self, path: str, sizes: Sequence[float]) -> float:
        """The batch size to log a value of the whole batch with, from those of the slices."""
        if path in self.same_batch_sizes and len(set(sizes)) == 1:
            return sizes[0]
        return sum(sizes)

    def merge_outputs(self, parts: Sequence[Any], weights: Weights, device: torch.device, dim: int = 0) -> Any:
        """The step's result, merged by rule where one is known, and else as :func:`gather` does."""
        # A step that returned nothing on its slice has no part in the result, and its rows do not count there.
        present = [row for row in zip(parts, weights.rows, weights.of_loss, strict=True) if row[0] is not None]
        if not present:
            return None
        rows = [row for _, row, _ in present]

        def by_type(parts: list[Any], path: str) -> Any:
            self.news.watch(parts, path, self.outputs.get(path))
            return merge_by_type(parts, rows, device, dim, path)

        counts = Weights(rows=rows, of_loss=[count for _, _, count in present])
        merger = Merger(rules=self.outputs, weights=counts, device=device, fallback=by_type)
        return merger.merge([part for part, _, _ in present], "result")

    def merge_logged(
        self, path: str, values: Sequence[Any], weights: Weights, device: torch.device, reduce_fx: str = "mean"
    ) -> Any:
        """The value to log; by its ``reduce_fx`` where no rule is known."""

        def by_reduction(parts: list[Any], path: str) -> Any:
            self.news.watch(parts, path, self.logged.get(path))
            return merge_by_reduction(parts, weights, device, reduce_fx, path)

        merger = Merger(rules=self.logged, weights=weights, device=device, fallback=by_reduction)
        return merger.merge(list(values), path)

    def decides(self, path: str) -> bool:
        """Whether it is known how a logged value is merged."""
        return path in self.logged

    def reduction(self, losses: Sequence[torch.Tensor], weights: Weights) -> str:
        """How the loss is merged; a rehearsal decides it here, from the losses of the slices."""
        del losses, weights
        return self.loss_reduction
