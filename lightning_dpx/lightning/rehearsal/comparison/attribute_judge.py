"""Rules for what steps leave in lists and attributes, found while it is put together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.rehearsal.comparison.findings import chosen, found_at
from lightning_dpx.lightning.rehearsal.comparison.number_judge import NumberJudge
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation
from lightning_dpx.replicas import AttributeRules, ListPlace, Weights
from lightning_dpx.replicas.merging.rule_search import Finding, Search
from lightning_dpx.replicas.merging.rules import Rule
from lightning_dpx.replicas.merging.tolerance import Tolerance

_BY_CHANCE = frozenset({"first", "max", "min", "last", "quadratic mean", "geometric mean"})  # may fit few rows


class AttributeJudge(AttributeRules):
    """Finds out how lists and numbers come together, by what one device made of them.

    Args:
        whole: What one device did.
        tolerance: How far slices may be from it.
        unstable: Paths of values that change from run to run.

    Attributes:
        numbers: Finds the rules of numbers.
        findings: Of items of lists, and of numbers.
        left_apart: Attributes that lead to lists whose items do not come together.
    """

    def __init__(self, whole: Observation, tolerance: Tolerance, unstable: frozenset[str]) -> None:
        appended = {place: len(items) for place, items in whole.appended.items()}
        super().__init__(
            appended=appended, growing=set(appended), rebound=set(whole.numbers), read=whole.hook_reads.joined
        )
        self._whole = whole
        self._tolerance = tolerance
        self._unstable = unstable
        self.numbers: NumberJudge = NumberJudge(whole.numbers, tolerance, unstable, whole.hook_reads.joined)
        self.findings: dict[str, Finding] = {}
        self.left_apart: set[str] = set()

    def merge_appended(self, path: str, parts: list[Any], weights: Weights, device: torch.device) -> Any:
        """Decides, then merges."""
        search = Search(weights=weights, tolerance=self._tolerance, unstable=self._unstable)
        found = search.examine(self._appended_by_one_device(path), parts, path)
        self.findings.update({one.path: one for one in found})
        # Raised and not only noted: the list is then left apart, each replica's items as they are.
        if not all(one.rules for one in found):
            raise GatherError("no way of putting them together gives what one device appends")
        self.rules |= chosen(self.findings)
        return super().merge_appended(path, parts, weights, device)

    def _appended_by_one_device(self, path: str) -> Any:
        """What one device has appended where replicas ask with this path, item by item."""
        for place, items in self._whole.appended.items():
            for index, item in enumerate(items):
                if path == f"{place}.{index}":
                    return item
        raise KeyError(path)

    def merge_rebound(self, path: str, before: Any, parts: list[Any], weights: Weights, device: torch.device) -> Any:
        """Decides, then merges."""
        self.settle(path, self.numbers.rules_of(path, before, parts, weights))
        return super().merge_rebound(path, before, parts, weights, device)

    def settle(self, path: str, fitting: Sequence[Rule]) -> None:
        """These rules fit the number of an attribute; with none of them it is the first replica's."""
        name = f"self.{path}"
        self.numbers.fitting[path] = tuple(fitting)
        self.findings.pop(name, None)
        self.rules.pop(name, None)
        if fitting:
            by_chance = not _BY_CHANCE.isdisjoint(rule.kind for rule in fitting)
            # Rules that never fit by chance agree on other rows as well, however many they are.
            is_sure = len(fitting) == 1 or not by_chance
            self.findings[name] = Finding(path=name, rules=tuple(fitting), is_sure=is_sure)
            self.rules[name] = fitting[0]
        else:
            self.rebound.discard(path)

    def numbers_among(self, findings: Mapping[str, Finding]) -> list[str]:
        """The attributes with numbers that there are findings of."""
        return [path for path in self._whole.numbers if f"self.{path}" in findings]

    def _leave_apart(self, place: ListPlace, problem: str) -> None:
        """What the items differ by is told by the comparison; their number, by that of the attributes."""
        del problem, self.appended[place]
        if any(not one.rules for one in found_at(place, self.findings)):
            self.left_apart.add(place.attribute)
