"""Compares a step in slices with the same step as one device: loss, gradients, logs, outputs and what it changed."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.errors import some_of
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.observation import (
    LEFT,
    OF_HOOKS,
    OUTSIDE,
    OUTSIDE_TORCH,
    Observation,
)
from lightning_dpx.lightning.rehearsal.comparison.parity_report import NAMED, Comparison, short
from lightning_dpx.lightning.rehearsal.comparison.relations import Relations, grew_alike, keyed_items, matching_items
from lightning_dpx.replicas import drawn_once
from lightning_dpx.replicas.merging.equality import compare_trees, describe
from lightning_dpx.replicas.merging.rule_search import Finding
from lightning_dpx.replicas.merging.tolerance import Tolerance, difference

if TYPE_CHECKING:
    from lightning_dpx.lightning.rehearsal.shadow_step import ShadowStep


# A step in slices rounds at other places, so it is some more roundings from one device than a nudge of its weights.
ROUNDINGS_OF_SLICES = 16


class Comparer:
    """Compares what slices did with what one device did.

    Args:
        tolerance: How far they may be apart.
        unstable: What changes from run to run and may be apart: "loss"; a path of an output, or of a logged value;
            "gradient", "new weight" or "state" with a path after a colon; with "structure", not in numbers only.
        rounding: What of that is apart as roundings grow.
        draws: Whether the step draws random numbers.
    """

    def __init__(
        self,
        tolerance: Tolerance,
        unstable: frozenset[str] = frozenset(),
        rounding: frozenset[str] = frozenset(),
        *,
        draws: bool = True,
    ) -> None:
        self._tolerance = tolerance
        self._unstable = unstable
        self._rounding = rounding
        self._draws = draws

    def compare(self, whole: Observation, sliced: Observation, judge: JudgingRules, out: Comparison) -> None:
        """Fills in ``out``."""
        self._losses(whole, sliced, judge, out)
        self._tensors("gradient", whole.gradients, sliced.gradients, out)
        self._weights(whole, sliced, out)
        self.values("logged value", judge.logged_findings, out)
        for name, text in judge.batch_sizes.items():
            out.differences.append(("logged value", f"logged value '{name}': {text}"))
        # A name that only one side logs has no finding, and would pass unseen.
        missing = [repr(name) for name in whole.logged if name not in sliced.logged]
        missing += [repr(name) for name in sliced.logged if name not in whole.logged]
        if missing:
            text = f"{', '.join(missing)} is logged by one device or by slices, but not by both"
            out.differences.append(("logged value", text))
        self.values("output", judge.findings, out)
        self.values("kept value", judge.attributes.findings, out)
        self._state(whole, sliced, judge.attributes.left_apart, out)
        # The first replica alone may call the logger, as on rank zero;
        # then there are as many calls.
        if len(whole.logger_calls) != len(sliced.logger_calls):
            names = ", ".join(dict.fromkeys([*whole.logger_calls, *sliced.logger_calls]))
            times = [f"{len(one.logger_calls)} time{'s' * (len(one.logger_calls) != 1)}" for one in (whole, sliced)]
            counts = f"{times[0]} on one device, {times[1]} from slices"
            out.differences.append(("logger call", f"it calls its logger itself ({names}), {counts}"))

    def _losses(self, whole: Observation, sliced: Observation, judge: JudgingRules, out: Comparison) -> None:
        if whole.loss is None and sliced.loss is None:
            return
        if whole.loss is None or sliced.loss is None:
            out.apart.add("loss")
            if "loss" in self._unstable:
                out.skipped.append(f"loss (it depends on {self._cause(['loss'])})")
                return
            out.differences.append(("loss", "the loss is None on one device or in slices, but not on both"))
            return
        # In double, so that the comparison adds no rounding; a loss of one element has any shape.
        losses = whole.loss.double().reshape(()), sliced.loss.double().reshape(())
        error = difference(*losses, self._tolerance, terms=judge.loss.largest)
        if error <= self._tolerance.relative:
            out.counts["loss"] = 1
            out.largest = max(out.largest, error)
            return
        out.apart.add("loss")
        if "loss" in self._unstable:
            out.skipped.append(f"loss (it depends on {self._cause(['loss'])})")
            return
        # Both ways are shown: which of them is nearer tells what kind of loss it is.
        numbers = [f"{value:.6g} as the {name}" for name, value in judge.loss.values.items()]
        of_slices = " and ".join(numbers) or f"{float(sliced.loss):.6g}"
        text = f"the loss is {float(whole.loss):.6g} on one device, {of_slices} of the slices'"
        out.differences.append(("loss", text))

    def _cause(self, unstable: Collection[str]) -> str:
        """What these paths are apart for."""
        causes: list[str] = []
        if not self._rounding.issuperset(unstable):
            causes.append("random draws" if self._draws else "what changes from run to run")
        if not self._rounding.isdisjoint(unstable):
            causes.append("roundings")
        return " or ".join(causes)

    def _tensors(
        self, kind: str, whole: Mapping[str, torch.Tensor], sliced: Mapping[str, torch.Tensor], out: Comparison
    ) -> None:
        errors = _errors(whole, sliced, self._tolerance)
        wrong = {name: error for name, error in errors.items() if error > self._tolerance.relative}
        out.counts[kind] = len(errors) - len(wrong)
        out.largest = max([out.largest, *(error for name, error in errors.items() if name not in wrong)])
        # Before what is unstable is left out: that is looked for among all that is apart.
        out.apart.update(f"{kind}:{name}" for name in wrong)
        skipped = [name for name in wrong if f"{kind}:{name}" in self._unstable]
        if skipped:
            cause = self._cause([f"{kind}:{name}" for name in skipped])
            out.skipped.append(f"{len(skipped)} {kind}s (they depend on {cause})")
        for name in skipped:
            del wrong[name]
        if wrong:
            worst = sorted(wrong, key=lambda name: -wrong[name])
            named = some_of([f"{name} by {short(wrong[name])}" for name in worst])
            text = f"{len(wrong)} of {len(errors)} {kind}s differ, relatively: {named}"
            out.differences.append((kind, text))

    def _weights(self, whole: Observation, sliced: Observation, out: Comparison) -> None:
        """New weights may differ where a normalizing optimizer blew up the rounding of a gradient that is zero."""
        if not whole.weights:
            return
        # Adam divides a gradient by its own size, so mere rounding moves a weight by a whole step.
        gradients = _errors(whole.gradients, sliced.gradients, self._tolerance)
        rounding = {name for name in whole.weights if _explained(name, gradients, self._tolerance)}
        for name, error in _errors(whole.weights, sliced.weights, self._tolerance).items():
            # What a rounding before the step has grown to, one in it may grow to as well.
            if error <= whole.magnified.get(name, 0.0) * self._tolerance.relative:
                rounding.add(name)
        mine = {name: value for name, value in whole.weights.items() if name not in rounding}
        theirs = {name: value for name, value in sliced.weights.items() if name not in rounding}
        self._tensors("new weight", mine, theirs, out)
        # They count as alike: their gradients were compared, and agree, or nothing but roundings is left.
        out.counts["new weight"] += len(rounding)

    def values(self, kind: str, findings: Mapping[str, Finding], out: Comparison) -> None:
        """Of what is logged or returned, by what was found."""
        # Containers come together by their items, which are counted and named themselves.
        leaves = [found for found in findings.values() if not found.rules or found.rules[0].kind != "children"]
        wrong = [found for found in leaves if not found.rules]
        unseen = [found for found in leaves if found.path in self._unstable]
        good = [found for found in leaves if found.rules and found.path not in self._unstable]
        out.counts[kind] = len(good)
        out.apart.update(found.path for found in (*wrong, *unseen))
        out.largest = max([out.largest, *(found.error for found in good)])
        if unseen:
            named = ", ".join(_name_of(found.path) for found in unseen[:NAMED])
            out.skipped.append(f"{kind} {named} ({self._cause([found.path for found in unseen])})")
        for found in good:
            # Rules that a user would not expect, and that may fit a few rows by chance.
            kinds = [rule.kind for rule in found.rules]
            is_extreme_or_first = kinds[0] in ("max", "min") and "first" in kinds
            if is_extreme_or_first or kinds[0] in ("quadratic mean", "geometric mean", "first", "last"):
                out.notes.append(
                    f"{kind} {_name_of(found.path)} is put together as the {found.rules[0].kind} of slices"
                )
        for found in wrong[:NAMED]:
            out.differences.append((kind, f"{kind} {_name_of(found.path)}: {found.text}"))
        if len(wrong) > NAMED:
            out.differences.append((kind, f"{len(wrong) - NAMED} more {kind}s"))

    def _state(
        self,
        whole: Observation,
        sliced: Observation,
        told: Collection[str],
        out: Comparison,
    ) -> None:
        """Values that a step rebinds are the first slice's by design, and only told; counts and lists are not."""
        found = _StateDifferences(wrong=[], rebound=[])
        good = 0
        relations = Relations(self._tolerance)
        for path in dict.fromkeys([*whole.state, *sliced.state]):
            start, mine, theirs = (one.get(path) for one in (whole.state_before, whole.state, sliced.state))
            has_changed = not relations.same(start, mine)
            if has_changed or not relations.same(start, theirs):
                out.changed.add(path)
            # Lists outside of the module stay as slices leave them, with an item for each. So do those that a backward
            # appends to: items come together after a forward only, and hooks would find one of each slice.
            # The largest value of all rows is in the first slice by chance.
            is_alike = relations.same(mine, theirs) and path not in sliced.kept_apart
            if not is_alike and not path.startswith(OUTSIDE) and path not in whole.hook_reads.paths:
                is_alike = grew_alike(start, mine, theirs, self._tolerance)
                if is_alike:
                    out.notes.append(f"{_shown(path)} gets items of each slice, not of the whole batch")
            # What no side has changed is no news, so it counts on neither.
            if is_alike:
                good += has_changed
                continue
            out.apart.add(f"state:{path}")
            # The list behind it was told with the rule that it lacks.
            if path not in told:
                self._tell_state(path, (start, mine, theirs), relations, whole.hook_reads.paths, found)
        # A data set that the module holds is looked at behind its attribute and as an object of its own.
        wrong = list(dict.fromkeys(found.wrong))
        out.counts["changed attribute"] = good
        out.kept = list(dict.fromkeys(found.rebound))
        out.differences += [("state", text) for text in wrong[:NAMED]]
        if len(wrong) > NAMED:
            out.differences.append(("state", f"{len(wrong) - NAMED} more attributes"))

    def _tell_state(
        self,
        path: str,
        values: tuple[Any, Any, Any],
        relations: Relations,
        read_by_hooks: Collection[str],
        found: "_StateDifferences",
    ) -> None:
        """Sorts one difference of the state.

        Args:
            path: What differs.
            values: Of it: before the step, after it on one device, and after slices.
            relations: Compares them.
            read_by_hooks: Paths that hooks look at between steps.
            found: Gets it.
        """
        start, mine, theirs = values
        # Numbers in tensors differ with the rows that a slice has; another
        # structure is another behavior.
        of_a_slice = relations.of_a_slice(mine, theirs)
        if f"{'state' if of_a_slice else 'structure'}:{path}" in self._unstable:
            return
        if not of_a_slice:
            found.wrong.append(_words_of(_shown(path), start, mine, theirs, self._tolerance))
        elif path in read_by_hooks:
            found.wrong.append(f"{_shown(path)}, which hooks read, is of one slice")
        # What keeps it there is outside of the step as well, and reads it between steps.
        elif path.startswith(OF_HOOKS):
            found.wrong.append(f"{_shown(path)} is of one slice")
        else:
            found.rebound.append(_shown(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateDifferences:
    """What differs of the state.

    Attributes:
        wrong: What is told as a difference, in words.
        rebound: What is the first slice's, and only told.
    """

    wrong: list[str]
    rebound: list[str]


def _errors(
    whole: Mapping[str, torch.Tensor], sliced: Mapping[str, torch.Tensor], tolerance: Tolerance
) -> dict[str, float]:
    """How far tensors are apart, by name, relative to their size and a little to that of their neighbors."""
    both = [*whole.values(), *sliced.values()]
    # A gradient that is zero but for rounding is judged by the size of its neighbors.
    scale = max((_largest(value) for value in both), default=0.0)
    errors = {}
    for name in dict.fromkeys([*whole, *sliced]):
        # What one of both lacks, such as the gradient of a parameter that was not used, counts as zeros.
        mine = whole[name] if name in whole else torch.zeros_like(sliced[name])
        theirs = sliced[name] if name in sliced else torch.zeros_like(whole[name])
        errors[name] = difference(mine, theirs, tolerance, scale)
    return errors


def largest_error_of_gradients(one: Observation, two: Observation, tolerance: Tolerance) -> float:
    """How far gradients of two runs are apart at the most, as they are compared."""
    return max(_errors(one.gradients, two.gradients, tolerance).values(), default=0.0)


def lost_number(whole: Observation, sliced: Observation) -> str:
    """The loss, a gradient or a new weight that is nan in slices alone; empty if there is none.

    Args:
        whole: What one device does.
        sliced: What slices do.
    """
    if whole.loss is not None and sliced.loss is not None and _is_lost(whole.loss, sliced.loss):
        return f"the loss is {float(whole.loss):.6g} on one device"
    for kind, here, there in (
        ("gradient", whole.gradients, sliced.gradients),
        ("new weight", whole.weights, sliced.weights),
    ):
        for name, value in here.items():
            if name in there and _is_lost(value, there[name]):
                return f"{kind} {name} has none on one device"
    return ""


def _is_lost(whole: torch.Tensor, sliced: torch.Tensor) -> bool:
    # Sparse ones by their values.
    parts = [one.coalesce().values() if one.is_sparse else one for one in (sliced, whole)]
    return bool(parts[0].isnan().any()) and not bool(parts[1].isnan().any())


def drew_alike(whole: Observation, sliced: Observation, sizes: Sequence[int], *, shares_draws: bool = True) -> bool:
    """Whether all rows got the same random numbers in slices as on one device, so that draws explain no difference.

    Args:
        whole: What one device does.
        sliced: What slices do.
        sizes: Rows of each slice.
        shares_draws: Whether slices of the run draw alike what is drawn once for a batch.
    """
    left_alone = {*whole.draws.left_alone, *sliced.draws.left_alone}
    once, by_rows = drawn_once([*whole.draws.of_steps, *sliced.draws.of_steps])
    # As how far to mix a batch: each slice begins where the batch began, here as in the run.
    if shares_draws and "others" in once and not by_rows:
        left_alone.discard(OUTSIDE_TORCH)
    if left_alone:
        return False
    if len({*whole.draws.per_row, *sliced.draws.per_row}) != 1:
        return False
    draws = zip(zip(*whole.draws.places, strict=True), zip(*sliced.draws.places, strict=True), strict=True)
    return all(_are_of_the_same_rows(here, there, sizes) for here, there in draws)


def _are_of_the_same_rows(whole: Sequence[int], sliced: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether rows that draw by their places have the same places in both runs."""
    # What is drawn for a part of the rows alone, such as those that a condition selects, has other places in slices.
    if len({*whole, *sliced}) == 1:
        return True
    return set(whole) == {sum(sizes)} and sorted(sliced) == sorted([*sizes] * len(whole))


def unstable_between(one: Observation, two: Observation, tolerance: Tolerance) -> frozenset[str]:
    """What two runs of one device on the same rows do not agree on."""
    found = {path for path, error in _errors_between(one, two, tolerance) if error > tolerance.relative}
    relations = Relations(tolerance)
    for path, value in one.state.items():
        if path not in two.state or not relations.same(value, two.state[path]):
            found.add(f"state:{path}")
            if not relations.of_a_slice(value, two.state.get(path)):
                found.add(f"structure:{path}")
    return frozenset(found)


def _errors_between(one: Observation, two: Observation, tolerance: Tolerance) -> Iterator[tuple[str, float]]:
    """How far apart results of two runs are, by paths as in :class:`Comparer`; state that stays is not among them."""
    if one.loss is not None and two.loss is not None:
        yield "loss", difference(one.loss, two.loss, tolerance)
    for kind, mine, theirs in (
        ("gradient", one.gradients, two.gradients),
        ("new weight", one.weights, two.weights),
    ):
        for name, value in mine.items():
            error = difference(value, theirs[name], tolerance) if name in theirs else math.inf
            yield f"{kind}:{name}", error
    for name, logged in one.logged.items():
        other = two.logged.get(name)
        values = (logged.value, None if other is None else other.value)
        yield from compare_trees(*values, tolerance, name)
    yield from compare_trees(one.output, two.output, tolerance, "result")
    for place, items in one.appended.items():
        yield from compare_trees(list(items), two.appended.get(place), tolerance, str(place))


def grown_from_roundings(
    whole: Observation, sliced: Observation, nudged: Observation, tolerance: Tolerance
) -> frozenset[str]:
    """What slices did otherwise, and no more so than one device whose weights were one rounding apart.

    Args:
        whole: The step as one device.
        sliced: The step in slices.
        nudged: The step as one device, from weights that are one rounding larger.
        tolerance: How far the results may be apart anyway.
    """
    grown = dict(_errors_of_all(whole, nudged, tolerance))
    found: set[str] = set()
    for path, error in _errors_of_all(whole, sliced, tolerance):
        explained = grown.get(path, 0.0) * ROUNDINGS_OF_SLICES
        if tolerance.relative < error <= explained and math.isfinite(explained):
            found.add(path)
    return frozenset(found)


def _errors_of_all(one: Observation, two: Observation, tolerance: Tolerance) -> Iterator[tuple[str, float]]:
    """As :func:`_errors_between`, with tensors among the state."""
    yield from _errors_between(one, two, tolerance)
    for path, value in one.state.items():
        other = two.state.get(path)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            yield f"state:{path}", difference(value, other, tolerance)


def kept_of(unstable: frozenset[str]) -> list[str]:
    """Attributes of the module among what two runs do not agree on."""
    paths = sorted(path.removeprefix("state:") for path in unstable if path.startswith("state:"))
    return [_shown(path) for path in paths if not path.startswith(OUTSIDE)]


def results_of(unstable: frozenset[str]) -> frozenset[str]:
    """Of what two runs do not agree on, what is no state that they leave behind, and no list that they append to."""
    return frozenset(path for path in unstable if not path.startswith(("state:", "structure:", "self.")))


def changed_again(one: Observation, two: Observation, unstable: frozenset[str], tolerance: Tolerance) -> list[str]:
    """Attributes that are others after two steps than after one, but for those that no two runs agree on."""
    found = list[str]()
    relations = Relations(tolerance)
    for path, value in two.state.items():
        if f"state:{path}" not in unstable and not relations.same(one.state.get(path), value):
            found.append(_shown(path))
    return found


def _explained(name: str, gradients: Mapping[str, float], tolerance: Tolerance) -> bool:
    """Whether all gradients that an optimizer was given for this parameter agree."""
    given = {key: error for key, error in gradients.items() if not key.endswith(LEFT)}
    own = [error for key, error in given.items() if key.partition("@")[0] == name]
    return bool(own) and all(error <= tolerance.relative for error in own)


def _largest(value: torch.Tensor) -> float:
    # Whole numbers (flags, quantized weights) have no roundings, and an infinite gradient would make every other one
    # look like one.
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    finite = value[value.isfinite()]
    if finite.numel():
        return float(finite.abs().max())
    return 0.0


def _name_of(path: str) -> str:
    name = path.removeprefix("result.") if path != "result" else "what it returns"
    if path != "result":
        return f"'{name}'"
    return name


def _words_of(path: str, start: Any, whole: Any, sliced: Any, tolerance: Tolerance) -> str:
    """What differs, down to the first item of a container that does."""
    relations = Relations(tolerance)
    for key, mine, theirs in matching_items(whole, sliced):
        if not relations.of_a_slice(mine, theirs):
            earlier = dict(keyed_items(start)).get(key)
            return _words_of(f"{path}.{key}", earlier, mine, theirs, tolerance)
    return f"{path} is {_changed(start, whole)} on one device, {_changed(start, sliced)} in slices"


def _shown(path: str) -> str:
    if path.startswith(OUTSIDE):
        return path.removeprefix(OUTSIDE)
    return f"self.{path}"


def _changed(before: Any, after: Any) -> str:
    if isinstance(before, list | dict) and isinstance(after, list | dict):
        return f"{len(after) - len(before):+} items"
    return describe(after)


def compare_step(
    step: "ShadowStep",
    whole: Observation,
    sliced: Observation,
    judge: JudgingRules,
    *,
    sizes: tuple[int, ...],
    unstable: frozenset[str] = frozenset(),
    rounding: frozenset[str] = frozenset(),
) -> Comparison:
    """Compares all that was observed of a step.

    Args:
        step: Says how close both must be.
        whole: What one device has done.
        sliced: What slices have done.
        judge: The rules by which they were put together.
        sizes: Rows of each slice.
        unstable: See :class:`Comparer`.
        rounding: See :class:`Comparer`.
    """
    comparison = Comparison(rows=sum(sizes), sizes=sizes, stage=step.call.name)
    comparer = Comparer(step.tolerance, unstable, rounding, draws=judge.draws)
    comparer.compare(whole, sliced, judge, comparison)
    if step.norms:
        named = ", ".join(step.norms[:3])
        more = ", ..." if len(step.norms) > 3 else ""
        comparison.notes.append(
            f"Batch norm ({named}{more}) normalizes by its slice and was checked in eval mode; "
            "Trainer(sync_batchnorm=True) makes it that of the whole batch"
        )
    return comparison
