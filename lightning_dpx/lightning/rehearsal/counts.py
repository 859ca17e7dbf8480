"""Counts that a step adds to, wherever it keeps them, and how those of a shadow begin further on.

An attribute or a buffer is every replica's own. What lies in a dict, an object, a list or an array is one number for
all replicas, to which slices add one after the other; so is what lies outside of the module, such as a global.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.lightning.rehearsal.comparison.observation import OUTSIDE, name_of
from lightning_dpx.lightning.rehearsal.outside_state import Surroundings
from lightning_dpx.python_objects.kept_values import kept_values, put_value
from lightning_dpx.python_objects.object_graph import CONTAINERS, pairs_of
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas import ListPlace

MOST = 64  # counts of one step, and elements of an array of them
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number that a step adds to, or an array of such.

    Attributes:
        path: Of the attribute or buffer, or of what lies outside of the module, as observations have it.
        keys: From there on, likewise.
        unit: By what it begins further on, in the direction in which steps count: one, or what a row adds where that is
            no whole number; of an array, element by element.
        num_units: How many of them one step adds.
    """

    path: str
    keys: tuple[Any, ...] = ()
    unit: Any = 1
    num_units: float = 1

    def __str__(self) -> str:
        root = self.path.removeprefix(OUTSIDE) if self.is_outside else f"self.{self.path}"
        return ".".join([root, *map(str, self.keys)])

    @property
    def is_outside(self) -> bool:
        """Whether it lies outside of the module."""
        return self.path.startswith(OUTSIDE)

    @property
    def is_shared(self) -> bool:
        """Whether slices add to the same number, one after the other."""
        return self.is_outside or bool(self.keys) or isinstance(self.unit, np.ndarray)

    def parts(self) -> "list[Count]":
        """The elements that steps add to, each as a count of its own."""
        if not isinstance(self.unit, torch.Tensor | np.ndarray):
            return [self]
        found: list[Count] = []
        flat = self.unit.reshape(-1)
        for index in range(len(flat)):
            if flat[index] != 0:
                alone = self.unit.copy() if isinstance(self.unit, np.ndarray) else self.unit.clone()
                alone.reshape(-1)[:index] = 0
                alone.reshape(-1)[index + 1 :] = 0
                found.append(replace(self, unit=alone))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """A list that a step appends to, whose length may be counted with.

    Attributes:
        place: Of the list.
        items: What a step appends.
    """

    place: ListPlace
    items: Sequence[Any]

    is_shared = True

    def __str__(self) -> str:
        return str(self.place)

    def of_rows(self, num_rows: int) -> "list[Length]":
        """The list with the first row of each item, if that is a tensor of all of them: rows may be what is counted.

        Args:
            num_rows: Of the step that has appended the items.
        """
        rows = [item[:1] for item in self.items if isinstance(item, torch.Tensor) and _length(item) == num_rows > 1]
        return [replace(self, items=rows)] if len(rows) == len(self.items) else []

    def parts(self) -> "list[Length]":
        """The list has no parts that are counted one by one."""
        return [self]


def _length(tensor: torch.Tensor) -> int:
    return len(tensor) if tensor.dim() else 0


def begin_further(
    counts: Iterable[tuple[Count | Length, float]], module: nn.Module, surroundings: Surroundings
) -> None:
    """Counts begin so many units further on.

    Args:
        counts: Each with the number of units.
        module: The shadow that holds them.
        surroundings: What lies outside of it, which is put back after a run.
    """
    done: set[tuple[int, Any]] = set()
    for count, number in counts:
        if isinstance(count, Length):
            _lengthen(count, module, int(number))
            continue
        holder, key = _root_of(count, module, surroundings)
        for name in count.keys:
            holder, key = _entered(holder, key, name)
        # Several ways may lead to one number.
        if holder is None or (id(holder), key) in done:
            continue
        done.add((id(holder), key))
        _add(holder, key, count.unit, number)


def counts_between(before: Mapping[str, Any], after: Mapping[str, Any], num_rows: int) -> list[Count]:
    """The numbers within containers and objects, and outside of the module, that a step has changed.

    Args:
        before: State of a shadow before the step, by path, as observations have it.
        after: The same after it.
        num_rows: Of the step.
    """
    found: list[Count] = []
    for path, value in after.items():
        root = Count(path=path)
        for count, start, end in _numbers_within(root, before.get(path), value, _MISSING):
            # Numbers right behind attributes of the module are its replicas' own.
            if count.keys or count.is_outside or isinstance(end, np.ndarray):
                found.append(count_between(count, start, end, num_rows))
            if len(found) == MOST:
                return found
    return found


def count_between(count: Count, before: Any, after: Any, num_rows: int) -> Count:
    """A count that a step has changed, with its unit.

    Args:
        count: Where it is.
        before: What it was before the step.
        after: What it is after it.
        num_rows: Of the step.
    """
    added = after - before
    direction: Any
    if isinstance(added, torch.Tensor):
        is_whole = bool((added == added.round()).all()) if added.is_floating_point() else True
        direction = added.sign()
        most = float(added.abs().max())
    else:
        is_whole = bool(np.all(added == np.round(added)))
        direction = np.sign(added) if isinstance(added, np.ndarray) else int(math.copysign(1, added))
        most = float(np.abs(added).max())
    # One by one, so that no level is stepped over; of parts of rows there is no smallest one.
    if is_whole:
        return replace(count, unit=direction, num_units=most)
    return replace(count, unit=added / num_rows, num_units=num_rows)


def _numbers_within(count: Count, before: Any, after: Any, absent: Any) -> Iterator[tuple[Count, Any, Any]]:
    """The numbers that are others now, with what they were and are; an ``absent`` one has begun at 0."""
    # Observations have dicts in the place of objects, and lists in that of tuples and deques.
    if isinstance(after, dict):
        held = before if isinstance(before, dict) else {}
        for key, value in after.items():
            yield from _numbers_within(_within(count, key), held.get(key, absent), value, absent)
    elif isinstance(after, list) and isinstance(before, list):
        # Items that the step has appended are no counts; those before them may be.
        for index, (start, value) in enumerate(zip(before, after, strict=False)):
            yield from _numbers_within(_within(count, index), start, value, absent)
    elif isinstance(after, np.ndarray):
        is_alike = isinstance(before, np.ndarray) and before.shape == after.shape
        if is_alike and _is_few_counts(after) and bool((before != after).any()):
            yield count, before, after
    elif _is_finite(after):
        start = 0 if before is absent or before is None else before
        if _is_finite(start) and start != after:
            yield count, start, after


def _within(count: Count, key: Any) -> Count:
    return replace(count, keys=(*count.keys, key))


def _is_few_counts(array: Any) -> bool:
    return array.dtype.kind in "iuf" and array.size <= MOST and bool(np.isfinite(array).all())


def _is_finite(value: Any) -> bool:
    # A truth is a number as well, and is not counted with.
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return bool(np.isfinite(float(value)))


def _root_of(count: Count, module: nn.Module, surroundings: Surroundings) -> tuple[Any, Any]:
    """What holds the number's attribute, and its name there."""
    if count.is_outside:
        return surroundings.place_of(count.path.removeprefix(OUTSIDE))
    owner, _, name = count.path.rpartition(".")
    return module.get_submodule(owner), name


def _entered(holder: Any, key: Any, name: Any) -> tuple[Any, Any]:
    """One container or object further in: what holds the next number, and its key there; ``None`` if nothing does."""
    value = _held(holder, key)
    if isinstance(value, CONTAINERS):
        own = own_attributes(value)
        # Observations tell the items of such a class from its attributes.
        if own and own is not value:
            return (holder, key) if name == "items" else (value, name)
    if isinstance(value, dict):
        for place, (one, _) in enumerate(pairs_of(value)):
            if name_of(one, place) == name:
                return value, one
        # The first step makes it, under a name that can be told from the text of other keys.
        return (value, name) if all(isinstance(one, str) for one in value) else (None, None)
    return (None, None) if value is None else (value, name)


def _held(holder: Any, key: Any) -> Any:
    if isinstance(holder, nn.Module):
        return getattr(holder, key, None)
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, list | tuple | deque):
        return holder[key] if isinstance(key, int) and key < len(holder) else None
    if isinstance(holder, type):
        return vars(holder).get(key)
    return (kept_values(holder) or {}).get(key)


def _add(holder: Any, key: Any, unit: Any, number: float) -> None:
    value = _held(holder, key)
    amount = unit * number
    if isinstance(value, torch.Tensor):
        amount = amount.to(value) if isinstance(amount, torch.Tensor) else amount
    elif isinstance(value, np.ndarray):
        # In place, as others may have the same array.
        value += np.asarray(amount).astype(value.dtype)
        return
    # Past what a class does when it is set, such as a property that refuses smaller numbers.
    total = amount if value is None else value + amount  # a first step may make it
    if isinstance(holder, nn.Module):
        setattr(holder, key, total)
    elif isinstance(holder, dict | list | deque):
        holder[key] = total
    else:
        put_value(holder, key, total)


def _lengthen(length: Length, module: nn.Module, number: int) -> None:
    held = length.place.find(module)
    items = list(islice(cycle(length.items), number))
    # In front, where the oldest ones are.
    if isinstance(held, deque):
        room = number if held.maxlen is None else held.maxlen - len(held)
        held.extendleft(items[:room])
    elif isinstance(held, list):
        held[:0] = items
