"""Rules by which the values of slices become the value of the whole batch, found by trying and not by looking at types.

A rehearsal runs the same rows whole and in slices of unequal size. For every value it knows what one device makes of
them, and so which rule reproduces it: values that grow with the rows are joined, counts are summed, means are weighted.
Slices of unequal size make coincidences rare: a 12 x 12 matrix keeps its shape, whatever the number of rows.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from lightning_dpx.replicas.containers import children_of, members_of
from lightning_dpx.replicas.merging.equality import compare_trees, describe, is_equal_object, is_same_object
from lightning_dpx.replicas.merging.number_types import as_tensor, is_large_integer, is_numeric
from lightning_dpx.replicas.merging.reductions import join, join_arrays, other_dims, reduce_integers, reduce_numbers
from lightning_dpx.replicas.merging.rules import Kind, Rule, Weights
from lightning_dpx.replicas.merging.tolerance import Tolerance, difference

# The order in which rules that fit alike are preferred: what a user would most likely mean comes first.
_OF_NUMBERS: tuple[Kind, ...] = (
    "mean", "loss mean", "sum", "max", "min", "quadratic mean", "geometric mean", "first", "last",
)  # fmt: skip
_PREFERRED: dict[str, Kind] = {"sum": "sum", "max": "max", "min": "min"}  # by the reduce_fx of a logged value
_LARGEST_BLOCKS = 8  # "two views of every row, one after the other" are two blocks
_ADDED: tuple[Kind, ...] = ("mean", "loss mean", "sum")
_BY_CHANCE = 3  # so few numbers may fit a rule by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What trying the rules on one value has shown.

    Attributes:
        path: Where the value is.
        rules: Those that reproduce the whole batch's value, the preferred one first; none if nothing does.
        is_sure: Whether the rules left would also agree on other values.
        is_constant: Whether it was the same everywhere, as a setting is, and a mean over rows that are alike.
        is_count: Whether it may count rows that are different from each other, as a few all may be; it adds up there.
        error: The largest relative difference of the preferred rule.
        text: What differs, where no rule reproduces the value.
    """

    path: str
    rules: tuple[Rule, ...]
    is_sure: bool = True
    is_constant: bool = False
    is_count: bool = False
    error: float = 0.0
    text: str = ""


@dataclass(slots=True, kw_only=True)
class Search:
    """Tries rules on the values of slices.

    Args:
        weights: Of the slices.
        tolerance: How far a value may be from the whole batch's.
        dim: The dim to join along where several fit.
        unstable: Paths whose values change from run to run, and so can only be told by their shapes.
        prefer: The ``reduce_fx`` of a logged value.
    """

    weights: Weights
    tolerance: Tolerance
    dim: int = 0
    unstable: frozenset[str] = frozenset()
    prefer: str = "mean"
    findings: list[Finding] = field(default_factory=list)

    def examine(self, whole: Any, parts: Sequence[Any], path: str) -> list[Finding]:
        """The findings for a value and all that it holds.

        Args:
            whole: One device's value.
            parts: The values of the slices.
            path: Where the value is.
        """
        present = [part for part in parts if part is not None]
        if whole is None and not present:
            return []
        if whole is None or not present:
            return [self._unlike(path, whole, parts)]
        # What only some slices have depends on their rows, and other rows decide anew.
        if len(present) < len(parts):
            return [Finding(path=path, rules=(Rule(kind="by type"),), is_sure=False)]
        if is_numeric(whole) and all(map(is_numeric, parts)):
            return [self._numbers(whole, list(parts), path)]
        if any(type(part) is not type(whole) for part in parts):
            return [self._unlike(path, whole, parts)]
        if isinstance(whole, Mapping):
            return self._mappings(whole, parts, path)
        if type(whole) in (list, tuple):
            return self._lists(whole, parts, path)
        if isinstance(whole, set | frozenset):
            return self._sets(whole, parts, path)
        if isinstance(whole, np.ndarray) and whole.ndim:
            # Numbers were seen to above: these are texts and objects, which can be joined and no
            # more.
            joined = join_arrays([part for part in parts if part.ndim] or [whole[:0]])
            if joined is not None and joined.shape == whole.shape and np.array_equal(joined, whole):
                return [Finding(path=path, rules=(Rule(kind="items"),))]
        if children_of(whole) is not None:
            return self._children(whole, parts, path)
        return self._objects(whole, parts, path)

    def _mappings(self, whole: Mapping[Any, Any], parts: Sequence[Any], path: str) -> list[Finding]:
        # By its keys: a mapping of a library may have no truth value, or the length of its batch.
        if all(part.keys() == whole.keys() for part in parts) and len(whole.keys()):
            return self._children(whole, parts, path)
        joined: dict[Any, Any] = {}
        for part in parts:
            joined.update(part)
        # Each slice has keys of its own, such as one for every sample.
        apart = sum(map(len, parts)) == len(joined)
        if apart and joined.keys() == whole.keys() and not self._differs(whole, joined, path):
            return [Finding(path=path, rules=(Rule(kind="union"),))]
        return [self._unlike(path, whole, parts)]

    def _sets(self, whole: Collection[Any], parts: Sequence[Any], path: str) -> list[Finding]:
        if set().union(*parts) == whole:
            return [Finding(path=path, rules=(Rule(kind="union"),))]
        return [self._unlike(path, whole, parts)]

    def _lists(self, whole: Sequence[Any], parts: Sequence[Any], path: str) -> list[Finding]:
        # Items that add up to those of the batch come before columns that are as many everywhere.
        joined = list(chain.from_iterable(parts))
        if len(joined) == len(whole) and not self._differs(list(whole), joined, path):
            return [Finding(path=path, rules=(Rule(kind="items"),))]
        if all(len(part) == len(whole) for part in parts):
            return self._children(whole, parts, path)
        return [self._unlike(path, whole, parts)]

    def _children(self, whole: Any, parts: Sequence[Any], path: str) -> list[Finding]:
        by_slice = [dict(members_of(part) or ()) for part in parts]
        findings = [Finding(path=path, rules=(Rule(kind="children"),))]
        for name, value in members_of(whole) or ():
            inner = f"{path}.{name}"
            if all(name in children for children in by_slice):
                findings += self.examine(value, [children[name] for children in by_slice], inner)
            else:
                findings.append(self._unlike(inner, value, parts))
        return findings

    def _objects(self, whole: Any, parts: Sequence[Any], path: str) -> list[Finding]:
        """Texts and objects: equal, or put together by attributes, or alike in what they hold."""
        if is_equal_object(whole, parts):
            return [Finding(path=path, rules=(Rule(kind="equal"),))]
        # Each slice names its own; put together, all of it is on the first, as is that of one device.
        if isinstance(whole, torch.device) and whole == parts[0]:
            return [Finding(path=path, rules=(Rule(kind="by type"),))]
        # Also where the attributes are alike: those of other rows may differ, each by a rule of its own.
        if members_of(whole) is not None:
            return self._children(whole, parts, path)
        # Iterators tell nothing of what they will give, which is of the rows of a slice.
        is_alike = not isinstance(whole, Iterator)
        if is_alike and all(is_same_object(whole, part, self.tolerance) for part in parts):
            return [Finding(path=path, rules=(Rule(kind="equal"),))]
        return [self._unlike(path, whole, parts)]

    def _differs(self, whole: Any, joined: Any, path: str) -> bool:
        """Whether two values of one structure differ, but for what is not stable."""
        # It differs from run to run on one device as well, so a difference says nothing of slices.
        if path in self.unstable:
            return False
        return any(error > self.tolerance.relative for _, error in compare_trees(whole, joined, self.tolerance))

    def _large_integers(self, whole: Any, parts: list[Any], path: str) -> Finding:
        """Integers of any size, some of which no tensor holds, by rules that are exact."""
        if all(part == whole for part in parts):
            return Finding(path=path, rules=(Rule(kind="equal"),))
        rules = []
        for kind in _OF_NUMBERS:
            if reduce_integers(parts, kind) == whole:
                rules.append(Rule(kind=kind))
        if not rules:
            return self._unlike(path, whole, parts)
        return Finding(path=path, rules=tuple(rules), is_sure=rules[0].kind == "sum")  # too large to add up by chance

    def _numbers(self, whole: Any, parts: list[Any], path: str) -> Finding:
        if any(map(is_large_integer, (whole, *parts))) and all(isinstance(one, int) for one in (whole, *parts)):
            return self._large_integers(whole, parts, path)
        target = as_tensor(whole)
        values = [as_tensor(part) for part in parts]
        joins = list(self._joins(target, values))
        # Values cannot tell (dropout, say), but shapes can: those of slices add up, or do not.
        if path in self.unstable:
            rule = joins[0] if joins else Rule(kind="by type")
            return Finding(path=path, rules=(rule,), is_sure=False)
        errors = self._errors_by_rule(target, values, joins)
        fitting = [rule for rule, error in errors.items() if error <= self.tolerance.relative]
        if not fitting and joins:
            # Their shapes, which add up, would read as if nothing were wrong.
            nearest = min(errors[rule] for rule in joins)
            same = "slices put together have that shape, and other numbers"
            text = f"{describe(whole)} on one device; {same} (largest relative difference {nearest:.1g})"
            return Finding(path=path, rules=(), text=text)
        if not fitting:
            return self._unlike(path, whole, parts)
        best = fitting[0]
        # Equal everywhere fits a mean, an extreme, and "first" alike, so it decides nothing.
        constant = all(difference(target, value, self.tolerance) == 0 for value in values)
        if best.kind != "join" and constant:
            # A number of Python is a setting, and no mean over rows that happen to be alike.
            return self._constant(target, path, fitting, may_be_mean=isinstance(whole, torch.Tensor))
        has_many = target.numel() > _BY_CHANCE
        is_sure = best.kind == "join" or len(fitting) == 1 or has_many
        if best.kind in ("max", "min", "first", "last") and not has_many:
            is_sure = False  # the median of all rows may well be that of some
        is_count = best.kind == "sum" and not has_many and _are_whole(target)
        return Finding(path=path, rules=tuple(fitting), is_sure=is_sure, is_count=is_count, error=errors[best])

    def _errors_by_rule(
        self, target: torch.Tensor, values: list[torch.Tensor], joins: Iterable[Rule]
    ) -> dict[Rule, float]:
        """By rule, the relative difference of what it makes of ``values`` from ``target``; the likeliest come first."""
        errors: dict[Rule, float] = {}
        for rule in joins:
            errors[rule] = difference(target, join(values, rule), self.tolerance)
        if any(value.shape != target.shape for value in values):
            return errors
        for kind in self._kinds():
            reduced = reduce_numbers(values, kind, self.weights)
            if reduced is None:
                continue
            terms = 0.0
            if kind in _ADDED:
                # Where summands cancel out, the roundings that are left have their size, not the sum's.
                terms = _largest(values)
            errors[Rule(kind=kind)] = difference(target, reduced, self.tolerance, terms=terms)
        return errors

    def _constant(self, target: torch.Tensor, path: str, fitting: list[Rule], *, may_be_mean: bool) -> Finding:
        """The finding for a value that is the same everywhere: a mean, unless all is zero."""
        if not bool(target.bool().any()):  # a count of what these rows have none of, a mean, or a constant
            return Finding(path=path, rules=(Rule(kind="by type"), *fitting), is_sure=False)
        # Of equal numbers the mean is their value, also once they are no longer equal. Integers
        # have no mean: they are taken as a setting, and a difference is announced.
        floating = target.is_floating_point() or target.is_complex()
        equal = Rule(kind="mean") if floating and any(rule.kind == "mean" for rule in fitting) else Rule(kind="equal")
        others = [rule for rule in fitting if rule != equal]
        return Finding(path=path, rules=(equal, *others), is_constant=floating and may_be_mean)

    def _kinds(self) -> list[Kind]:
        kinds = [kind for kind in _OF_NUMBERS if kind != "loss mean" or self.weights.differ]
        # Of rules that fit alike, the user's own reduce_fx is the likeliest.
        first = [_PREFERRED[self.prefer]] if self.prefer in _PREFERRED else []
        return list(dict.fromkeys([*first, *kinds]))

    def _joins(self, target: torch.Tensor, values: list[torch.Tensor]) -> Iterator[Rule]:
        """Dims along which the values make up the target's shape, in blocks if need be."""
        if any(value.ndim != target.ndim for value in values):
            return
        # The batch dim of the inputs is looked at first; of several dims that fit the first is
        # taken.
        for dim in dict.fromkeys((self.dim, *range(target.ndim))):
            if dim >= target.ndim or sum(value.shape[dim] for value in values) != target.shape[dim]:
                continue
            if all(other_dims(value, dim) == other_dims(target, dim) for value in values):
                yield Rule(kind="join", dim=dim)
                # Shapes allow any number of blocks that divides them; the values decide.
                for blocks in range(2, _LARGEST_BLOCKS + 1):
                    if all(value.shape[dim] and value.shape[dim] % blocks == 0 for value in values):
                        yield Rule(kind="join", dim=dim, blocks=blocks)

    def _unlike(self, path: str, whole: Any, parts: Sequence[Any]) -> Finding:
        parted = " and ".join(describe(part) for part in parts)
        return Finding(path=path, rules=(), text=f"{describe(whole)} on one device, {parted} from slices")


def _are_whole(numbers: torch.Tensor) -> bool:
    """Whether they may be counts, which are logged as floating-point numbers."""
    if numbers.is_floating_point():
        exact = numbers.double()
        return bool((exact == exact.round()).all())
    return not numbers.is_complex()


def _largest(values: Sequence[torch.Tensor]) -> float:
    """The largest magnitude in any of them; 0 where none is a finite floating-point number."""
    floats = [value for value in values if value.is_floating_point() and value.numel()]
    # Some narrow floats can be stored, and no more.
    magnitudes = [float(value.double().abs().max()) for value in floats]
    return max(filter(math.isfinite, magnitudes), default=0.0)
