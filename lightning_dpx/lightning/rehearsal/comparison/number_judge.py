"""How a number that a step sets, or adds to, on an attribute comes together from slices."""

from collections.abc import Mapping
from typing import Any

import torch

from lightning_dpx.replicas import Weights
from lightning_dpx.replicas.merging.equality import compare_trees
from lightning_dpx.replicas.merging.number_types import as_tensor
from lightning_dpx.replicas.merging.rebound_numbers import increments, joined_changes
from lightning_dpx.replicas.merging.rule_search import Search
from lightning_dpx.replicas.merging.rules import Rule
from lightning_dpx.replicas.merging.tolerance import Tolerance

_OF_NUMBERS = ("mean", "loss mean", "sum", "max", "min", "quadratic mean", "geometric mean", "last")
_OF_ADDING = ("added", "sum")
# Of several rules that fit, those come last that fit by chance more often than not: the first slice has the largest
# number in half of all looks at two slices, and few steps keep the number of their first or last rows.
_BY_CHANCE = {"max": 1, "min": 1, "first": 2, "last": 3}
CHANGES = Rule(kind="changes")
SETTING = (CHANGES, *(Rule(kind=kind) for kind in ("mean", "loss mean", "sum", "max", "min", "last")))


class NumberJudge:
    """Finds the rules that reproduce the numbers of one device.

    Args:
        numbers: By attribute, what one device has left there.
        tolerance: How far slices may be from it.
        unstable: What changes from run to run, as in :class:`JudgingRules`.
        read: Attributes that hooks read, whose rows come together; of others the first slice's are enough.

    Attributes:
        fitting: By attribute, all rules that reproduce its number; changed where a second step shows more.
        equal: Attributes that all slices have like one device, which tells no rule from another.
    """

    def __init__(
        self,
        numbers: Mapping[str, Any],
        tolerance: Tolerance,
        unstable: frozenset[str],
        read: frozenset[str] = frozenset(),
    ) -> None:
        self._numbers = numbers
        self._tolerance = tolerance
        self._unstable = unstable
        self._read = read
        self.fitting: dict[str, tuple[Rule, ...]] = {}
        self.equal: set[str] = set()

    def rules_of(self, path: str, before: Any, parts: list[Any], weights: Weights) -> tuple[Rule, ...]:
        """The rules that make of the numbers of all slices that of one device, the likeliest first.

        Args:
            path: Of the attribute.
            before: What was there before the step.
            parts: What the slices have left there.
            weights: Of the slices.
        """
        whole = self._numbers[path]
        are_alike = all(self._is_alike(whole, part) for part in parts)
        if are_alike:
            self.equal.add(path)
        # A number that differs from run to run would fit a rule by chance only.
        if {f"state:{path}", f"structure:{path}"} & self._unstable:
            return ()
        search = Search(weights=weights, tolerance=self._tolerance)
        fitting = self._reproducing(search, path, before, parts)
        if not self._is_alike(whole, parts[0]):
            return tuple(fitting)
        # The first slice's will do, unless it does by chance: others may have added nothing, or have less of it.
        if are_alike:
            fitting = [rule for rule in fitting if rule.kind in _OF_ADDING]
        # Without a rule it is the number of the first replica anyway.
        if not fitting:
            return ()
        fitting.append(Rule(kind="first"))
        return tuple(sorted(fitting, key=lambda rule: _BY_CHANCE.get(rule.kind, 0)))

    def _reproducing(self, search: Search, path: str, before: Any, parts: list[Any]) -> list[Rule]:
        whole = self._numbers[path]
        name = f"self.{path}"
        found = search.examine(whole, parts, name)
        kinds_here = {*_OF_NUMBERS, "join"} if path in self._read else {*_OF_NUMBERS}
        fitting: list[Rule] = []
        for one in found:
            fitting += [rule for rule in one.rules if rule.kind in kinds_here]
        changes = joined_changes(parts, before)
        # Of a memory of all samples each slice changes other elements, whether it sets them or adds to them.
        if changes is not None and not changes[1] and self._is_alike(whole, changes[0]):
            fitting.insert(0, CHANGES)
        # From infinity, where running extremes begin, all differences are alike.
        if before is not None and not bool(torch.isfinite(as_tensor(before)).all()):
            return fitting
        added = increments(parts, before)
        of_whole = increments([whole], before)
        if added is not None and of_whole is not None:
            found = search.examine(of_whole[0], added, name)
            kinds: set[str] = set()
            for one in found:
                kinds.update(rule.kind for rule in one.rules)
            # Whether it is added to or set, a second step tells; until then it counts as added.
            if "sum" in kinds:
                fitting.insert(0, Rule(kind="added"))
        return fitting

    def _is_alike(self, whole: Any, part: Any) -> bool:
        return all(error <= self._tolerance.relative for _, error in compare_trees(whole, part, self._tolerance))

    @property
    def settings(self) -> list[str]:
        """Attributes that a step may set to a number, and not only add to."""
        return [path for path, fitting in self.fitting.items() if not set(SETTING).isdisjoint(fitting)]

    @property
    def unsettled(self) -> list[str]:
        """Attributes of which one step does not show whether steps add to them, or set them."""
        return [path for path in self.settings if Rule(kind="added") in self.fitting[path]]
