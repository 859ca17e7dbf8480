"""What several replicas give to one call of a metric, put together as one device would have given it.

Tensors and lists are joined by rows. A number is a mean over its rows or a count, which its value does not tell: what a
rehearsal has learned decides, otherwise the value of :class:`JoinRules` that fits best, which is announced.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dpx.errors import GatherError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
MEAN = "mean"
SUM = "sum"
LARGEST = "largest"
SMALLEST = "smallest"
SAME = "same"
ITEMS = "items"
EXTEND = "extend"


@dataclass(slots=True)
class JoinRules:
    """How the arguments of one method of one metric are joined, by their path.

    Attributes:
        learned: The rules that fitted all that a rehearsal has seen, the likeliest first.
        guessed: Numbers that differed between replicas, and what was made of them, where that is not sure.
    """

    learned: dict[str, tuple[str, ...]] = field(default_factory=dict)
    guessed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What is known of the step.

    Attributes:
        rows: Rows of each part.
        dim: The batch dim to look for first.
        number: What floating-point numbers are unless something else is known: ``"mean"`` or ``"sum"``.
        extreme: The rule by which the metric takes values together that it is given one after the other, ``"largest"``
            or ``"smallest"``; empty for others.
    """

    rows: tuple[int, ...]
    dim: int = 0
    number: str = MEAN
    extreme: str = ""


def join_calls(calls: Sequence[Arguments], settings: JoinSettings, rules: JoinRules) -> Arguments:
    """The arguments of one call from those of one per replica; positional ones by their place, others by name.

    Raises:
        GatherError: arguments do not fit together; names them.
    """
    # Replicas that call one method in different ways have nothing that belongs together.
    shapes = {(len(args), tuple(kwargs)) for args, kwargs in calls}
    if len(shapes) > 1:
        given = " and ".join(f"{number} by place with {list(names)} by name" for number, names in sorted(shapes))
        raise GatherError(f"The replicas called one method of a metric with other arguments: {given}.")
    first_args, first_kwargs = calls[0]
    args = []
    for position in range(len(first_args)):
        column = [of_replica[position] for of_replica, _ in calls]
        args.append(join(column, settings, rules, f"argument {position}"))
    kwargs = {}
    for name in first_kwargs:
        column = [of_replica[name] for _, of_replica in calls]
        kwargs[name] = join(column, settings, rules, name)
    return tuple(args), kwargs


def learn_calls(whole: Arguments, parts: Sequence[Arguments], settings: JoinSettings, rules: JoinRules) -> list[str]:
    """Finds the rules that make the arguments of ``whole`` of those of ``parts``; returns those without a rule."""
    args, kwargs = whole
    if any(len(theirs) != len(args) or named.keys() != kwargs.keys() for theirs, named in parts):
        return ["the number of arguments"]
    missing = []
    for position, value in enumerate(args):
        missing += learn(value, [theirs[position] for theirs, _ in parts], settings, rules, f"argument {position}")
    for name, value in kwargs.items():
        missing += learn(value, [named[name] for _, named in parts], settings, rules, name)
    return missing


def join(parts: Sequence[Any], settings: JoinSettings, rules: JoinRules, path: str) -> Any:
    """One value from one per replica, all on one device.

    Args:
        parts: K values of the same structure.
        settings: What is known of the step.
        rules: Of this call; what is guessed is noted there.
        path: Of the values, for rules and errors.

    Raises:
        GatherError: the values do not fit together; names their path.
    """
    known = rules.learned.get(path, ())
    rule, items = _first_option(_options(list(parts), settings, known), known)
    if not rule:
        kinds = ", ".join(_describe(part) for part in parts)
        raise GatherError(f"The replicas gave {kinds} as {path}, which do not fit together.")
    if rule == ITEMS:
        keys = list(items)
        joined = []
        for key in keys:
            column = [part[key] for part in parts]
            joined.append(join(column, settings, rules, f"{path}[{key!r}]"))
        return _rebuild(parts[0], keys, joined)
    # Equal numbers are the same number in any case; only where they differ is the user told
    # of a guess.
    is_guess = rule in (MEAN, SUM) and rule not in known
    # Few rows tell an extreme of them from the value of one of them only by chance.
    if (is_guess or rule == settings.extreme) and not _are_equal(parts):
        rules.guessed[path] = rule
    return _apply(rule, list(parts), settings)


def _first_option(options: Iterator[tuple[str, Any]], known: Sequence[str]) -> tuple[str, Any]:
    """The first known rule that can be applied, else the likeliest of all; an empty one if there is none.

    Options are looked at one by one, as to compare values waits for their device, in every step.
    """
    possible: dict[str, Any] = {}
    for rule, items in options:
        if not known or rule == known[0]:
            return rule, items
        possible[rule] = items
    # A rule that fitted before need not be possible here, as with slices of other shapes.
    for rule in (*known, *possible):
        if rule in possible:
            return rule, possible[rule]
    return "", None


def learn(whole: Any, parts: Sequence[Any], settings: JoinSettings, rules: JoinRules, path: str) -> list[str]:
    """Finds the rules that make ``whole`` of ``parts``; returns the paths for which there is none.

    Zeros fit many rules, so all that fit are noted, and of those of before the ones that fit again.
    """
    options = dict(_options(list(parts), settings))
    fitting = []
    for rule in options:
        if rule == ITEMS:
            keys = list(options[ITEMS])
            if not _has_items(whole, keys):
                continue
            missing = []
            for key in keys:
                missing += learn(whole[key], [part[key] for part in parts], settings, rules, f"{path}[{key!r}]")
            if not missing:
                fitting.append(rule)
        # To rounding, as a sum over slices adds up in another order.
        elif _are_equal([_apply(rule, list(parts), settings), whole]):
            fitting.append(rule)
    if not fitting:
        return [path]
    # A rule must fit every time: what zeros have allowed, other values rule out.
    again = [rule for rule in rules.learned.get(path, ()) if rule in fitting]
    rules.learned[path] = tuple(again or fitting)
    return []


def _options(parts: list[Any], settings: JoinSettings, known: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """The rules that can be applied, the likeliest first; with that of items comes their keys."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return
    if isinstance(first, Tensor | np.ndarray) and first.ndim > 0:
        yield from ((rule, None) for rule in _tensor_rules(parts, settings))
    elif isinstance(first, Tensor | np.ndarray | np.generic | int | float | complex) and not isinstance(first, bool):
        yield from ((rule, None) for rule in _number_rules(parts, settings, known))
    elif isinstance(first, list | tuple):
        yield from _list_rules(parts, settings)
    elif isinstance(first, Mapping):
        if all(part.keys() == first.keys() for part in parts):
            yield ITEMS, tuple(first)
    # Flags, texts and unknown objects have no rows, so they must be the same on all replicas.
    elif _are_equal(parts):
        yield SAME, None


def _tensor_rules(parts: list[Any], settings: JoinSettings) -> Iterator[str]:
    shapes = [tuple(part.shape) for part in parts]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return
    fitting: list[int] = []  # dims along which all can be joined
    of_rows: list[int] = []  # dims along which each has as many entries as its replica has rows
    varying: list[int] = []
    for dim in range(len(shapes[0])):
        along = tuple(shape[dim] for shape in shapes)
        if along == settings.rows:
            of_rows.append(dim)
        if len({_without(shape, dim) for shape in shapes}) == 1:
            fitting.append(dim)
            if len(set(along)) > 1:
                varying.append(dim)
    if of_rows and not set(of_rows) & set(fitting):  # a row each, of other sizes: to join another dim would mispair
        return
    of_rows = [dim for dim in of_rows if dim in fitting]
    # The batch dim first, then what differs between replicas (tokens), then dims of as many entries as rows by chance.
    preferred = [dim for dim in (settings.dim, 0) if dim in of_rows]
    dims = dict.fromkeys([*preferred, *varying, *of_rows, *fitting])
    of_one_shape = len(set(shapes)) == 1
    # Slices of unequal sizes that give equal tensors of another size give a setting, such as weights of classes.
    constant = of_one_shape and len(set(settings.rows)) > 1 and not of_rows and _are_equal(parts)
    if constant:
        yield SAME
    for dim in dims:
        yield f"rows {dim}"
    if of_one_shape:
        if not constant and _are_equal(parts):
            yield SAME
        yield from (SUM, MEAN, *_extremes(parts[0], settings))


def _number_rules(parts: list[Any], settings: JoinSettings, known: Sequence[str]) -> list[str]:
    # Not asked where a rule is known, as to compare values waits for their device.
    if not known and all(part == rows for part, rows in zip(parts, settings.rows, strict=True)):
        return [SUM, SAME, MEAN]  # the number of rows: no extreme
    rules = [SUM, MEAN]  # integers are counts
    if isinstance(parts[0], float) or torch.as_tensor(parts[0]).dtype.is_floating_point:
        rules.remove(settings.number)
        rules.insert(0, settings.number)
    # Last, as they are learned and never guessed.
    rules += _extremes(parts[0], settings)
    if (not known or SAME in known) and _are_equal(parts):
        return [SAME, *rules]
    return rules


def _extremes(part: Any, settings: JoinSettings) -> list[str]:
    """The rule for extremes where the metric keeps one itself, and values have an order: complex numbers have none."""
    # Of two slices one has the larger number: whatever is that of one row, such as the loss of the first, would fit.
    if not settings.extreme:
        return []
    if isinstance(part, Tensor):
        is_ordered = part.layout == torch.strided and not part.is_complex()
    else:
        is_ordered = np.asarray(part).dtype.kind in "iuf"
    return [settings.extreme] if is_ordered else []


def _list_rules(parts: list[Any], settings: JoinSettings) -> Iterator[tuple[str, Any]]:
    lengths = [len(part) for part in parts]
    # The fields of a named tuple are no rows.
    named = hasattr(parts[0], "_fields")
    by_rows = list(lengths) == list(settings.rows)
    if not named and (by_rows or len(set(lengths)) > 1):
        yield EXTEND, None
    if len(set(lengths)) == 1:
        # Lists of one length that is not that of the rows are likely a structure, the same on all.
        yield ITEMS, tuple(range(lengths[0]))
    if not named and not by_rows and len(set(lengths)) == 1:
        yield EXTEND, None


def _apply(rule: str, parts: list[Any], settings: JoinSettings) -> Any:
    first = parts[0]
    if rule == SAME:
        return first
    if rule == EXTEND:
        return type(first)(chain.from_iterable(parts))
    if rule == SUM:
        return sum(parts[1:], first)
    if rule in (LARGEST, SMALLEST):
        return _extreme(rule, parts)
    if rule == MEAN:
        total = sum(settings.rows)
        return sum(part * (rows / total) for part, rows in zip(parts, settings.rows, strict=True))
    dim = int(rule.partition(" ")[2])
    if isinstance(first, np.ndarray):
        return np.concatenate(parts, dim)
    return torch.cat(parts, dim)


def _extreme(rule: str, parts: list[Any]) -> Any:
    """Of what a step has taken the largest, or the smallest, of its rows itself."""
    first = parts[0]
    if isinstance(first, Tensor):
        stacked = torch.stack(parts)
        return stacked.amax(0) if rule == LARGEST else stacked.amin(0)
    # Of NumPy numbers, which are arrays without dims; a NaN is the extreme of all in both libraries.
    if isinstance(first, np.ndarray | np.generic):
        values = np.stack(parts)
        return values.max(0) if rule == LARGEST else values.min(0)
    return max(parts) if rule == LARGEST else min(parts)


def _rebuild(like: Any, keys: list[Any], values: list[Any]) -> Any:
    kind: Any = type(like)
    if isinstance(like, Mapping):
        pairs = dict(zip(keys, values, strict=True))
        if kind is dict:
            return pairs
        return kind(pairs)
    if hasattr(like, "_fields"):
        return kind(*values)
    return kind(values)


def _has_items(value: Any, keys: Sequence[Any]) -> bool:
    if isinstance(value, Mapping):
        return list(value) == list(keys)
    return isinstance(value, list | tuple) and len(value) == len(keys)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _are_equal(values: Sequence[Any]) -> bool:
    """Whether all are the same, to rounding."""
    first = values[0]
    return all(other is first or _is_close(first, other) for other in values[1:])


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor | np.ndarray | np.generic | float | int | complex) and not isinstance(one, bool):
        if not isinstance(other, Tensor | np.ndarray | np.generic | float | int | complex):
            return False
        mine = torch.as_tensor(one)
        theirs = torch.as_tensor(other)
        if mine.shape != theirs.shape:
            return False
        theirs = theirs.to(mine.device)
        # Integers have no rounding to forgive.
        exact = not (mine.dtype.is_floating_point or mine.dtype.is_complex)
        if exact:
            return torch.equal(mine, theirs)
        return torch.allclose(mine, theirs.to(mine), 1e-5, 1e-7, True)
    if isinstance(one, list | tuple):
        same = type(one) is type(other) and len(one) == len(other)
        return same and all(map(_is_close, one, other))
    if isinstance(one, Mapping):
        same = type(one) is type(other) and one.keys() == other.keys()
        return same and all(_is_close(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.40}"
