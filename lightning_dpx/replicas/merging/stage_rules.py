"""Last stage of a forward: the results of the replicas become the result of one device, in sample order.

What a rehearsal has found out is merged by rule. Where nothing is known, a value is merged by its type.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.replicas.buffer_sync import BufferRule
from lightning_dpx.replicas.draws import Source
from lightning_dpx.replicas.merging.appended_items import ListPlace, ListWatch, without_graphs
from lightning_dpx.replicas.merging.by_type import merge_by_reduction, merge_by_type
from lightning_dpx.replicas.merging.merger import Merger
from lightning_dpx.replicas.merging.number_types import as_tensor, is_nonzero, is_numeric
from lightning_dpx.replicas.merging.rebound_numbers import NumberWatch, increments, joined_changes
from lightning_dpx.replicas.merging.row_counts import RowCounts
from lightning_dpx.replicas.merging.rules import Rule, Weights

_TOO_OFTEN = 6  # batches


@dataclass(slots=True)
class MergeRules:
    """How the values of a stage's replicas are merged, as far as it is known.

    Attributes:
        outputs: By path in what a step returns, "result" being all of it.
        logged: By path in what a step logs, its name being the start.
        buffers: By name, the rule by which a buffer that a step writes comes together; the first replica's otherwise.
        appended: Lists that a step appends to, and how many items; their rules are among the outputs.
        growing: All lists that rehearsals have seen a step append to.
        lost_items: Lists among them that have no rule, and out of which a step has taken items since.
        rebound: Attributes whose numbers a step changes; likewise.
        disjoint: Those of them of which rehearsals have seen each slice change elements of its own.
        seen_attributes: Those that rehearsals have seen change.
        times_unseen: How many batches have changed others.
        metrics_give_slices: Whether a metric that is called as a function gives each slice its own value, or that of
            all, which slices wait for.
        draws_once: From where steps draw as often for a batch as for a slice, so that all slices shall draw the same.
        draws: Whether rehearsals have seen steps draw from a generator of the host at all.
        same_batch_sizes: Names of logged values whose batch size is the whole batch's on every slice.
        loss_reduction: Whether the loss of the whole batch is the "mean" or the "sum" of the slices' losses.
        undecided: Paths of values that were zero so far, which says nothing about how they are merged.
        is_outdated: Whether one of those has got another value since, or there is a value that no rehearsal has seen.
        seen: Paths of all values that rehearsals have seen; ``None`` where there was none.
        news: Paths of values that have come up since, or are numbers no longer.
        unchecked: Those of them that no later rehearsal has seen: what a step does now and then, such as a second loss
            in every fifth batch.
        batch: The number of the batch that is under way.
        row_counts: Which attributes have counted rows until now.
        did_more_in: That of the last batch in which a step did what no rehearsal has seen.
    """

    outputs: dict[str, Rule] = field(default_factory=dict)
    logged: dict[str, Rule] = field(default_factory=dict)
    loss_reduction: str = "mean"
    undecided: frozenset[str] = frozenset()
    is_outdated: bool = False
    seen: frozenset[str] | None = None
    news: set[str] = field(default_factory=set)
    unchecked: frozenset[str] = frozenset()
    batch: int = 0
    did_more_in: int = 0
    row_counts: RowCounts = field(default_factory=RowCounts)
    same_batch_sizes: set[str] = field(default_factory=set)
    buffers: dict[str, BufferRule] = field(default_factory=dict)
    appended: dict[ListPlace, int] = field(default_factory=dict)
    growing: set[ListPlace] = field(default_factory=set)
    lost_items: set[str] = field(default_factory=set)
    rebound: set[str] = field(default_factory=set)
    disjoint: set[str] = field(default_factory=set)
    seen_attributes: set[str] = field(default_factory=set)
    times_unseen: Counter[str] = field(default_factory=Counter)
    metrics_give_slices: bool = False
    draws_once: set[Source] = field(default_factory=set)
    draws: bool = False

    @property
    def decides_buffers(self) -> bool:
        """Whether any buffer comes together by a rule."""
        return bool(self.buffers)

    @property
    def joins_state(self) -> bool:
        """Whether what steps leave in lists and attributes comes together by rules."""
        return bool(self.appended or self.rebound or self.growing)

    def buffer_rule(self, name: str, value: Callable[[BufferRule], torch.Tensor | None]) -> BufferRule:
        """The rule by which a buffer is merged; in a rehearsal, found from what rules make of it."""
        del value
        return self.buffers.get(name, "first")

    def merge_batch_sizes(self, path: str, sizes: Sequence[float]) -> float:
        """The batch size to log a value of the whole batch with, from those of the slices."""
        return sizes[0] if path in self.same_batch_sizes and len(set(sizes)) == 1 else sum(sizes)

    def merge_outputs(self, parts: Sequence[Any], weights: Weights, device: torch.device, dim: int = 0) -> Any:
        """The step's result, merged by rule where one is known, and else as :func:`gather` does."""
        present = [row for row in zip(parts, weights.rows, weights.of_loss, strict=True) if row[0] is not None]
        if not present:
            return None
        rows = [row for _, row, _ in present]

        def by_type(parts: list[Any], path: str) -> Any:
            self._watch(parts, path, self.outputs.get(path))
            return merge_by_type(parts, rows, device, dim, path)

        counts = Weights(rows=rows, of_loss=[count for _, _, count in present])
        merger = Merger(rules=self.outputs, weights=counts, device=device, fallback=by_type)
        return merger.merge([part for part, _, _ in present], "result")

    def _watch(self, parts: Sequence[Any], path: str, rule: Rule | None) -> None:
        """Looks at a value that no rule was found for, or whose rule does not fit it."""
        was_number = rule is not None and rule.kind not in ("by type", "children", "items", "union", "equal")
        # A rule of numbers says nothing of what has come in their place, so that is new as well.
        is_new = self.seen is not None and (path not in self.seen or (was_number and not is_numeric(parts[0])))
        # What is nothing on all slices is nothing on one device, too.
        if is_new and len(parts) > 1 and any(part is not None for part in parts):
            self.news.add(path)
            self.is_outdated = True
        if len(parts) > 1 and (is_new or path in self.unchecked):
            self.did_more_in = self.batch
        # Zeros fit every rule. The first other number is what a rehearsal can decide by.
        if path in self.undecided and any(map(is_nonzero, parts)):
            self.is_outdated = True

    def join_appended(self, watch: ListWatch, weights: Weights, device: torch.device) -> None:
        """Puts what one device would have appended to lists in the place of what the slices appended.

        Args:
            watch: Has seen what they did.
            weights: Of the slices.
            device: Where tensors shall live.
        """
        num_slices = len(weights.rows)
        # One slice has appended what one device would have.
        if num_slices == 1:
            return
        for place in self.growing - self.appended.keys():
            if watch.has_lost_items(place):
                self.lost_items.add(str(place))
        for place, number in list(self.appended.items()):
            self._join_list(place, place, number, watch, weights, device)
            # Items go into another list from epoch to epoch, and come together in the same way.
            for sibling in watch.siblings(place):
                if place in self.appended and sibling not in self.appended:
                    self._join_list(sibling, place, number, watch, weights, device)

    def _join_list(
        self,
        place: ListPlace,
        known: ListPlace,
        number: int,
        watch: ListWatch,
        weights: Weights,
        device: torch.device,
    ) -> None:
        """Joins what was appended at ``place`` by the rules that were found at the ``known`` one."""
        num_slices = len(weights.rows)
        items = watch.appended(place, expected=number * num_slices)
        if items:
            problem = f"{len(items)} items were appended to it where {number} of each slice were expected"
            if len(items) == number * num_slices:
                try:
                    merged = []
                    for index in range(number):
                        # Slice after slice has appended: the first item of each, and so on.
                        of_slices = without_graphs(items[index::number])
                        item = self.merge_appended(f"{known}.{index}", of_slices, weights, device)
                        merged.append(item)
                    watch.replace(place, merged)
                    return
                except GatherError as error:
                    problem = str(error)
            self._leave_apart(known, problem)

    def merge_appended(self, path: str, parts: list[Any], weights: Weights, device: torch.device) -> Any:
        """One item from those that the slices appended; a rehearsal decides how.

        Raises:
            GatherError: they cannot be put together.
        """

        def by_type(parts: list[Any], path: str) -> Any:
            self._watch(parts, path, self.outputs.get(path))
            return merge_by_type(parts, list(weights.rows), device, 0, path)

        merger = Merger(rules=self.outputs, weights=weights, device=device, fallback=by_type)
        return merger.merge(parts, path)

    def _leave_apart(self, place: ListPlace, problem: str) -> None:
        """The slices' own items stay in the list, from here on."""
        del self.appended[place]
        warnings.warn(
            f"dpx: {place} has one item of each slice from here on, and not one of the whole batch: {problem}. Append "
            "in on_train_batch_end and its like, which see the whole batch.",
            stacklevel=2,
        )

    def counts_begun_again(self, watch: NumberWatch, weights: Weights) -> list[str]:
        """The attributes that have counted rows until this step, in which a slice has taken from one of them.

        Args:
            watch: Has seen what the replicas have.
            weights: Of the slices.
        """
        found = []
        for path in sorted(self.rebound):
            rule = self.outputs.get(f"self.{path}")
            parts = watch.parts(path) if rule is not None and rule.kind == "added" else []
            added = increments(parts, watch.before(path)) if len(parts) > 1 else None
            # A single number: elements of a tensor count what rows have, one more than another.
            if added is None or as_tensor(added[0]).numel() != 1:
                continue
            numbers = [float(one) for one in added]
            if self.row_counts.begin_again(path, numbers, weights.rows):
                found.append(path)
        return found

    def sums_begun_again(self, added: Mapping[str, Sequence[float]], weights: Weights) -> list[str]:
        """The same of buffers, from what each slice has added to them."""
        return [name for name, numbers in added.items() if self.row_counts.begin_again(name, numbers, weights.rows)]

    def join_rebound(self, watch: NumberWatch, weights: Weights, device: torch.device) -> None:
        """Gives attributes what one device would have made of them.

        Args:
            watch: Has seen what the replicas have.
            weights: Of the slices.
            device: Where tensors shall live.
        """
        for path in sorted(self.rebound):
            parts = watch.parts(path)
            if len(parts) > 1:
                merged = self.merge_rebound(path, watch.before(path), parts, weights, device)
                value = parts[0] if merged is None else merged
                watch.replace(path, value)

    def note_first_draws(self) -> None:
        """Slices have drawn random numbers each for itself, and no rehearsal has seen draws."""
        self.news.add("random draws")
        self.is_outdated = True

    def note_changed(self, unseen: set[str], batch: int) -> None:
        """A step has changed attributes, on other replicas than the first one, that no rehearsal had seen change.

        Args:
            unseen: Their paths.
            batch: The number of its batch.
        """
        self.news.update(f"self.{path}" for path in unseen)
        self.is_outdated = True
        self.did_more_in = batch
        self.times_unseen.update(unseen)
        often = sorted(path for path in unseen if self.times_unseen[path] == _TOO_OFTEN)
        if often:
            warnings.warn(
                f"dpx: self.{', self.'.join(often)} changed in {_TOO_OFTEN} batches and in no rehearsal: what it holds "
                "of those is that of a slice, or of each. Change it in on_train_batch_end and its like, which see the "
                "whole batch.",
                stacklevel=2,
            )

    def merge_rebound(self, path: str, before: Any, parts: list[Any], weights: Weights, device: torch.device) -> Any:
        """One number from those of the slices; ``None`` where it is the first one's. A rehearsal decides how."""
        name = f"self.{path}"
        rule = self.outputs.get(name)
        if rule is None:
            return None
        rules = self.outputs
        changes = joined_changes(parts, before) if rule.kind == "changes" or path in self.disjoint else None
        # Whether such elements are set or added to, no rehearsal has seen.
        if changes is not None and changes[1] and path in self.disjoint:
            self.news.add(name)
            self.is_outdated = True
        if rule.kind == "changes":
            return None if changes is None else changes[0]
        added: list[Any] | None = None
        # Each replica has what was there and its own part: what was there counts once.
        if rule.kind == "added":
            rules = {name: Rule(kind="sum")}
            added = increments(parts, before)
            if added is None:
                return None

        # Where the rule does not fit, the caller takes the first replica's value.
        def nothing(parts: list[Any], path: str) -> Any:
            return None

        merger = Merger(rules=rules, weights=weights, device=device, fallback=nothing)
        terms = parts if added is None else added
        merged = merger.merge(without_graphs(terms), name)
        if merged is None or added is None:
            return merged
        return before + merged

    def merge_logged(
        self, path: str, values: Sequence[Any], weights: Weights, device: torch.device, reduce_fx: str = "mean"
    ) -> Any:
        """The value to log; by its ``reduce_fx`` where no rule is known."""

        def by_reduction(parts: list[Any], path: str) -> Any:
            self._watch(parts, path, self.logged.get(path))
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
