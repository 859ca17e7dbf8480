"""Rules by which the values of slices become the value of the whole batch, found by trying and not by looking at types.

A rehearsal runs the same rows whole and in slices of unequal size. For every value it knows what one device makes of
them, and so which rule reproduces it: values that grow with the rows are joined, counts are summed, means are weighted.
Slices of unequal size make coincidences rare: a 12 x 12 matrix keeps its shape, whatever the number of rows.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch

from lightning_dpx.devices import device_beside
from lightning_dpx.python_objects.object_state import slot_contents
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas.containers import children_of, members_of, rebuild
from lightning_dpx.replicas.tolerance import Tolerance, difference

Kind = Literal[
    "join", "items", "union", "children", "equal", "mean", "loss mean", "sum", "max", "min", "quadratic mean",
    "geometric mean", "first", "last", "by type", "added", "changes",
]  # fmt: skip
# The order in which rules that fit alike are preferred: what a user would most likely mean comes first.
_OF_NUMBERS: tuple[Kind, ...] = (
    "mean", "loss mean", "sum", "max", "min", "quadratic mean", "geometric mean", "first", "last",
)  # fmt: skip
_PREFERRED: dict[str, Kind] = {"sum": "sum", "max": "max", "min": "min"}  # by the reduce_fx of a logged value
_LARGEST_BLOCKS = 8  # "two views of every row, one after the other" are two blocks
_ADDED: tuple[Kind, ...] = ("mean", "loss mean", "sum")
_BY_CHANCE = 3  # so few numbers may fit a rule by chance
_OF_ONE_SUM = Tolerance.of(torch.float32, 1)
NUMBERS = (bool, int, float, np.generic)
# Numbers of NumPy that torch has none for.
_WIDEST = {
    np.dtype(np.longdouble): np.dtype(np.float64),
    np.dtype(np.clongdouble): np.dtype(np.complex128),
}
# What torch stores but does not add, and what it does so in; the bits of a sum of unsigned numbers are the same.
ADDED_IN = {
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the values of slices become one.

    Attributes:
        kind: "join" along a dim, "items" of lists one after the other, "union" of mappings and sets with different
            keys, "children" each by its own rule, the name of a reduction, "by type" where nothing is known, "added"
            where what slices add to the value before comes together, or "changes" where each has changed elements of
            its own.
        dim: Of a join.
        blocks: Of a join: every value is as many blocks along the dim, and the n-th blocks of all come together.
    """

    kind: Kind
    dim: int = 0
    blocks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the slices count.

    Attributes:
        rows: Of each slice.
        of_loss: What each slice's loss weighs; the rows unless the user says otherwise.
    """

    rows: Sequence[float]
    of_loss: Sequence[float]

    @property
    def differ(self) -> bool:
        """Whether the user gave weights of the loss that are not the rows."""
        return list(self.of_loss) != list(self.rows)

    def of(self, kind: Kind) -> Sequence[float]:
        """The weights that a mean of this kind takes."""
        return self.of_loss if kind == "loss mean" else self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What trying the rules on one value has shown.

    Attributes:
        path: Where the value is.
        rules: Those that reproduce the whole batch's value, the preferred one first; none if nothing does.
        is_sure: Whether the rules left would also agree on other values.
        error: The largest relative difference of the preferred rule.
        text: What differs, where no rule reproduces the value.
    """

    path: str
    rules: tuple[Rule, ...]
    is_sure: bool = True
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
            fits = set().union(*parts) == whole
            return [Finding(path=path, rules=(Rule(kind="union"),))] if fits else [self._unlike(path, whole, parts)]
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
        if all(part.keys() == whole.keys() for part in parts) and whole:
            return self._children(whole, parts, path)
        joined: dict[Any, Any] = {}
        for part in parts:
            joined.update(part)
        # Each slice has keys of its own, such as one for every sample.
        apart = sum(map(len, parts)) == len(joined)
        if apart and joined.keys() == whole.keys() and not self._differs(whole, joined, path):
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
        if all(is_same_object(whole, part, self.tolerance) for part in parts):
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
            if _reduce_integers(parts, kind) == whole:
                rules.append(Rule(kind=kind))
        if not rules:
            return self._unlike(path, whole, parts)
        return Finding(path=path, rules=tuple(rules), is_sure=rules[0].kind == "sum")

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
        errors: dict[Rule, float] = {}
        for rule in joins:
            errors[rule] = difference(target, join(values, rule), self.tolerance)
        if all(value.shape == target.shape for value in values):
            for kind in self._kinds():
                reduced = reduce_numbers(values, kind, self.weights)
                if reduced is not None:
                    # Where summands cancel out, the roundings that are left have their size, not
                    # the sum's.
                    terms = _largest(values) if kind in _ADDED else 0.0
                    errors[Rule(kind=kind)] = difference(target, reduced, self.tolerance, terms=terms)
        fitting = [rule for rule, error in errors.items() if error <= self.tolerance.relative]
        if not fitting:
            return self._unlike(path, whole, parts)
        # Equal everywhere fits a mean, an extreme, and "first" alike, so it decides nothing.
        constant = all(difference(target, value, self.tolerance) == 0 for value in values)
        if fitting[0].kind != "join" and constant:
            return self._constant(target, path, fitting)
        is_sure = fitting[0].kind == "join" or len(fitting) == 1 or target.numel() > _BY_CHANCE
        if fitting[0].kind in ("max", "min", "first", "last") and target.numel() <= _BY_CHANCE:
            is_sure = False  # the median of all rows may well be that of some
        return Finding(path=path, rules=tuple(fitting), is_sure=is_sure, error=errors[fitting[0]])

    def _constant(self, target: torch.Tensor, path: str, fitting: list[Rule]) -> Finding:
        """The finding for a value that is the same everywhere: a mean, unless all is zero."""
        if not bool(target.bool().any()):  # a count of what these rows have none of, a mean, or a constant
            return Finding(path=path, rules=(Rule(kind="by type"), *fitting), is_sure=False)
        # Of equal numbers the mean is their value, also once they are no longer equal. Integers
        # have no mean: they are taken as a setting, and a difference is announced.
        floating = target.is_floating_point() or target.is_complex()
        equal = Rule(kind="mean") if floating and any(rule.kind == "mean" for rule in fitting) else Rule(kind="equal")
        others = [rule for rule in fitting if rule != equal]
        return Finding(path=path, rules=(equal, *others))

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
            if all(_other_dims(value, dim) == _other_dims(target, dim) for value in values):
                yield Rule(kind="join", dim=dim)
                # Shapes allow any number of blocks that divides them; the values decide.
                for blocks in range(2, _LARGEST_BLOCKS + 1):
                    if all(value.shape[dim] and value.shape[dim] % blocks == 0 for value in values):
                        yield Rule(kind="join", dim=dim, blocks=blocks)

    def _unlike(self, path: str, whole: Any, parts: Sequence[Any]) -> Finding:
        parted = " and ".join(describe(part) for part in parts)
        return Finding(path=path, rules=(), text=f"{describe(whole)} on one device, {parted} from slices")


def _largest(values: Sequence[torch.Tensor]) -> float:
    """The largest magnitude in any of them; 0 where none is a finite floating-point number."""
    floats = [value for value in values if value.is_floating_point() and value.numel()]
    # Some narrow floats can be stored, and no more.
    magnitudes = [float(value.double().abs().max()) for value in floats]
    return max(filter(math.isfinite, magnitudes), default=0.0)


def _other_dims(value: torch.Tensor, dim: int) -> list[int]:
    return [size for index, size in enumerate(value.shape) if index != dim]


def is_numeric(value: Any) -> bool:
    """Whether ``value`` is a number or a dense array of numbers."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_nested
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, bool | int | float)


def as_tensor(value: Any) -> torch.Tensor:
    """Numbers of any kind as a tensor on the host; floats of Python keep their precision."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        # torch takes arrays of this machine's byte order alone, and no numbers of more than 64 bits.
        known = _WIDEST.get(array.dtype, array.dtype.newbyteorder("="))
        return torch.as_tensor(array.astype(known, copy=True))
    if is_large_integer(value):
        try:
            value = float(value)
        except OverflowError:
            value = math.copysign(math.inf, value)
    # torch would make float32 of a Python float, and lose half of its digits.
    dtype = torch.float64 if isinstance(value, float) else None
    return torch.tensor(value, dtype=dtype)


def is_large_integer(value: Any) -> bool:
    """Whether ``value`` is an integer of Python that no tensor can hold."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def is_equal_object(whole: Any, parts: Sequence[Any]) -> bool:
    """Whether all are equal, by their own idea of it; an idea that fails counts as no."""
    if isinstance(whole, np.ndarray):
        return all(isinstance(part, np.ndarray) and np.array_equal(part, whole) for part in parts)
    try:
        # Identity first: an object may be unequal to itself, as NaN is.
        return all(part is whole or bool(part == whole) for part in parts)
    except Exception:  # noqa: BLE001  an object may refuse to be compared; then nothing is known
        return False


def has_no_equality(value: Any) -> bool:
    """Whether two objects of this class are equal only if they are one."""
    # ``object`` itself, the last of the row, has one: that of identity.
    # Two runs of one step make two objects of such a class, which are never equal.
    return not any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1])


def is_same_object(one: Any, two: Any, tolerance: Tolerance, within: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two objects are equal, or of a class without equality and alike in all attributes.

    Args:
        one: Any object.
        two: Likewise.
        tolerance: Of the numbers that they hold.
        within: The ids of the pairs that are being compared, whose attributes have led here.
    """
    # Objects may refer to each other in a circle; whether these differ is found out where the circle began.
    pair = id(one), id(two)
    if pair in within or is_equal_object(one, [two]):
        return True
    if type(one) is not type(two) or not has_no_equality(one):
        return False
    # Without any, as those of C, two objects of a class are taken for the same.
    mine = _attributes_of(one)
    theirs = _attributes_of(two)
    if mine.keys() != theirs.keys():
        return False
    for key, value in mine.items():
        for _, error in compare_trees(value, theirs[key], tolerance, within=within | {pair}):
            if error > tolerance.relative:
                return False
    return True


def _attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds in its ``__dict__`` and in slots, by name."""
    return {**dict(slot_contents(value)), **(own_attributes(value) or {})}


def compare_trees(
    one: Any, two: Any, tolerance: Tolerance, path: str = "", *, within: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[tuple[str, float]]:
    """Paths and relative differences of all leaves; infinity where structures or shapes differ."""
    if is_large_integer(one) or is_large_integer(two):
        yield path, 0.0 if type(one) is type(two) and one == two else float("inf")
        return
    if is_numeric(one) and is_numeric(two):
        yield path, difference(as_tensor(one), as_tensor(two), tolerance)
        return
    if type(one) is not type(two):
        yield path, float("inf")
        return
    mine = children_of(one)
    theirs = children_of(two)
    if mine is None and theirs is None and not is_equal_object(one, [two]):
        mine = members_of(one)
        theirs = members_of(two)
    if mine is None or theirs is None:
        yield path, 0.0 if is_same_object(one, two, tolerance, within) else float("inf")
        return
    if [name for name, _ in mine] != [name for name, _ in theirs]:
        yield path, float("inf")
        return
    for (name, value), (_, other) in zip(mine, theirs, strict=True):
        inner = f"{path}.{name}" if path else name
        yield from compare_trees(value, other, tolerance, inner, within=within)


def describe(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, torch.Tensor | np.ndarray) and np.prod(value.shape) != 1:
        return f"shape {tuple(value.shape)}"
    if isinstance(value, int):
        return str(value)
    if is_numeric(value):
        number = as_tensor(value).item()
        return f"{number:.6g}" if isinstance(number, float) else str(number)
    if isinstance(value, list | tuple | dict | set):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def join(values: Sequence[torch.Tensor], rule: Rule) -> torch.Tensor:
    """The values one after the other, block by block."""
    if rule.blocks == 1:
        return torch.cat(list(values), rule.dim)
    # Two augmented views of a batch, one after the other: all slices' first blocks, then all their second ones.
    chunks = [value.chunk(rule.blocks, rule.dim) for value in values]
    in_order: list[torch.Tensor] = []
    for blocks in zip(*chunks, strict=True):
        in_order += blocks
    return torch.cat(in_order, rule.dim)


def join_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """Arrays of texts or objects one after the other; ``None`` where they differ in other dims than the first."""
    try:
        return np.concatenate(list(arrays))
    # Texts in columns, say, of which each slice has as many as its longest row; records of other fields.
    except (ValueError, TypeError):
        return None


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float], device: torch.device) -> torch.Tensor:
    """The mean of ``values`` (equal shapes) with ``weights``, on ``device``; one value is returned as it is."""
    if len(values) == 1:
        return values[0].to(device)
    total = float(sum(weights))
    # Weights are divided before they multiply: the products are no larger than the values, so
    # that half precision does not overflow on the way.
    mean = values[0].to(device) * (weights[0] / total)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        mean = torch.add(mean, value.to(device), alpha=weight / total)
    return mean


def mean_of_slices(values: Sequence[torch.Tensor], counts: Sequence[float], weights: Weights) -> torch.Tensor:
    """The mean of the slices' means of as many ``counts``, on the first one's device."""
    device = values[0].device
    counted = [index for index, count in enumerate(counts) if count]  # a mean over no tokens is NaN
    # No slice has any: rows are all that is known, and the mean is NaN as on one device.
    if not counted:
        return weighted_mean(values, weights.rows, device)
    return weighted_mean([values[i] for i in counted], [counts[i] for i in counted], device)


def _reduce_integers(values: Sequence[int], kind: Kind) -> int | None:
    """One integer from several of any size; ``None`` where the kind is not exact for them."""
    if kind == "sum":
        return sum(values)
    if kind == "max":
        return max(values)
    if kind == "min":
        return min(values)
    if kind == "last":
        return values[-1]
    if kind == "first" or (kind == "equal" and len(set(values)) == 1):
        return values[0]
    return None


def reduce_numbers(values: Sequence[torch.Tensor], kind: Kind, weights: Weights) -> torch.Tensor | None:
    """One tensor from several of equal shapes on one device; ``None`` where the kind makes no sense for them."""
    first = values[0]
    if first.dtype in ADDED_IN:
        wide = [value.to(ADDED_IN[first.dtype]) for value in values]
        # Beyond 63 bits the signed number is negative, and smaller than all others.
        if kind in ("max", "min") and first.dtype == torch.uint64 and any(bool((one < 0).any()) for one in wide):
            return None
        reduced = reduce_numbers(wide, kind, weights)
        return None if reduced is None else reduced.to(first.dtype)
    if kind in ("first", "last", "equal"):
        return values[-1] if kind == "last" else first
    # torch adds flags up to a flag, which counts nothing.
    if kind == "sum" and first.dtype != torch.bool:
        return _total(values)
    if kind in ("max", "min") and not first.is_complex():
        stacked = torch.stack(list(values))
        return stacked.amax(0) if kind == "max" else stacked.amin(0)
    if kind in ("mean", "loss mean") and (first.is_floating_point() or first.is_complex()):
        return mean_of_slices(values, weights.of(kind), weights)
    if kind == "quadratic mean" and first.is_floating_point():
        return weighted_mean([value.square() for value in values], weights.rows, first.device).sqrt()
    if kind == "geometric mean" and first.is_floating_point():
        return weighted_mean([value.log() for value in values], weights.of_loss, first.device).exp()
    return None


def _total(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


Fallback = Callable[[list[Any], str], Any]


@dataclass(slots=True, kw_only=True)
class Merger:
    """Merges values by rules that are known for their paths.

    Args:
        rules: By path.
        weights: Of the values.
        device: Where merged tensors shall live.
        fallback: Merges a value that no rule is known for, given its parts and path.
    """

    rules: Mapping[str, Rule]
    weights: Weights
    device: torch.device
    fallback: Fallback

    def merge(self, parts: list[Any], path: str) -> Any:
        """One value from those of the slices."""
        # A rule is of the type that the rehearsal saw. A step may return something else later.
        rule = self.rules.get(path)
        if rule is None or rule.kind == "by type" or any(type(part) is not type(parts[0]) for part in parts):
            return self.fallback(parts, path)
        # One slice is the whole batch. Containers are gone through even so: their tensors are
        # moved.
        if len(parts) == 1 and rule.kind != "children":
            return self._moved(parts)[0] if isinstance(parts[0], torch.Tensor) else parts[0]
        if rule.kind == "children":
            return self._children(parts, path)
        if rule.kind == "items" and isinstance(parts[0], np.ndarray):
            joined = join_arrays(parts)
            return self.fallback(parts, path) if joined is None else joined
        if rule.kind == "items" and isinstance(parts[0], list | tuple):
            return type(parts[0])(chain.from_iterable(parts))
        if rule.kind == "union" and isinstance(parts[0], Mapping | set | frozenset):
            return _union(parts)
        if all(map(is_numeric, parts)):
            return self._numbers(parts, rule, path)
        # Beyond numbers, only what is equal has a merged value of its own.
        if rule.kind == "equal":
            if all(_is_still_equal(parts[0], part) for part in parts[1:]):
                return parts[0]
            self._no_longer_equal(path)
        return self.fallback(parts, path)

    def _moved(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors on the first device, or on the host where the step has put them there."""
        device = device_beside(parts[0], self.device, self.device)
        return [part.to(device) for part in parts]

    def _children(self, parts: list[Any], path: str) -> Any:
        # An object that all replicas share is no result of theirs: it stays itself.
        if children_of(parts[0]) is None and all(part is parts[0] for part in parts) and len(parts) > 1:
            return parts[0]
        found = [members_of(part) for part in parts]
        # A text, say, in the place of the container that the rehearsal saw.
        if any(of_slice is None for of_slice in found):
            return self.fallback(parts, path)
        children = [dict(of_slice or ()) for of_slice in found]
        # Other keys than in the rehearsal, or not the same on all slices.
        if any(of_slice.keys() != children[0].keys() for of_slice in children):
            return self.fallback(parts, path)
        merged = []
        for name in children[0]:
            of_slices = [of_slice[name] for of_slice in children]
            merged.append(self.merge(of_slices, f"{path}.{name}"))
        return rebuild(parts[0], merged)

    def _numbers(self, parts: list[Any], rule: Rule, path: str) -> Any:
        first = parts[0]
        if any(map(is_large_integer, parts)):
            exact = _reduce_integers(parts, rule.kind) if all(isinstance(part, int) for part in parts) else None
            if exact is None and rule.kind == "equal":
                self._no_longer_equal(path)
            return self.fallback(parts, path) if exact is None else exact
        # Tensors are merged where they are, without waiting for a device to hand them to the host.
        values = self._moved(parts) if isinstance(first, torch.Tensor) else list(map(as_tensor, parts))
        merged = self._tensors(values, rule)
        if merged is None:
            if rule.kind == "equal":
                self._no_longer_equal(path)
            return self.fallback(parts, path)
        return merged if isinstance(first, torch.Tensor) else like(merged, first)

    def _no_longer_equal(self, path: str) -> None:
        warnings.warn(
            f"dpx: {path.removeprefix('result.')!r} was the same on all slices in the rehearsal, and no longer is: it "
            "is merged by its type now (floating-point numbers are averaged, integers added).",
            stacklevel=3,
        )

    def _tensors(self, values: list[torch.Tensor], rule: Rule) -> torch.Tensor | None:
        shapes = {tuple(value.shape) for value in values}
        if rule.kind == "join":
            # The rule comes from a few rows; an output of the whole batch may have another shape (padding, say).
            others = {tuple(_other_dims(value, rule.dim)) for value in values}
            whole_blocks = all(value.ndim > rule.dim and value.shape[rule.dim] % rule.blocks == 0 for value in values)
            if len(others) > 1 or not whole_blocks:
                return None
            return join(values, rule)
        if len(shapes) > 1:
            return None
        if rule.kind == "equal":
            return values[0] if all(torch.equal(value, values[0]) for value in values[1:]) else None
        return reduce_numbers(values, rule.kind, self.weights)


def _is_still_equal(one: Any, two: Any) -> bool:
    """Whether objects that were alike in the rehearsal are so on other slices."""
    # Every replica has its own copy of a submodule, all of them with the same weights.
    if isinstance(one, torch.nn.Module) and type(one) is type(two):
        return True
    return is_same_object(one, two, _OF_ONE_SUM)


def _union(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, set | frozenset):
        return type(first)().union(*parts)
    joined: dict[Any, Any] = {}
    for part in parts:
        joined.update(part)
    if type(first) is dict:
        return joined
    # A mapping's class may have attributes and a constructor of its own.
    merged = first.copy() if hasattr(first, "copy") else dict(first)
    merged.update(joined)
    return merged


def like(merged: torch.Tensor, first: Any) -> Any:
    """A number, or an array of NumPy, of the kind that the slices gave."""
    if isinstance(first, np.ndarray):
        return merged.numpy().astype(first.dtype, copy=False)
    if isinstance(first, np.generic):
        return first.dtype.type(merged.item())
    # A float keeps its digits; a bool or an int is made from the number that the tensor has.
    return merged.item() if isinstance(first, float) else type(first)(merged.item())
