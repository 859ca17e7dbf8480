"""Rules that are found while they merge: which ways of putting slices together give what one device has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.rehearsal.comparison.buffer_judge import BufferJudge
from lightning_dpx.lightning.rehearsal.comparison.loss_judge import LossJudge
from lightning_dpx.lightning.rehearsal.comparison.number_judge import NumberJudge
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation
from lightning_dpx.replicas import ListPlace, MergeRules, Source, Weights
from lightning_dpx.replicas.buffer_sync import BufferRule
from lightning_dpx.replicas.merging.rule_search import Finding, Search
from lightning_dpx.replicas.merging.rules import Rule
from lightning_dpx.replicas.merging.tolerance import Tolerance

_BY_CHANCE = frozenset({"first", "max", "min", "last", "quadratic mean", "geometric mean"})  # may fit few rows


class JudgingRules(MergeRules):
    """Finds the rules while it merges, by what one device made of the same rows.

    Args:
        whole: What one device did.
        tolerance: How far slices may be from it.
        decides_loss: Whether the loss may be a mean or a sum.
        loss_reduction: What it is to begin with.
        unstable: Paths of outputs and names of logged values that change from run to run.
    """

    def __init__(
        self,
        whole: Observation,
        tolerance: Tolerance,
        *,
        decides_loss: bool,
        loss_reduction: str,
        unstable: frozenset[str] = frozenset(),
    ) -> None:
        appended = {place: len(items) for place, items in whole.appended.items()}
        super().__init__(
            loss_reduction=loss_reduction,
            appended=appended,
            growing=set(appended),
            rebound=set(whole.numbers),
        )
        self._whole = whole
        self._tolerance = tolerance
        self._unstable = unstable
        self.numbers: NumberJudge = NumberJudge(whole.numbers, tolerance, unstable)
        self.of_buffers: BufferJudge = BufferJudge(whole.state, tolerance)
        self.loss: LossJudge = LossJudge(whole.loss, tolerance, decides=decides_loss, is_unstable="loss" in unstable)
        self.findings: dict[str, Finding] = {}
        self.logged_findings: dict[str, Finding] = {}
        self.kept_findings: dict[str, Finding] = {}  # of items of lists, and of numbers of attributes
        self.left_apart: set[str] = set()  # attributes that lead to lists whose items do not come together
        self.batch_sizes: dict[str, str] = {}  # those that slices cannot give, in words
        self.draws_by_rows: set[Source] = set()  # where the number of draws depends on the rows

    def merge_outputs(self, parts: Sequence[Any], weights: Weights, device: torch.device, dim: int = 0) -> Any:
        """Decides, then merges."""
        whole = self._whole.output
        if (
            # The step merges losses by itself, and asks for the rest of what slices return.
            isinstance(whole, Mapping)
            and "loss" in whole
            and not (isinstance(parts[0], Mapping) and "loss" in parts[0])
        ):
            whole = {key: value for key, value in whole.items() if key != "loss"}
        search = Search(weights=weights, tolerance=self._tolerance, dim=dim, unstable=self._unstable)
        for found in search.examine(whole, parts, "result"):
            self.findings[found.path] = found
        self.outputs = chosen(self.findings)
        return super().merge_outputs(parts, weights, device, dim)

    def merge_appended(self, path: str, parts: list[Any], weights: Weights, device: torch.device) -> Any:
        """Decides, then merges."""
        search = Search(weights=weights, tolerance=self._tolerance, unstable=self._unstable)
        found = search.examine(self._appended_by_one_device(path), parts, path)
        self.kept_findings.update({one.path: one for one in found})
        # Raised and not only noted: the list is then left apart, each replica's items as they are.
        if not all(one.rules for one in found):
            raise GatherError("no way of putting them together gives what one device appends")
        self.outputs |= chosen(self.kept_findings)
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
        self.kept_findings.pop(name, None)
        self.outputs.pop(name, None)
        if fitting:
            by_chance = not _BY_CHANCE.isdisjoint(rule.kind for rule in fitting)
            # Rules that never fit by chance agree on other rows as well, however many they are.
            is_sure = len(fitting) == 1 or not by_chance
            self.kept_findings[name] = Finding(path=name, rules=tuple(fitting), is_sure=is_sure)
            self.outputs[name] = fitting[0]
        else:
            self.rebound.discard(path)

    def numbers_among(self, findings: Mapping[str, Finding]) -> list[str]:
        """The attributes with numbers that there are findings of."""
        return [path for path in self._whole.numbers if f"self.{path}" in findings]

    def _leave_apart(self, place: ListPlace, problem: str) -> None:
        """What the items differ by is told by the comparison; their number, by that of the attributes."""
        del problem, self.appended[place]
        if any(not one.rules for one in found_at(place, self.kept_findings)):
            self.left_apart.add(place.attribute)

    def merge_logged(
        self, path: str, values: Sequence[Any], weights: Weights, device: torch.device, reduce_fx: str = "mean"
    ) -> Any:
        """Decides, then merges."""
        known = self._whole.logged.get(path)
        if known is not None:
            search = Search(weights=weights, tolerance=self._tolerance, unstable=self._unstable, prefer=reduce_fx)
            for found in search.examine(known.value, values, path):
                self.logged_findings[found.path] = found
            self.logged = chosen(self.logged_findings)
        return super().merge_logged(path, values, weights, device, reduce_fx)

    def decides(self, path: str) -> bool:
        """Of all values that one device had, too."""
        return path in self._whole.logged

    def merge_batch_sizes(self, path: str, sizes: Sequence[float]) -> float:
        """Decides, then merges."""
        known = self._whole.logged.get(path)
        if known is not None and known.batch_size is not None and known.batch_size != sum(sizes):
            # A constant that the user names is no count of rows, and must not be added up.
            if all(size == known.batch_size for size in sizes):
                self.same_batch_sizes.add(path)
            else:
                parts = " and ".join(f"{size:g}" for size in sizes)
                self.batch_sizes[path] = f"batch_size={known.batch_size:g} on one device, {parts} from slices"
        return super().merge_batch_sizes(path, sizes)

    @property
    def decides_buffers(self) -> bool:
        """Always: any buffer may turn out to need a rule."""
        return True

    def buffer_rule(self, name: str, value: Callable[[BufferRule], torch.Tensor | None]) -> BufferRule:
        """The first replica's, unless another rule makes of it what one device did."""
        rule = self.of_buffers.rule(name, value)
        if rule != "first":
            self.buffers[name] = rule
        return rule

    def reduction(self, losses: Sequence[torch.Tensor], weights: Weights) -> str:
        """Mean or sum, whichever is the whole batch's loss."""
        self.loss_reduction = self.loss.reduction(losses, weights, self.loss_reduction)
        return self.loss_reduction


def is_kept(path: str) -> bool:
    """Whether it is that of what a step keeps, and not of what it returns."""
    return path.startswith("self.")


def found_at(place: ListPlace, findings: Mapping[str, Finding]) -> list[Finding]:
    """Of those, what was found of the items of a list."""
    return [found for path, found in findings.items() if path.startswith(f"{place}.")]


def chosen(findings: Mapping[str, Finding]) -> dict[str, Rule]:
    """The preferred rule of every value that has one."""
    return {path: found.rules[0] for path, found in findings.items() if found.rules}


def undecided(findings: Mapping[str, Finding]) -> frozenset[str]:
    """Paths of values that have only been zero."""
    return frozenset(path for path, found in findings.items() if found.rules and found.rules[0].kind == "by type")


def refined(first: Mapping[str, Finding], second: Mapping[str, Finding]) -> dict[str, Finding]:
    """What two rehearsals on different rows have found together: the rules that fit both times."""
    result = dict(first)
    for path, found in second.items():
        earlier = first.get(path)
        # A rule that failed once has failed; zeros say nothing, so what is
        # seen later takes their place.
        if earlier is None or not found.rules or not earlier.rules or earlier.rules[0].kind == "by type":
            result[path] = found if earlier is None or earlier.rules else earlier
            continue
        if found.rules[0].kind == "by type":
            continue
        # In the order of the earlier ones, which have merged results already.
        both = tuple(rule for rule in earlier.rules if rule in found.rules)
        text = "" if both else "no way of putting slices together gives it on all rows that were tried"
        is_sure = len(both) == 1 or earlier.is_sure or found.is_sure
        result[path] = Finding(path=path, rules=both, is_sure=is_sure, error=found.error, text=text)
    return result
