"""What a step did as one device and what it did in slices, compared; and the line that says so."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.metrics.metrics import CallLog
from lightning_dpx.python_objects.origin import package_of, runs_steps
from lightning_dpx.replicas import ListPlace, MergeRules, Weights
from lightning_dpx.replicas.merging import Finding, Rule, Search, compare_trees, describe, mean_of_slices
from lightning_dpx.replicas.rebound_numbers import increments
from lightning_dpx.replicas.state import BufferRule
from lightning_dpx.replicas.tolerance import Tolerance, difference

_NAMED = 3  # that many names of each kind are told; the rest is counted
OUTSIDE = "@"  # begins the path of what is no attribute of the module
_JOINED = ("join", "items", "union", "children", "equal")  # what an item of a growing list may be put together by


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A value as a step logged it, with the batch size that the step named."""

    value: Any
    reduce_fx: str
    batch_size: int | None = None


@dataclass(slots=True, kw_only=True)
class Observation:
    """All that can be seen of one run of a step.

    Attributes:
        loss: After merging, and after the user's hook over the whole batch; on the host.
        output: What the step itself returned.
        gradients: Of the owners, by parameter; on the host. In manual optimization, of every optimizer step.
        weights: After a step of manual optimization, by parameter; on the host.
        logged: By name.
        state: Python state and buffers, by path.
        drew: Whether random numbers were made equal for all rows.
        draws: How many such numbers a row got, draw by draw, in every call of a replica's step.
        left_alone: What else drew random numbers.
        metric_calls: What metrics were given, by one device.
        appended: What lists got, by one device.
        numbers: Of attributes, after the step of one device.
        changed_numbers: Which of them it has changed.
    """

    loss: torch.Tensor | None = None
    output: Any = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    logged: dict[str, Logged] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    drew: bool = False
    draws: list[tuple[int, ...]] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    metric_calls: CallLog | None = None
    appended: dict[ListPlace, list[Any]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    changed_numbers: set[str] = field(default_factory=set)


_OF_NUMBERS = ("mean", "loss mean", "sum", "max", "min", "quadratic mean", "geometric mean", "last")
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
        self.rebound = set(whole.numbers)
        self.fitting_numbers: dict[str, tuple[Rule, ...]] = {}  # by attribute, all rules that reproduce its number
        self.appended = {place: len(items) for place, items in whole.appended.items()}
        self.left_apart: set[str] = set()  # attributes that lead to lists whose items do not come together
        self._appended_at: dict[str, Any] = {}
        for place, items in whole.appended.items():
            self._appended_at.update({f"{place}.{index}": item for index, item in enumerate(items)})
        self.logged_findings: dict[str, Finding] = {}
        self.fitting_buffers: dict[str, list[BufferRule]] = {}  # by name, all rules that reproduce a buffer
        self.batch_sizes: dict[str, str] = {}  # those that slices cannot give, in words
        self.losses: dict[str, float] = {}
        self.loss_fits = True

    def merge_outputs(self, parts: Sequence[Any], weights: Weights, device: torch.device, dim: int = 0) -> Any:
        """Decides, then merges."""
        whole = self._whole.output
        if (
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
        if not all(one.rules for one in found):
            raise GatherError("no way of putting them together gives what one device appends")
        self.outputs |= chosen(self.kept_findings)
        return super().merge_appended(path, parts, weights, device)

    def merge_rebound(self, path: str, before: Any, parts: list[Any], weights: Weights, device: torch.device) -> Any:
        """Decides, then merges."""
        whole = self._whole.numbers[path]
        fitting: tuple[Rule, ...] = ()
        is_stable = not {f"state:{path}", f"structure:{path}"} & self._unstable
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
        added = increments(parts, before)
        of_whole = increments([whole], before)
        if added is not None and of_whole is not None:
            found = search.examine(of_whole[0], added, name)
            if any(rule.kind == "sum" for one in found for rule in one.rules):
                fitting.insert(0, Rule(kind="added"))
        if not self._is_alike(whole, parts[0]):
            return tuple(fitting)
        # The first slice's will do, unless it does by chance: others may have added nothing, or have less of it.
        if all(self._is_alike(whole, part) for part in parts):
            fitting = [rule for rule in fitting if rule.kind in ("added", "sum")]
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
            by_chance = fitting[0].kind not in ("added", "sum", "mean", "loss mean") or Rule(kind="first") in fitting
            is_sure = len(fitting) == 1 or not by_chance
            self.kept_findings[name] = Finding(path=name, rules=tuple(fitting), is_sure=is_sure)
            self.outputs[name] = fitting[0]
        else:
            self.rebound.discard(path)

    def numbers_among(self, findings: Mapping[str, Finding]) -> list[str]:
        """The attributes with numbers that there are findings of."""
        return [path for path in self._whole.numbers if f"self.{path}" in findings]

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
        return difference(whole, _host_copy(candidate), self._tolerance) <= self._tolerance.relative

    def reduction(self, losses: Sequence[torch.Tensor], weights: Weights) -> str:
        """Mean or sum, whichever is the whole batch's loss."""
        values = [loss.detach().cpu().double().reshape(()) for loss in losses]
        mean = mean_of_slices(values, weights.of_loss, weights)
        self.losses = {"mean": float(mean), "sum": float(sum(values))}
        whole = self._whole.loss
        if whole is None:
            return self.loss_reduction
        target = whole.double().reshape(())
        fits = {
            name: difference(target, torch.tensor(value, dtype=torch.float64), self._tolerance)
            <= self._tolerance.relative
            for name, value in self.losses.items()
        }
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
        if earlier is None or not found.rules or not earlier.rules or earlier.rules[0].kind == "by type":
            result[path] = found if earlier is None or earlier.rules else earlier
            continue
        if found.rules[0].kind == "by type":
            continue
        both = tuple(rule for rule in earlier.rules if rule in found.rules)
        text = "" if both else "no way of putting slices together gives it on all rows that were tried"
        is_sure = len(both) == 1 or earlier.is_sure or found.is_sure
        result[path] = Finding(path=path, rules=both, is_sure=is_sure, error=found.error, text=text)
    return result


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What was compared, and what of it differs.

    Attributes:
        rows: Of the rehearsal.
        sizes: Of its slices.
        stage: The step's name.
        counts: How many values of each kind are as on one device, in the order of the line.
        differences: What is not, in words, each with its kind.
        largest: The largest relative difference among what is.
        skipped: What could not be compared, in words.
        notes: What else the user should know.
        kept: Attributes that hold something of one slice after the step.
        apart: Paths of all that slices did not make as one device did; see :class:`Comparer` for their form.
        changed: Attributes that the step changes.
    """

    rows: int
    sizes: tuple[int, ...]
    stage: str
    counts: dict[str, int] = field(default_factory=dict)
    differences: list[tuple[str, str]] = field(default_factory=list)
    largest: float = 0.0
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    apart: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)

    def blame_kept(self, what: str) -> None:
        """Adds what a second step in slices does differently because of what the first one kept."""
        named = _more(", ".join(self.kept[:_NAMED]), self.kept)
        text = f"a second step uses what the first one kept in {named}, which is of one slice: {what}"
        self.differences.append(("kept", text))

    def blame_unsettled(self, path: str) -> None:
        """Adds an attribute of which it is not known whether steps add to it, or set it."""
        text = f"self.{path} is the first slice's only, as steps may add to it or set it"
        self.differences.append(("state", text))

    def blame_sums(self, names: Sequence[str]) -> None:
        """Adds attributes that steps add to, and so have the first slice's part of every step."""
        named = _more(", ".join(names[:_NAMED]), names)
        self.differences.append(("state", f"what steps add up in {named} is the first slice's part only"))
        self.kept = [name for name in self.kept if name not in names]

    @property
    def _all_notes(self) -> list[str]:
        if not self.kept or "kept" in dict(self.differences):
            return self.notes
        named = _more(", ".join(self.kept[:_NAMED]), self.kept)
        return [*self.notes, f"What the step keeps in {named} is of one slice, not of the whole batch"]

    def line(self) -> str:
        """What is as on one device."""
        described = []
        for kind, count in self.counts.items():
            if kind == "loss" and count:
                described.append(kind)
            elif count:
                plural = "s" if count > 1 else ""
                described.append(f"{count} {kind}{plural}")
        skipped = f"; not compared: {', '.join(self.skipped)}" if self.skipped else ""
        notes = "".join(f". {note}" for note in self._all_notes)
        if not described:
            nothing = f"{self.stage} returns, logs and changes nothing" if not self.skipped else self.stage
            return f"dpx: checked on {self.rows} rows: {nothing}{skipped}{notes}."
        return (
            f"dpx: checked on {self.rows} rows: {', '.join(described)} as on one device (largest difference "
            f"{short(self.largest)}; {self.stage}){skipped}{notes}."
        )

    def summary(self) -> str:
        """What differs."""
        return "; ".join(text for _, text in self.differences)

    def complaint(self) -> str:
        """What differs, and the ways out."""
        cut = ", ".join(map(str, self.sizes[:-1])) + f" and {self.sizes[-1]}"
        notes = "".join(f" {note}." for note in self._all_notes)
        kinds = dict.fromkeys(kind for kind, _ in self.differences)
        if "loss" in kinds:  # from which the gradients follow
            kinds.pop("gradient", None)
        ways = "; ".join(_WAYS_OUT[kind].replace("{step}", self.stage) for kind in kinds)
        return (
            f"dpx: {self.stage} on {self.rows} rows in slices of {cut} is not what it is on one device: "
            f"{self.summary()}.{notes} Ways out: {ways}. verify='first' runs such a stage on the first replica, as one "
            "device would; verify='off' does not look."
        )


_WAYS_OUT = {
    "loss": (
        "compute the loss of the whole batch in training_step_end(outputs), or from self.all_gather(..., "
        "sync_grads=True) in the step; where the loss is a mean over something else than rows (tokens, valid pixels), "
        "say how much a slice weighs in a method loss_weight(batch)"
    ),
    "gradient": (
        "gradients that are edited before they are summed (a hook on a parameter, .grad in the step) are those of a "
        "slice; edit them in on_before_optimizer_step. A loss may be the whole batch's by chance and have other "
        "gradients (normalized by the batch, say): compute it in training_step_end(outputs)"
    ),
    "new weight": "what a step writes between its optimizer steps, write in on_train_batch_end",
    "logged value": (
        "log what belongs to the whole batch in a hook that sees all of it ({step}_end(outputs), on_..._batch_end), "
        "from self.all_gather(...) in the step, or by a torchmetrics metric"
    ),
    "output": "return what belongs to the rows, and compute the rest in {step}_end(outputs)",
    "kept value": (
        "append what belongs to the rows, and compute the rest at the epoch's end; or append in on_train_batch_end and "
        "its like, which see the whole batch"
    ),
    "kept": (
        "what a step keeps for the next one is that of the first slice; compute it from self.all_gather(...) in the "
        "step, or in on_train_batch_end and its like, which see the whole batch"
    ),
    "state": (
        "what a step counts or keeps is that of a slice; count and keep in on_train_batch_end and its like, which see "
        "the whole batch"
    ),
}


def short(value: float) -> str:
    """2e-7 and not 2e-07."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


class Comparer:
    """Compares what slices did with what one device did.

    Args:
        tolerance: How far they may be apart.
        unstable: What changes from run to run and may be apart: "loss"; a path of an output, or of a logged value;
            "gradient", "new weight" or "state" with a path after a colon; with "structure", not in numbers only.
    """

    def __init__(self, tolerance: Tolerance, unstable: frozenset[str] = frozenset()) -> None:
        self._tolerance = tolerance
        self._unstable = unstable

    def compare(
        self, before: Mapping[str, Any], whole: Observation, sliced: Observation, judge: JudgingRules, out: Comparison
    ) -> None:
        """Fills in ``out``."""
        self._losses(whole, sliced, judge, out)
        self._tensors("gradient", whole.gradients, sliced.gradients, out)
        self._weights(whole, sliced, out)
        self.values("logged value", judge.logged_findings, out)
        for name, text in judge.batch_sizes.items():
            out.differences.append(("logged value", f"logged value '{name}': {text}"))
        missing = [repr(name) for name in whole.logged if name not in sliced.logged]
        missing += [repr(name) for name in sliced.logged if name not in whole.logged]
        if missing:
            text = f"{', '.join(missing)} is logged by one device or by slices, but not by both"
            out.differences.append(("logged value", text))
        self.values("output", judge.findings, out)
        self.values("kept value", judge.kept_findings, out)
        self._state(before, whole, sliced, judge.left_apart, out)

    def _losses(self, whole: Observation, sliced: Observation, judge: JudgingRules, out: Comparison) -> None:
        if whole.loss is None and sliced.loss is None:
            return
        if whole.loss is None or sliced.loss is None:
            out.apart.add("loss")
            if "loss" in self._unstable:
                out.skipped.append("loss (it depends on random draws)")
                return
            out.differences.append(("loss", "the loss is None on one device or in slices, but not on both"))
            return
        error = difference(whole.loss.double().reshape(()), sliced.loss.double().reshape(()), self._tolerance)
        if error <= self._tolerance.relative:
            out.counts["loss"] = 1
            out.largest = max(out.largest, error)
            return
        out.apart.add("loss")
        if "loss" in self._unstable:
            out.skipped.append("loss (it depends on random draws)")
            return
        numbers = [f"{value:.6g} as the {name}" for name, value in judge.losses.items()]
        of_slices = " and ".join(numbers) or f"{float(sliced.loss):.6g}"
        text = f"the loss is {float(whole.loss):.6g} on one device, {of_slices} of the slices'"
        out.differences.append(("loss", text))

    def _tensors(
        self, kind: str, whole: Mapping[str, torch.Tensor], sliced: Mapping[str, torch.Tensor], out: Comparison
    ) -> None:
        errors = self._errors(kind, whole, sliced)
        wrong = {name: error for name, error in errors.items() if error > self._tolerance.relative}
        out.counts[kind] = len(errors) - len(wrong)
        out.largest = max([out.largest, *(error for name, error in errors.items() if name not in wrong)])
        out.apart.update(f"{kind}:{name}" for name in wrong)
        skipped = [name for name in wrong if f"{kind}:{name}" in self._unstable]
        if skipped:
            out.skipped.append(f"{len(skipped)} {kind}s (they depend on random draws)")
        for name in skipped:
            del wrong[name]
        if wrong:
            worst = sorted(wrong, key=lambda name: -wrong[name])
            named = ", ".join(f"{name} by {short(wrong[name])}" for name in worst[:_NAMED])
            text = f"{len(wrong)} of {len(errors)} {kind}s differ, relatively: {_more(named, worst)}"
            out.differences.append((kind, text))

    def _errors(
        self, kind: str, whole: Mapping[str, torch.Tensor], sliced: Mapping[str, torch.Tensor]
    ) -> dict[str, float]:
        both = [*whole.values(), *sliced.values()]
        scale = max((_largest(value) for value in both), default=0.0)
        errors = {}
        for name in dict.fromkeys([*whole, *sliced]):
            # What one of both lacks, such as the gradient of a parameter that was not used, counts as zeros.
            mine = whole[name] if name in whole else torch.zeros_like(sliced[name])
            theirs = sliced[name] if name in sliced else torch.zeros_like(whole[name])
            errors[name] = difference(mine, theirs, self._tolerance, scale)
        return errors

    def _weights(self, whole: Observation, sliced: Observation, out: Comparison) -> None:
        """New weights may differ where a normalizing optimizer blew up the rounding of a gradient that is zero."""
        if not whole.weights:
            return
        gradients = self._errors("gradient", whole.gradients, sliced.gradients)
        rounding = {name for name in whole.weights if _explained(name, gradients, self._tolerance)}
        mine = {name: value for name, value in whole.weights.items() if name not in rounding}
        theirs = {name: value for name, value in sliced.weights.items() if name not in rounding}
        self._tensors("new weight", mine, theirs, out)
        out.counts["new weight"] += len(rounding)

    def values(self, kind: str, findings: Mapping[str, Finding], out: Comparison) -> None:
        """Of what is logged or returned, by what was found."""
        leaves = [found for found in findings.values() if not found.rules or found.rules[0].kind != "children"]
        wrong = [found for found in leaves if not found.rules]
        unseen = [found for found in leaves if found.path in self._unstable]
        good = [found for found in leaves if found.rules and found.path not in self._unstable]
        out.counts[kind] = len(good)
        out.apart.update(found.path for found in (*wrong, *unseen))
        out.largest = max([out.largest, *(found.error for found in good)])
        if unseen:
            named = ", ".join(_name_of(found.path) for found in unseen[:_NAMED])
            out.skipped.append(f"{kind} {named} (random draws)")
        for found in good:
            if found.rules[0].kind in ("quadratic mean", "geometric mean", "first", "last"):
                out.notes.append(
                    f"{kind} {_name_of(found.path)} is put together as the {found.rules[0].kind} of slices"
                )
        for found in wrong[:_NAMED]:
            out.differences.append((kind, f"{kind} {_name_of(found.path)}: {found.text}"))
        if len(wrong) > _NAMED:
            out.differences.append((kind, f"{len(wrong) - _NAMED} more {kind}s"))

    def _state(
        self,
        before: Mapping[str, Any],
        whole: Observation,
        sliced: Observation,
        told: Collection[str],
        out: Comparison,
    ) -> None:
        """Values that a step rebinds are the first slice's by design, and only told; counts and lists are not."""
        wrong: list[str] = []
        rebound: list[str] = []
        good = 0
        relations = _Relations(self._tolerance)
        for path in dict.fromkeys([*whole.state, *sliced.state]):
            start, mine, theirs = (one.get(path) for one in (before, whole.state, sliced.state))
            if not relations.same(start, mine) or not relations.same(start, theirs):
                out.changed.add(path)
            if relations.same(mine, theirs) or _grew_alike(start, mine, theirs, self._tolerance):
                good += not relations.same(start, mine)
                continue
            out.apart.add(f"state:{path}")
            if path in told:
                continue
            of_a_slice = relations.of_a_slice(mine, theirs)
            if f"{'state' if of_a_slice else 'structure'}:{path}" in self._unstable:
                continue
            if of_a_slice:
                rebound.append(_shown(path))
            else:
                wrong.append(_words_of(_shown(path), start, mine, theirs, self._tolerance))
        out.counts["changed attribute"] = good
        out.kept = rebound
        out.differences += [("state", text) for text in wrong[:_NAMED]]
        if len(wrong) > _NAMED:
            out.differences.append(("state", f"{len(wrong) - _NAMED} more attributes"))


class _Relations:
    """How values of one device and of slices are related; a pair of containers that many others hold is asked once.

    Args:
        tolerance: How far numbers may be apart.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._known: dict[tuple[int, int], _Relation] = {}  # by ids of what the observations hold

    def same(self, one: Any, two: Any) -> bool:
        """Whether all that both hold is within the tolerance."""
        return self._of(one, two) is _Relation.SAME

    def of_a_slice(self, one: Any, two: Any) -> bool:
        """Whether both have one structure, and differ in tensors and floating-point numbers only."""
        return self._of(one, two) is not _Relation.OTHER

    def _of(self, one: Any, two: Any) -> "_Relation":
        if type(one) is not type(two) or not isinstance(one, list | dict):
            return self._of_leaves(one, two)
        key = id(one), id(two)
        if key not in self._known:
            pairs = _pairs(one, two)
            found = _Relation.SAME if len(pairs) == len(one) == len(two) else _Relation.OTHER
            for _, mine, theirs in pairs:
                found = max(found, self._of(mine, theirs))
            self._known[key] = found
        return self._known[key]

    def _of_leaves(self, one: Any, two: Any) -> "_Relation":
        if all(error <= self._tolerance.relative for _, error in compare_trees(one, two, self._tolerance)):
            return _Relation.SAME
        is_float = isinstance(one, torch.Tensor | float) or hasattr(type(one), "dtype")
        return _Relation.OF_A_SLICE if is_float and type(one) is type(two) else _Relation.OTHER


class _Relation(IntEnum):
    SAME = 0
    OF_A_SLICE = 1
    OTHER = 2


def drew_alike(whole: Observation, sliced: Observation) -> bool:
    """Whether all rows got the same random numbers in slices as on one device, so that draws explain no difference."""
    return not whole.left_alone and not sliced.left_alone and len({*whole.draws, *sliced.draws}) == 1


def unstable_between(one: Observation, two: Observation, tolerance: Tolerance) -> frozenset[str]:
    """What two runs of one device on the same rows do not agree on."""
    found: set[str] = set()
    both = one.loss is not None and two.loss is not None
    if both and difference(one.loss, two.loss, tolerance) > tolerance.relative:  # type: ignore[arg-type]
        found.add("loss")
    for kind, mine, theirs in (
        ("gradient", one.gradients, two.gradients),
        ("new weight", one.weights, two.weights),
    ):
        for name, value in mine.items():
            if name not in theirs or difference(value, theirs[name], tolerance) > tolerance.relative:
                found.add(f"{kind}:{name}")
    for name, logged in one.logged.items():
        other = two.logged.get(name)
        values = (logged.value, None if other is None else other.value)
        found.update(path for path, error in compare_trees(*values, tolerance, name) if error > tolerance.relative)
    found.update(
        path for path, error in compare_trees(one.output, two.output, tolerance, "result") if error > tolerance.relative
    )
    for place, items in one.appended.items():
        both_lists = (list(items), two.appended.get(place))
        errors = compare_trees(*both_lists, tolerance, str(place))
        found.update(path for path, error in errors if error > tolerance.relative)
    relations = _Relations(tolerance)
    for path, value in one.state.items():
        if path not in two.state or not relations.same(value, two.state[path]):
            found.add(f"state:{path}")
            if not relations.of_a_slice(value, two.state.get(path)):
                found.add(f"structure:{path}")
    return frozenset(found)


def changed_again(one: Observation, two: Observation, unstable: frozenset[str], tolerance: Tolerance) -> list[str]:
    """Attributes that are others after two steps than after one, but for those that no two runs agree on."""
    found = list[str]()
    relations = _Relations(tolerance)
    for path, value in two.state.items():
        if f"state:{path}" not in unstable and not relations.same(one.state.get(path), value):
            found.append(_shown(path))
    return found


def _explained(name: str, gradients: Mapping[str, float], tolerance: Tolerance) -> bool:
    """Whether all gradients that an optimizer was given for this parameter agree."""
    own = [error for key, error in gradients.items() if key.partition("@")[0] == name]
    return bool(own) and all(error <= tolerance.relative for error in own)


def _largest(value: torch.Tensor) -> float:
    finite = value[value.isfinite()] if value.is_floating_point() else value
    return float(finite.abs().max()) if finite.numel() else 0.0


def _more(named: str, all_of_them: Sequence[str]) -> str:
    left = len(all_of_them) - _NAMED
    return f"{named} and {left} more" if left > 0 else named


def _name_of(path: str) -> str:
    name = path.removeprefix("result.") if path != "result" else "what it returns"
    return f"'{name}'" if path != "result" else name


def _words_of(path: str, start: Any, whole: Any, sliced: Any, tolerance: Tolerance) -> str:
    """What differs, down to the first item of a container that does."""
    relations = _Relations(tolerance)
    for key, mine, theirs in _pairs(whole, sliced):
        if not relations.of_a_slice(mine, theirs):
            earlier = dict(_items(start)).get(key)
            return _words_of(f"{path}.{key}", earlier, mine, theirs, tolerance)
    return f"{path} is {_changed(start, whole)} on one device, {_changed(start, sliced)} in slices"


def _pairs(one: Any, two: Any) -> list[tuple[Any, Any, Any]]:
    """The items of two containers with the same keys; none of other values."""
    mine = dict(_items(one))
    theirs = dict(_items(two))
    return [(key, value, theirs[key]) for key, value in mine.items()] if mine.keys() == theirs.keys() else []


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _shown(path: str) -> str:
    return path.removeprefix(OUTSIDE) if path.startswith(OUTSIDE) else f"self.{path}"


def _changed(before: Any, after: Any) -> str:
    if isinstance(before, list | dict) and isinstance(after, list | dict):
        return f"{len(after) - len(before):+} items"
    return describe(after)


def _grew_alike(before: Any, whole: Any, sliced: Any, tolerance: Tolerance) -> bool:
    """Whether what slices appended to a list is what one device appended, row after row."""
    if isinstance(whole, dict) and isinstance(sliced, dict) and isinstance(before, dict):
        return whole.keys() == sliced.keys() and all(
            _Relations(tolerance).same(value, sliced[key])
            or _grew_alike(before.get(key, []), value, sliced[key], tolerance)
            for key, value in whole.items()
        )
    if not all(isinstance(value, list) for value in (before, whole, sliced)):
        return False
    mine = whole[len(before) :]
    theirs = sliced[len(before) :]
    if not mine or len(theirs) % len(mine) or len(theirs) == len(mine):
        return False
    num_slices = len(theirs) // len(mine)
    weights = Weights(rows=[1] * num_slices, of_loss=[1] * num_slices)
    search = Search(weights=weights, tolerance=tolerance)
    for index, item in enumerate(mine):
        of_slices = theirs[index :: len(mine)]
        for found in search.examine(item, of_slices, "item"):
            if not found.rules or found.rules[0].kind not in _JOINED:
                return False
    return True


_LONGEST = 10_000  # items of a container beyond which only their number is compared
_DEEPEST = 6


def python_state(named: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Values that can be compared later, by path: numbers, text, copies of tensors, and containers and objects of them.

    Args:
        named: Attributes by path.
    """
    freezer = _Freezer()
    return {path: freezer.frozen(value, _DEEPEST) for path, value in named}


class _Freezer:
    """Copies of what values hold; of what several of them hold, one for all."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Any, Any]] = {}  # by id and depth; an id is its own while it is held

    def frozen(self, value: Any, depth: int) -> Any:
        """What ``value`` holds, through so many containers and objects."""
        if isinstance(value, torch.Tensor):
            return _host_copy(value)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return value
        if hasattr(type(value), "dtype") and hasattr(type(value), "copy"):  # asked of the type: others answer slowly
            return value.copy()
        if depth == 0:
            return type(value).__name__
        key = id(value), depth
        if key not in self._known:
            self._known[key] = value, self._content(value, depth - 1)
        return self._known[key][1]

    def _content(self, value: Any, depth: int) -> Any:
        if isinstance(value, list | tuple | deque | dict | set | frozenset) and len(value) > _LONGEST:
            return len(value)
        if isinstance(value, list | tuple | deque):
            return [self.frozen(item, depth) for item in value]
        if isinstance(value, dict):
            return {str(key): self.frozen(item, depth) for key, item in value.items()}
        if isinstance(value, set | frozenset):
            is_plain = all(isinstance(item, str | int | float | tuple) for item in value)
            return sorted(map(repr, value)) if is_plain else None
        if isinstance(value, torch.nn.Module) or callable(value) or not hasattr(value, "__dict__"):
            return type(value).__name__
        if runs_steps(type(value)) or package_of(type(value).__module__) in ("torch", "torchmetrics"):
            return type(value).__name__
        return {key: self.frozen(item, depth) for key, item in vars(value).items()}


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach()
    if dense.layout != torch.strided and not dense.is_nested:
        dense = dense.to_dense()
    return dense.to("cpu", copy=True)
