"""What slices leave in attributes of the module becomes what one device would have left there.

a list     each slice has appended its items             the items of the whole batch take their place
a number   each slice has set it, or added to it         one number, by a rule
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.replicas.merging.appended_items import ListPlace, ListWatch, without_graphs
from lightning_dpx.replicas.merging.by_type import merge_by_type
from lightning_dpx.replicas.merging.merger import Merger
from lightning_dpx.replicas.merging.news import News
from lightning_dpx.replicas.merging.number_types import as_tensor
from lightning_dpx.replicas.merging.rebound_numbers import NumberWatch, increments, joined_changes
from lightning_dpx.replicas.merging.row_counts import RowCounts
from lightning_dpx.replicas.merging.rules import Rule, Weights


@dataclass(slots=True)
class AttributeRules:
    """How the lists and numbers that a stage's steps change come together, as far as it is known.

    Attributes:
        rules: By path: of items of lists, and of numbers.
        news: What rehearsals have not seen.
        appended: Lists that a step appends to, and how many items.
        growing: All lists that rehearsals have seen a step append to.
        lost_items: Lists among them that have no rule, and out of which a step has taken items since.
        rebound: Attributes whose numbers a step changes.
        disjoint: Those of them of which rehearsals have seen each slice change elements of its own.
        read: Attributes that hooks read, whose values come together however large they are.
        row_counts: Which attributes and buffers have counted rows until now.
    """

    rules: dict[str, Rule] = field(default_factory=dict)
    news: News = field(default_factory=News)
    appended: dict[ListPlace, int] = field(default_factory=dict)
    growing: set[ListPlace] = field(default_factory=set)
    lost_items: set[str] = field(default_factory=set)
    rebound: set[str] = field(default_factory=set)
    disjoint: set[str] = field(default_factory=set)
    read: frozenset[str] = frozenset()
    row_counts: RowCounts = field(default_factory=RowCounts)

    def __bool__(self) -> bool:
        """Whether there is anything to put together."""
        return bool(self.appended or self.rebound or self.growing)

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
            self.news.watch(parts, path, self.rules.get(path))
            return merge_by_type(parts, list(weights.rows), device, 0, path)

        merger = Merger(rules=self.rules, weights=weights, device=device, fallback=by_type)
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
            rule = self.rules.get(f"self.{path}")
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

    def merge_rebound(self, path: str, before: Any, parts: list[Any], weights: Weights, device: torch.device) -> Any:
        """One number from those of the slices; ``None`` where it is the first one's. A rehearsal decides how."""
        name = f"self.{path}"
        rule = self.rules.get(name)
        if rule is None:
            return None
        rules = self.rules
        changes = joined_changes(parts, before) if rule.kind == "changes" or path in self.disjoint else None
        # Whether such elements are set or added to, no rehearsal has seen.
        if changes is not None and changes[1] and path in self.disjoint:
            self.news.note(name)
        if rule.kind == "changes":
            if changes is None:
                return None
            return changes[0]
        added: list[Any] | None = None
        # Each replica has what was there and its own part: what was there counts once.
        if rule.kind == "added":
            rules = {name: Rule(kind="sum")}
            added = increments(parts, before)
            if added is None:
                return None

        # Where the rule does not fit, the caller takes the first replica's value.
        def nothing(parts: list[Any], path: str) -> Any:
            # Rows of other widths than in the rehearsal, say, which another one may look at.
            if rule.kind == "join":
                self.news.note(path)
            return None

        merger = Merger(rules=rules, weights=weights, device=device, fallback=nothing)
        terms = parts if added is None else added
        merged = merger.merge(without_graphs(terms), name)
        if merged is None or added is None or before is None:
            return merged
        return before + merged
