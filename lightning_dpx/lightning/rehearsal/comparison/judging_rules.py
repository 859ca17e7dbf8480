"""Rules that are found while they merge: which ways of putting slices together give what one device has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation, host_copy
from lightning_dpx.replicas import ListPlace, MergeRules, Source, Weights
from lightning_dpx.replicas.buffer_sync import BufferRule
from lightning_dpx.replicas.merging import Finding, Rule, Search, as_tensor, compare_trees, mean_of_slices
from lightning_dpx.replicas.rebound_numbers import increments
from lightning_dpx.replicas.tolerance import Tolerance, difference

_OF_NUMBERS = ("mean", "loss mean", "sum", "max", "min", "quadratic mean", "geometric mean", "last")
_BY_CHANCE = frozenset({"first", "max", "min", "last", "quadratic mean", "geometric mean"})  # may fit few rows
SETTING = tuple(Rule(kind=kind) for kind in ("mean", "loss mean", "sum", "max", "min", "last"))
_RULES_OF_BUFFERS: tuple[BufferRule, ...] = ("mean", "sum", "max", "min", "first")


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
        super().__init__(loss_reduction=loss_reduction)
        self._whole = whole
        self._tolerance = tolerance
        self._decides = decides_loss
        self._unstable = unstable
        self.findings: dict[str, Finding] = {}
        self.kept_findings: dict[str, Finding] = {}  # of items of lists, and of numbers of attributes
        self.rebound: set[str] = set(whole.numbers)
        self.fitting_numbers: dict[str, tuple[Rule, ...]] = {}  # by attribute, all rules that reproduce its number
        self.equal_numbers: set[str] = set()  # that all slices have like one device, which tells no rule from another
        self.appended = {place: len(items) for place, items in whole.appended.items()}
        self.growing: set[ListPlace] = set(self.appended)
        self.left_apart: set[str] = set()  # attributes that lead to lists whose items do not come together
        # By the path that replicas ask with, item by item.
        self._appended_at: dict[str, Any] = {}
        for place, items in whole.appended.items():
            self._appended_at.update({f"{place}.{index}": item for index, item in enumerate(items)})
        self.logged_findings: dict[str, Finding] = {}
        self.fitting_buffers: dict[str, list[BufferRule]] = {}  # by name, all rules that reproduce a buffer
        self.batch_sizes: dict[str, str] = {}  # those that slices cannot give, in words
        self.draws_by_rows: set[Source] = set()  # where the number of draws depends on the rows
        self.losses: dict[str, float] = {}
        self.largest_loss: float = 0.0  # of a slice
        self.loss_fits: bool = True

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
        found = search.examine(self._appended_at[path], parts, path)
        self.kept_findings.update({one.path: one for one in found})
        # Raised and not only noted: the list is then left apart, each replica's items as they are.
        if not all(one.rules for one in found):
            raise GatherError("no way of putting them together gives what one device appends")
        self.outputs |= chosen(self.kept_findings)
        return super().merge_appended(path, parts, weights, device)

    def merge_rebound(self, path: str, before: Any, parts: list[Any], weights: Weights, device: torch.device) -> Any:
        """Decides, then merges."""
        whole = self._whole.numbers[path]
        fitting: tuple[Rule, ...] = ()
        # A number that differs from run to run would fit a rule by chance only.
        is_stable = not {f"state:{path}", f"structure:{path}"} & self._unstable
        if all(self._is_alike(whole, part) for part in parts):
            self.equal_numbers.add(path)
        if is_stable:
            fitting = self._rules_of_number(path, whole, before, parts, weights)
        self.settle(path, fitting)
        return super().merge_rebound(path, before, parts, weights, device)

    def _is_alike(self, whole: Any, part: Any) -> bool:
        return all(error <= self._tolerance.relative for _, error in compare_trees(whole, part, self._tolerance))

    def _rules_of_number(
        self, path: str, whole: Any, before: Any, parts: list[Any], weights: Weights
    ) -> tuple[Rule, ...]:
        name = f"self.{path}"
        search = Search(weights=weights, tolerance=self._tolerance)
        found = search.examine(whole, parts, name)
        fitting = [rule for one in found for rule in one.rules if rule.kind in _OF_NUMBERS]
        # From infinity, where running extremes begin, all differences are alike.
        is_finite = before is not None and bool(torch.isfinite(as_tensor(before)).all())
        added = increments(parts, before) if is_finite else None
        of_whole = increments([whole], before) if is_finite else None
        if added is not None and of_whole is not None:
            found = search.examine(of_whole[0], added, name)
            # Whether it is added to or set, a second step tells; until then it counts as added.
            if any(rule.kind == "sum" for one in found for rule in one.rules):
                fitting.insert(0, Rule(kind="added"))
        if not self._is_alike(whole, parts[0]):
            return tuple(fitting)
        # The first slice's will do, unless it does by chance: others may have added nothing, or have less of it.
        if all(self._is_alike(whole, part) for part in parts):
            fitting = [rule for rule in fitting if rule.kind in ("added", "sum")]
        # Without a rule it is the number of the first replica anyway.
        if not fitting:
            return ()
        fitting.append(Rule(kind="first"))
        return tuple(sorted(fitting, key=lambda rule: rule.kind in ("max", "min", "last")))  # what may be by chance

    def settle(self, path: str, fitting: Sequence[Rule]) -> None:
        """These rules fit the number of an attribute; with none of them it is the first replica's."""
        name = f"self.{path}"
        self.fitting_numbers[path] = tuple(fitting)
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

    @property
    def settings(self) -> list[str]:
        """Attributes that a step may set to a number, and not only add to."""
        return [path for path, fitting in self.fitting_numbers.items() if not set(SETTING).isdisjoint(fitting)]

    @property
    def unsettled(self) -> list[str]:
        """Attributes of which one step does not show whether steps add to them, or set them."""
        found: list[str] = []
        for path, fitting in self.fitting_numbers.items():
            if Rule(kind="added") in fitting and not set(SETTING).isdisjoint(fitting):
                found.append(path)
        return found

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
        whole = self._whole.state.get(name)
        # A buffer that one device does not have, or has as something else, is left
        # to the comparison of state.
        if not isinstance(whole, torch.Tensor):
            return "first"
        largest = value("max")
        smallest = value("min")
        if largest is not None and smallest is not None and torch.equal(largest, smallest):
            return "first"  # all slices have the same
        # Where they differ, the first one's is the whole batch's by chance: its rows may have the largest of all.
        fitting = [rule for rule in _RULES_OF_BUFFERS if self._reproduces(whole, value(rule))]
        self.fitting_buffers[name] = fitting
        chosen: BufferRule = fitting[0] if fitting else "first"
        if chosen != "first":
            self.buffers[name] = chosen
        return chosen

    def _reproduces(self, whole: torch.Tensor, candidate: torch.Tensor | None) -> bool:
        if candidate is None or candidate.shape != whole.shape:
            return False
        return difference(whole, host_copy(candidate), self._tolerance) <= self._tolerance.relative

    def reduction(self, losses: Sequence[torch.Tensor], weights: Weights) -> str:
        """Mean or sum, whichever is the whole batch's loss."""
        values = [loss.detach().cpu().double().reshape(()) for loss in losses]
        mean = mean_of_slices(values, weights.of_loss, weights)
        self.losses = {"mean": float(mean), "sum": float(sum(values))}
        whole = self._whole.loss
        if whole is None:
            return self.loss_reduction
        target = whole.double().reshape(())
        self.largest_loss = max(map(float, map(torch.abs, values)))
        # In relation to the largest loss of a slice: losses that cancel out
        # leave roundings of their size.
        fits = {
            name: difference(target, torch.tensor(value, dtype=torch.float64), self._tolerance, terms=self.largest_loss)
            <= self._tolerance.relative
            for name, value in self.losses.items()
        }
        # What it began with is kept where both fit, as of a loss of zero.
        if self._decides and not fits[self.loss_reduction]:
            other = next((name for name, fitting in fits.items() if fitting), None)
            self.loss_reduction = other or self._nearest(float(target))
        self.loss_fits = fits[self.loss_reduction]
        return self.loss_reduction

    def _nearest(self, target: float) -> str:
        """A loss that depends on random draws is near one of both; any other is taken for a mean, as announced."""
        if "loss" not in self._unstable:
            return "mean"
        return min(self.losses, key=lambda name: abs(self.losses[name] - target))


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
