"""Puts values of slices together by rules that are known for their paths."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from lightning_dpx.devices import device_beside
from lightning_dpx.replicas.containers import children_of, members_of, rebuild
from lightning_dpx.replicas.merging.equality import is_same_object
from lightning_dpx.replicas.merging.number_types import as_tensor, is_large_integer, is_numeric, like
from lightning_dpx.replicas.merging.reductions import join, join_arrays, other_dims, reduce_integers, reduce_numbers
from lightning_dpx.replicas.merging.rules import Rule, Weights
from lightning_dpx.replicas.merging.tolerance import Tolerance

_OF_ONE_SUM = Tolerance.of(torch.float32, 1)
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
            if isinstance(parts[0], torch.Tensor):
                return self._moved(parts)[0]
            return parts[0]
        if rule.kind == "children":
            return self._children(parts, path)
        if rule.kind == "items" and isinstance(parts[0], np.ndarray):
            joined = join_arrays(parts)
            if joined is None:
                return self.fallback(parts, path)
            return joined
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
            exact = reduce_integers(parts, rule.kind) if all(isinstance(part, int) for part in parts) else None
            if exact is None and rule.kind == "equal":
                self._no_longer_equal(path)
            if exact is None:
                return self.fallback(parts, path)
            return exact
        # Tensors are merged where they are, without waiting for a device to hand them to the host.
        values = self._moved(parts) if isinstance(first, torch.Tensor) else list(map(as_tensor, parts))
        merged = self._tensors(values, rule)
        if merged is None:
            if rule.kind == "equal":
                self._no_longer_equal(path)
            return self.fallback(parts, path)
        if isinstance(first, torch.Tensor):
            return merged
        return like(merged, first)

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
            others = {tuple(other_dims(value, rule.dim)) for value in values}
            whole_blocks = all(value.ndim > rule.dim and value.shape[rule.dim] % rule.blocks == 0 for value in values)
            if len(others) > 1 or not whole_blocks:
                return None
            return join(values, rule)
        if len(shapes) > 1:
            return None
        if rule.kind == "equal":
            if all(torch.equal(value, values[0]) for value in values[1:]):
                return values[0]
            return None
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
