"""Last stage of a forward: the results of the replicas become the result of one device, in sample order.

What a rehearsal has found out is merged by rule. Where nothing is known, a value is merged by its type.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from lightning_dpx.devices import device_beside
from lightning_dpx.errors import GatherError
from lightning_dpx.replicas.appended_items import ListPlace, ListWatch, without_graphs
from lightning_dpx.replicas.buffer_sync import BufferRule
from lightning_dpx.replicas.containers import PLAIN, children_of, members_of, rebuild
from lightning_dpx.replicas.draws import Source
from lightning_dpx.replicas.merging import (
    ADDED_IN,
    NUMBERS,
    Merger,
    Rule,
    Weights,
    is_equal_object,
    is_numeric,
    join_arrays,
    reduce_numbers,
)
from lightning_dpx.replicas.merging import as_tensor as _as_tensor
from lightning_dpx.replicas.merging import like as _like
from lightning_dpx.replicas.rebound_numbers import NumberWatch, increments, joined_changes
from lightning_dpx.replicas.row_counts import RowCounts

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
            return _merge(parts, rows, device, dim, path)

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
        if path in self.undecided and any(map(_is_nonzero, parts)):
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
            return _merge(parts, list(weights.rows), device, 0, path)

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
            if added is None or _as_tensor(added[0]).numel() != 1:
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


def gather(
    results: Sequence[Any],
    sizes: Sequence[float],
    device: torch.device,
    dim: int = 0,
) -> Any:
    """Merges one result per active replica by the types of its values.

    Tensors whose size along ``dim`` is the replica's
    number of rows are concatenated; other floating-point tensors and floats are averaged with the rows as weights;
    integers that differ are counts and are summed; lists of as many items as rows are joined; equal values stay.
    Replicas that returned ``None`` contribute nothing.

    Args:
        results: One nested result per active replica.
        sizes: Rows of each of them, all positive.
        device: Where the merged tensors shall live.
        dim: The batch dim of the results.

    Raises:
        GatherError: the replicas returned different structures, or different values that have no merge.
    """
    # A replica that returns nothing had nothing to say of its rows: they count neither as zeros nor as rows.
    present: list[Any] = []
    counts: list[float] = []
    for result, size in zip(results, sizes, strict=True):
        if result is not None:
            present.append(result)
            counts.append(size)
    if not present:
        return None
    return _merge(present, counts, device, dim, "result")


def _is_nonzero(part: Any) -> bool:
    return is_numeric(part) and bool(_as_tensor(part).bool().any())


def merge_by_reduction(parts: Sequence[Any], weights: Weights, device: torch.device, reduce_fx: str, path: str) -> Any:
    """A logged value of which only the reduction over batches is known.

    Raises:
        GatherError: no numbers, or complex ones that have no order; names the key.
    """
    if isinstance(parts[0], Mapping) and all(part.keys() == parts[0].keys() for part in parts):
        merged_items = {}
        for key in parts[0]:
            of_slices = [part[key] for part in parts]
            inner = f"{path}.{key}"
            merged_items[key] = merge_by_reduction(of_slices, weights, device, reduce_fx, inner)
        return merged_items
    if not all(map(is_numeric, parts)):
        names = ", ".join(sorted({type(part).__name__ for part in parts}))
        raise GatherError(
            f"self.log({path!r}, ...) got {names} from the replicas; give a number, a tensor or a metric."
        )
    kind = reduce_fx if reduce_fx in ("sum", "min", "max") else "mean"
    plain = all(isinstance(part, NUMBERS) for part in parts)
    # What is the same on all slices (a learning rate, a flag) keeps its type and all digits.
    if plain and kind == "mean" and all(part == parts[0] for part in parts):
        return parts[0]
    if plain:
        tensors = [_as_tensor(part) for part in parts]
    else:
        tensors = [torch.as_tensor(part, device=device) for part in parts]
    # In float32 at least: a sum of many rows in half precision would overflow.
    if not plain or kind == "mean":
        tensors = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    elif kind == "sum" and tensors[0].dtype == torch.bool:
        tensors = [tensor.long() for tensor in tensors]  # flags add up to a flag: any of them
    merged = reduce_numbers(tensors, kind, weights)  # type: ignore[arg-type]
    if merged is None:
        raise GatherError(
            f"self.log({path!r}, ..., reduce_fx={reduce_fx!r}) got numbers of {tensors[0].dtype} from the replicas, "
            "which have no such reduction; log their real numbers."
        )
    if not plain:
        return merged
    # A mean of integers is no integer; sums and extremes keep the type that the user logged.
    return merged.item() if kind == "mean" else _like(merged, parts[0])


def _merge(parts: list[Any], sizes: list[float], device: torch.device, dim: int, path: str) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        names = ", ".join(type(part).__name__ for part in parts)
        raise GatherError(f"The replicas returned different types for {path}: {names}; all must return the same.")
    if isinstance(first, torch.Tensor):
        return _merge_tensors(parts, sizes, device, dim, path)
    if isinstance(first, np.ndarray | np.generic):
        return _merge_arrays(parts, sizes, device, dim, path)
    # Only texts and numbers, one for each row, are rows for certain: a list of tensors of that length may be columns.
    if type(first) in (list, tuple) and all(map(_has_plain_rows, parts, sizes)):
        return type(first)(chain.from_iterable(parts))
    if isinstance(first, torch.device):
        return device  # where tensors come together, a setting of it does as well
    children = [children_of(part) for part in parts]
    # An object that all replicas share, or that is alike on all, stays as it is, as numbers and texts do.
    if children[0] is None and not is_equal_object(first, parts[1:]):
        children = [members_of(part) for part in parts]
    if all(of_part is not None for of_part in children):
        return _merge_children(parts, children, sizes, device, dim, path)
    return _merge_plain(parts, sizes, path)


def _has_plain_rows(part: Any, num_rows: float) -> bool:
    return len(part) == num_rows and all(isinstance(item, PLAIN) for item in part)


def _merge_children(
    parts: list[Any], children: list[Any], sizes: list[float], device: torch.device, dim: int, path: str
) -> Any:
    names = []
    for part in children:
        names.append([name for name, _ in part])
    if isinstance(parts[0], Mapping):
        if any(set(other) != set(names[0]) for other in names[1:]):
            raise GatherError(f"The replicas returned different keys for {path}: {' and '.join(map(str, names))}.")
        # The order of keys may differ; that of the first replica is the result's.
        in_order = []
        for part in children:
            by_name = dict(part)
            in_order.append([(name, by_name[name]) for name in names[0]])
        children = in_order
    elif any(other != names[0] for other in names[1:]):
        lengths = ", ".join(str(len(other)) for other in names)
        raise GatherError(f"The replicas returned different lengths for {path}: {lengths}; all must be equal.")
    merged = []
    for index, name in enumerate(names[0]):
        merged.append(_merge([part[index][1] for part in children], sizes, device, dim, f"{path}.{name}"))
    return rebuild(parts[0], merged)


def _merge_tensors(parts: list[torch.Tensor], sizes: list[float], device: torch.device, dim: int, path: str) -> Any:
    device = device_beside(parts[0], device, device)
    if len(parts) == 1:
        return parts[0].to(device)
    # Outputs often have their rows along dim 0 though inputs have them elsewhere (T x N in, N classes out).
    for candidate in dict.fromkeys((dim, 0)):
        has_rows = all(_has_rows_along(candidate, part, rows) for part, rows in zip(parts, sizes, strict=True))
        if has_rows and len({part.movedim(candidate, 0).shape[1:] for part in parts}) == 1:
            return torch.cat([part.to(device) for part in parts], candidate)
    if any(part.shape != parts[0].shape for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise GatherError(
            f"The replicas returned tensors of shapes {shapes} for {path}; either one row per sample along dim {dim} "
            "or the same shape everywhere is required."
        )
    moved = [part.to(device) for part in parts]
    weights = Weights(rows=sizes, of_loss=sizes)
    if parts[0].is_floating_point() or parts[0].is_complex():
        return reduce_numbers(moved, "mean", weights)
    # Integers that agree are a setting, such as a number of classes; those that differ are counts, and add up.
    if all(torch.equal(part, moved[0]) for part in moved[1:]):
        return moved[0]
    return reduce_numbers(moved, "sum", weights) if parts[0].dtype in ADDED_IN else torch.stack(moved).sum(0)


def _has_rows_along(dim: int, tensor: torch.Tensor, num_rows: float) -> bool:
    return tensor.ndim > dim and tensor.shape[dim] == num_rows


def _merge_arrays(parts: list[Any], sizes: list[float], device: torch.device, dim: int, path: str) -> Any:
    """Arrays and scalars of NumPy as tensors would be; text and objects are joined if they are rows."""
    if all(map(is_numeric, parts)):
        merged = _merge_tensors([_as_tensor(part) for part in parts], sizes, torch.device("cpu"), dim, path)
        return _like(merged, parts[0])
    if all(np.ndim(part) and len(part) == size for part, size in zip(parts, sizes, strict=True)):
        joined = join_arrays(parts)
        if joined is not None:
            return joined
    if all(np.array_equal(part, parts[0]) for part in parts):
        return parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise GatherError(f"The replicas returned arrays of shapes {shapes} for {path}, whose rows must be alike.")
    raise GatherError(f"The replicas returned different arrays for {path}, which are no numbers; give lists instead.")


def _merge_plain(parts: list[Any], sizes: list[float], path: str) -> Any:
    if is_equal_object(parts[0], parts[1:]):
        return parts[0]
    if isinstance(parts[0], float):
        return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
    # Integers that differ are counts, as among tensors.
    if isinstance(parts[0], int) and not isinstance(parts[0], bool):
        return sum(parts)
    raise GatherError(f"The replicas returned different values for {path}: {parts}; there is no way to merge them.")
