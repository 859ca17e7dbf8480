"""A second step on the same rows: it shows whether what a step keeps is used, set anew, or added to."""

import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lightning_dpx.errors import SharedWriteError, some_of
from lightning_dpx.lightning.rehearsal.both_runs import BothRuns
from lightning_dpx.lightning.rehearsal.comparison.comparer import (
    changed_again,
    compare_step,
    grown_from_roundings,
    kept_of,
    results_of,
    unstable_between,
)
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.number_judge import CHANGES, SETTING
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation
from lightning_dpx.lightning.rehearsal.comparison.parity_report import Comparison
from lightning_dpx.lightning.rehearsal.outcome import (
    RehearsalEnded,
    SlicesFail,
    in_one_line,
    writes_parameters,
)
from lightning_dpx.lightning.whole_batches import COUNT_ELSEWHERE
from lightning_dpx.replicas.merging.rules import Rule
from lightning_dpx.replicas.same_draws import CollectiveInRehearsal

_PARTS_OF_A_STEP = 100  # of what a step has added to a number: one of them short of it, the next step raises it again

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_KEEP_ELSEWHERE = (
    "For all devices to take part, compute it from self.all_gather(...) in the step, or in on_train_batch_end and its "
    "like, which see the whole batch."
)


class SecondSteps:
    """Runs two steps on the same rows, as one device and in slices.

    Args:
        runs: Of the step, as one device and in slices.
    """

    def __init__(self, runs: BothRuns) -> None:
        self._step = runs.step
        self._runs = runs

    def compare(self, judge: JudgingRules, out: Comparison, first: Observation, *, rounds: bool) -> None:
        """Compares second steps, and leaves only the rules that hold in both.

        Args:
            judge: Of the first step.
            out: What the first step has shown.
            first: The first step as one device.
            rounds: Whether something of the first step differs as roundings grow.

        Raises:
            SlicesFail: slices cannot do what a second step does.
        """
        whole = self._observed_whole(judge, out)
        if whole is None:
            self._refuse_use_by_next_slice(judge, out)
            return
        found = self._observed_slices(judge, out, whole)
        if found is None:
            return
        again, _ = found
        counts = _counts_of_rows(judge, first)
        of_news = _settle_numbers(judge, again, whole, out)
        _settle_buffers(judge, again, out)
        _refuse_rings(judge, [path for path in counts if _is_taken_back(path, first, whole)])
        self._tell_extremes(judge, out, first, of_news)
        added_up = self._adding_up(out.kept, first, whole)
        if out.kept:
            self._refuse_use_of_kept(judge, out, (whole, *found), rounds=rounds)
            self._refuse_use_by_next_batch(judge, out, rounds=rounds)
        if added_up:
            out.blame_sums(added_up)

    def _refuse_use_of_kept(
        self,
        judge: JudgingRules,
        out: Comparison,
        seen: tuple[Observation, JudgingRules, Observation],
        *,
        rounds: bool,
    ) -> None:
        """Refuses slices whose second step does not do what that of one device does.

        Args:
            judge: Of the first step.
            out: What the first step has shown.
            seen: The second step of one device, the rules of the slices', and what that does.
            rounds: Whether something of the first step differs as roundings grow.

        Raises:
            SlicesFail: it does something else.
        """
        whole, again, sliced = seen
        # State was compared after the first step, and what steps keep differs by design.
        whole.state = {}
        sliced.state = {}
        second = compare_step(self._step, whole, sliced, again, sizes=self._runs.sizes)
        if rounds and second.differences:
            second = self._compared_but_for_roundings(judge, whole, sliced) or second
        # A kind that differs in the first step already is no news of the second.
        known = {kind for kind, _ in out.differences}
        second.differences = [one for one in second.differences if one[0] not in {*known, "kept value"}]
        if second.differences:
            raise SlicesFail(out.uses_kept(second.summary()), _KEEP_ELSEWHERE)

    def _refuse_use_by_next_batch(self, judge: JudgingRules, out: Comparison, *, rounds: bool) -> None:
        """The same of a second step that is that of the next batch.

        A step that begins anew in the first batch of an epoch, as one with hidden states does, uses nothing of the
        step before it as long as it gets that index.

        Args:
            judge: Of the first step.
            out: What the first step has shown.
            rounds: Whether something of the first step differs as roundings grow.

        Raises:
            SlicesFail: it does something else.
        """
        with self._at_indices(0, 1):
            whole = self._observed_whole(judge, out)
            found = None if whole is None else self._observed_slices(judge, out, whole)
            if whole is not None and found is not None:
                self._refuse_use_of_kept(judge, out, (whole, *found), rounds=rounds)

    @contextmanager
    def _at_indices(self, *further: int) -> Iterator[None]:
        """Steps of a run get the index of a batch that is so much further on, one after the other."""
        self._step.moves_on = further
        try:
            yield
        finally:
            self._step.moves_on = ()

    def _refuse_use_by_next_slice(self, judge: JudgingRules, out: Comparison) -> None:
        """Refuses slices where one of them uses what another has kept, of a step that one device cannot run twice.

        A hook between the steps puts it back, then, and between slices there is none. Where slices are unequal, a step
        that begins anew for another number of rows hides it.

        Args:
            judge: Of the first step.
            out: What the first step has shown.

        Raises:
            SlicesFail: a slice does.
        """
        sizes = (min(self._runs.sizes),) * len(self._runs.sizes)
        if not out.kept or sizes == self._runs.sizes:
            return
        whole = self._runs.whole.observe(sum(sizes))
        try:
            equal, sliced = self._runs.sliced.observe(sizes, whole, judge.loss_reduction)
        # These are of the whole rehearsal, or say nothing of the step.
        except (RehearsalEnded, CollectiveInRehearsal, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  whatever the slices have left to each other
            traceback.clear_frames(error.__traceback__)
            what = f"in slices of {sizes[0]} rows it raises {in_one_line(error).removesuffix('.')}"
            raise SlicesFail(_passed_on(out, what), _KEEP_ELSEWHERE) from None
        found = compare_step(self._step, whole, sliced, equal, sizes=sizes)
        known = {kind for kind, _ in out.differences}
        found.differences = [one for one in found.differences if one[0] not in known]
        if found.differences:
            raise SlicesFail(_passed_on(out, found.summary()), _KEEP_ELSEWHERE)

    def _tell_extremes(self, judge: JudgingRules, out: Comparison, first: Observation, of_news: Sequence[str]) -> None:
        """Tells numbers that are the largest sum of a batch so far, and those that count what is new."""
        # A second step on the same rows changes neither of them.
        for path in of_news:
            if self._is_largest(judge, first, path):
                judge.attributes.settle(path, ())
                text = f"self.{path} is the largest that a batch has come to, and no slice does"
                out.differences.append(("kept", text))
            else:
                # The largest number of a batch, where that is the sum of its slices', looks like it.
                out.notes.append(f"What slices add to self.{path} is added up, as of a count of what is new")

    def _is_largest(self, judge: JudgingRules, first: Observation, path: str) -> bool:
        """Whether a number that was a little less before the batch is raised by one device, and by no slice."""
        # The sum of all rows is more than it was, and that of some is not; a count goes on from there on both
        # sides.
        before, after = first.state_before.get(path), first.numbers[path]
        # Tensors are left out: what a step adds to one, element by element, is seldom the largest of anything.
        if type(before) not in (int, float) or type(after) not in (int, float) or before == after:
            return False
        short_of_it = (after - before) / _PARTS_OF_A_STEP
        if isinstance(after, int):
            short_of_it = int(math.copysign(1, short_of_it))
        # A shadow begins with what the module has, so this is what it is ahead of that.
        self._step.ahead = {path: after - before - short_of_it}
        try:
            whole = self._runs.whole.observe(self._runs.num_rows)
            again, _ = self._runs.sliced.observe(self._runs.sizes, whole, judge.loss_reduction)
        finally:
            self._step.ahead = {}
        return Rule(kind="added") not in again.attributes.numbers.fitting.get(path, ())

    def _compared_but_for_roundings(
        self, judge: JudgingRules, whole: Observation, sliced: Observation
    ) -> Comparison | None:
        """What second steps show beside what roundings decide in them; ``None`` where that is not known."""
        nudged = self._runs.whole.observe_nudged(self._runs.num_rows, num_steps=2)
        if nudged is None:
            return None
        grown = grown_from_roundings(whole, sliced, nudged, self._step.tolerance)
        # No rule is asked for what roundings decide, so the slices are put together anew.
        again, sliced = self._runs.sliced.observe(self._runs.sizes, whole, judge.loss_reduction, grown, earlier=[judge])
        sliced.state = {}
        return compare_step(self._step, whole, sliced, again, sizes=self._runs.sizes, unstable=grown)

    def refuse_use(self, judge: JudgingRules, out: Comparison, first: Observation, unstable: frozenset[str]) -> None:
        """Refuses slices where a second step uses what the first one kept, and that depends on random draws.

        Nothing that slices keep could be compared then. But on the same rows, with the same weights and the same draws
        a second step does something else after another first one only where it uses what that has kept.

        Args:
            judge: Of the first step.
            out: What the first step has shown.
            first: The first step as one device.
            unstable: What differs from run to run.

        Raises:
            SlicesFail: the second step uses it.
        """
        kept = dict.fromkeys([*out.kept, *kept_of(unstable)])
        if not kept or self._step.by_hand:  # whose second step begins with other weights
            return
        self._refuse_use_of_draws(judge, out, first, list(kept))
        # One that begins anew in the first batch of an epoch shows in the next batch what it uses, as below.
        with self._at_indices(1):
            next_first = self._runs.whole.observe(self._runs.num_rows)
        with self._at_indices(0, 1):
            self._refuse_use_of_draws(judge, out, next_first, list(kept))

    def _refuse_use_of_draws(self, judge: JudgingRules, out: Comparison, first: Observation, kept: list[str]) -> None:
        """The same, at the indices of batches that steps have now.

        Args:
            judge: Of the first step.
            out: What the first step has shown.
            first: A step like the second, without one before it.
            kept: What steps keep.

        Raises:
            SlicesFail: the second step uses it.
        """
        second = self._observed_whole(judge, out)
        # A clustering of these very rows may stay as it is in a second step, and is another one after other draws.
        other = None if second is None else self._observed_whole(judge, out, other_first=True)
        if second is None or other is None:
            return
        for one, before in ((first, "without a step before it"), (other, "after one that drew others")):
            used = results_of(unstable_between(one, second, self._step.tolerance))
            if used and self._is_steady(second):
                what = f"with the same rows and random numbers it does something else than {before}"
                raise SlicesFail(replace(out, kept=kept).uses_kept(what), _KEEP_ELSEWHERE)

    def _is_steady(self, second: Observation) -> bool:
        """Whether two steps on one device do the same when they run once more, from the same start."""
        again = self._runs.whole.observe(self._runs.num_rows, num_steps=2)
        return not results_of(unstable_between(second, again, self._step.tolerance))

    def _observed_whole(self, judge: JudgingRules, out: Comparison, *, other_first: bool = False) -> Observation | None:
        """Two steps as one device; ``None`` where the second cannot be run."""
        try:
            return self._runs.whole.observe(self._runs.num_rows, num_steps=2, other_first=other_first)
        # These are of the whole rehearsal, and no failure of the second step.
        except (RehearsalEnded, CollectiveInRehearsal):
            raise
        except Exception as error:  # noqa: BLE001  two steps on the same rows may be one too many
            traceback.clear_frames(error.__traceback__)
            out.skipped.append(f"a second step ({in_one_line(error)})")
            # A sum of one step may be a decayed one, which begins alike; without a
            # second step it is not trusted.
            judge.buffers = {name: rule for name, rule in judge.buffers.items() if rule != "sum"}
            return None

    def _observed_slices(
        self, judge: JudgingRules, out: Comparison, whole: Observation
    ) -> tuple[JudgingRules, Observation] | None:
        """Two steps in slices, and the rules that hold in the second; ``None`` where there is no room for it."""
        try:
            return self._runs.sliced.observe(self._runs.sizes, whole, judge.loss_reduction, earlier=[judge])
        # These are of the whole rehearsal, and no failure of the second step.
        except (RehearsalEnded, CollectiveInRehearsal):
            raise
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            out.skipped.append(f"a second step ({in_one_line(error)})")
            return None
        except SharedWriteError as error:
            raise writes_parameters([error.name]) from None
        except Exception as error:  # noqa: BLE001  such as a state of too many rows
            traceback.clear_frames(error.__traceback__)
            raise SlicesFail(
                f"A second step runs on the whole batch, but on a slice it raises {in_one_line(error)}",
                "For all devices to take part, let a step use nothing that the last one kept of its rows.",
            ) from None

    def _adding_up(self, kept: Sequence[str], first: Observation, second: Observation) -> list[str]:
        """Of the attributes that steps ``kept``, those that a second step on the same rows has changed again."""
        # A loss that is kept to be looked at is the same then; a count of hits, or a matrix of confusions, is
        # not.
        if self._step.by_hand and kept:
            # It begins with other weights, and what is computed by them is another value each time.
            second = self._runs.whole.observe(self._runs.num_rows, num_steps=2, same_weights=True)
        unstable: frozenset[str] = frozenset()
        if second.draws.drew:  # then what changes may be another draw
            other = self._runs.whole.observe(self._runs.num_rows, other_draws=True)
            unstable = unstable_between(first, other, self._step.tolerance)
        return [name for name in changed_again(first, second, unstable, self._step.tolerance) if name in kept]


def _passed_on(out: Comparison, what: str) -> str:
    """What comes of slices that use what the one before has kept, as a sentence."""
    return f"A slice uses what the one before it has kept in {some_of(out.kept)}, of the same batch: {what}."


def _counts_of_rows(judge: JudgingRules, first: Observation) -> list[str]:
    """The whole numbers that slices have added their own parts to in a first step."""
    numbers = judge.attributes.numbers
    found = [path for path in numbers.fitting if Rule(kind="added") in numbers.fitting[path]]
    found = [path for path in found if path not in numbers.equal and _is_whole_number(first.numbers[path])]
    of_buffers = [name for name, rule in judge.buffers.items() if rule == "sum"]
    return found + [name for name in of_buffers if _is_whole_number(first.state.get(name))]


def _refuse_rings(judge: JudgingRules, counts: Sequence[str]) -> None:
    """Refuses slices of a step that counts rows in a ring, such as the pointer of a queue.

    What is made of the counts of slices once they have begun again may be an index that is out of bounds.

    Args:
        judge: Of both steps.
        counts: What slices have added their rows to in the first step, and one device has taken from in the second.

    Raises:
        SlicesFail: it is such a step.
    """
    known = judge.attributes.rebound | judge.buffers.keys()
    rings = [path for path in counts if path not in known]
    if rings:
        raise SlicesFail(
            f"What slices add to {some_of([f'self.{path}' for path in rings])}, a whole number, comes together in "
            "a first step, and not in a second, as of a count that begins again.",
            COUNT_ELSEWHERE,
        )


def _is_taken_back(path: str, first: Observation, second: Observation) -> bool:
    """Whether one device, in a second step, takes from a count that it has added to in the first."""
    before: Any = first.state_before.get(path)
    after = _value_of(path, first)
    later = _value_of(path, second)
    # What is set to a count of the batch stays, and what ends at its most goes on until then: neither of them leaves
    # the bounds of an index on any slice.
    start = float(before) if _is_whole_number(before) else 0.0  # a first step may make it
    return _is_whole_number(later) and (float(later) - float(after)) * (float(after) - start) < 0


def _value_of(path: str, seen: Observation) -> Any:
    """Of a single number on an attribute, or in a buffer."""
    return seen.numbers.get(path, seen.state.get(path))


def _is_whole_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype in _INTEGERS and value.numel() == 1
    return type(value) is int


def _settle_numbers(judge: JudgingRules, again: JudgingRules, whole: Observation, out: Comparison) -> list[str]:
    """Leaves the rules of numbers that hold in the second step, too; returns those that seem to count what is new.

    What is added to differs in a second step from what is set, while in a first one both are alike.
    """
    of_news: list[str] = []
    attributes = judge.attributes
    numbers = again.attributes.numbers
    for path in attributes.numbers.unsettled:
        fits = (*SETTING, Rule(kind="first"))  # what steps set is the same after a second one on the same rows
        if path in whole.changed_numbers:
            # A running extreme would be the same as well.
            fits = tuple(rule for rule in numbers.fitting.get(path, ()) if rule.kind not in ("max", "min"))
        elif path in numbers.equal:
            # So is a bank of features whose rows were written again. All slices have all of it
            # by then, and add nothing: it is no sum of what they have.
            fits = (CHANGES, Rule(kind="added"), Rule(kind="first"))
        elif path not in numbers.fitting:
            # No slice has touched it, so none sets it: each would have set its own part. What is new was counted in the
            # first step, or the largest number found.
            fits = tuple(Rule(kind=kind) for kind in ("added", "max", "min", "first"))
        attributes.settle(path, [rule for rule in attributes.numbers.fitting[path] if rule in fits])
        if path not in attributes.rebound:
            out.differences.append(("kept", f"self.{path} comes together from slices in a first step only"))
        elif path not in whole.changed_numbers and attributes.rules[f"self.{path}"].kind == "added":
            of_news.append(path)
    for path in sorted(attributes.rebound & numbers.fitting.keys() - numbers.equal):
        fits = numbers.fitting[path]
        # A running minimum that begins at infinity is the mean of its slices once, and then no more.
        if f"self.{path}" not in attributes.rules or attributes.rules[f"self.{path}"] in fits:
            continue
        attributes.settle(path, [rule for rule in attributes.numbers.fitting[path] if rule in fits])
        if path not in attributes.rebound:
            out.differences.append(("kept", _only_at_first(path)))
    return of_news


def _settle_buffers(judge: JudgingRules, again: JudgingRules, out: Comparison) -> None:
    """Leaves the rules of buffers that hold in the second step, too."""
    fitting = again.of_buffers.fitting
    for name, rule in list(judge.buffers.items()):
        if name not in fitting or rule in fitting[name]:
            continue
        # Beside a large count the few rows of a step are next to nothing, and a mean fits as well as a sum.
        both = [other for other in judge.of_buffers.fitting.get(name, ()) if other in fitting[name]]
        if both:
            judge.buffers[name] = both[0]
            judge.of_buffers.fitting[name] = both
        else:
            del judge.buffers[name]
            out.differences.append(("kept", _only_at_first(name)))


def _only_at_first(path: str) -> str:
    return f"self.{path} comes together from slices in a first step, and not in a second"
