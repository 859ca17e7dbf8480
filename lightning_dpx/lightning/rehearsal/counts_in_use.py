"""Counts that the step which adds to them also uses: a slice finds other numbers there than one device does.

self.num_seen += len(batch)                   one device adds 7 to 33          40, a new level
level = self.num_seen // 40                   slices add 4 and 3, each to 33   37 and 36, the old one
self.seen["rows"] += len(batch)               slices add 4 and 3 to one number 37 and 40: one of them has the new one

A few rows seldom reach the next level. So the counts of shadows begin further on: where that changes what the step
does, the first such place is looked for, and slices are compared there.
"""

import math
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from lightning_dpx.errors import some_of
from lightning_dpx.lightning.rehearsal.comparison.comparer import compare_step, results_of, unstable_between
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation
from lightning_dpx.lightning.rehearsal.counts import MOST, Count, Length, count_between, counts_between
from lightning_dpx.lightning.rehearsal.outcome import SlicesFail, in_one_line
from lightning_dpx.lightning.rehearsal.shadow_step import ShadowStep
from lightning_dpx.lightning.rehearsal.sliced_run import SlicedRun
from lightning_dpx.lightning.rehearsal.whole_run import WholeRun
from lightning_dpx.replicas.merging.rules import Rule

# What is added to a count until a run without an end is over. A step may well run up to its count, or make a tensor as
# long, so it never begins much further on than the run comes.
_FAR = 2**24
_LONG = 2**14  # items of a list, which a step may go through
_MORE = 2  # times as much as was added to the first batch, as batches may differ
_MOST_ALONE = 8  # counts that are looked at one by one


class CountsInUse:
    """Looks for what a step does otherwise once its counts are further on.

    Args:
        step: On a shadow.
        whole_run: The step as one device.
        sliced_run: The step in slices.
        sizes: Rows of each slice.
    """

    def __init__(self, step: ShadowStep, whole_run: WholeRun, sliced_run: SlicedRun, sizes: tuple[int, ...]) -> None:
        self._step = step
        self._whole_run = whole_run
        self._sliced_run = sliced_run
        self._sizes = sizes
        self._counts: Sequence[Count | Length] = ()

    def refuse(self, judge: JudgingRules, first: Observation, told: frozenset[str], unstable: frozenset[str]) -> None:
        """Refuses slices where the step uses what it counts, after it has counted, or after other slices have.

        Args:
            judge: By whose rules slices are what one device is, as the counts are now.
            first: The step as one device.
            told: What differs as the counts are now.
            unstable: What changes from run to run.

        Raises:
            SlicesFail: more does, a number of rows later.
        """
        num_rows = sum(self._sizes)
        numbers: list[Count] = [*_own_counts(judge, first, num_rows), *_shared_counts(first, num_rows)]
        lengths = [Length(place=place, items=items) for place, items in first.appended.items()]
        by_row = [one for length in lengths for one in length.of_rows(num_rows)]
        # Apart, as a step may go through a list, and fail where it is too long.
        try:
            for counts in (numbers, lengths, by_row):
                self._refuse_use(counts, judge, first, told, unstable)
        finally:
            # Later runs of the rehearsal begin where the module does, and so does what lies outside of it.
            self._step.ahead = ()
            self._step.guest.surroundings.restore()

    def _refuse_use(
        self,
        counts: Sequence[Count | Length],
        judge: JudgingRules,
        first: Observation,
        told: frozenset[str],
        unstable: frozenset[str],
    ) -> None:
        """Refuses slices where the step uses one of these counts.

        Raises:
            SlicesFail: it does.
        """
        if not counts or not self._is_used(counts, judge, first, told, unstable):
            return
        # Several that grow together may step over the place where slices differ.
        alone = [part for count in counts for part in count.parts()]
        if len(alone) > 1:
            for part in alone[:_MOST_ALONE]:
                self._is_used([part], judge, first, told, unstable)

    def _is_used(
        self,
        counts: Sequence[Count | Length],
        judge: JudgingRules,
        first: Observation,
        told: frozenset[str],
        unstable: frozenset[str],
    ) -> bool:
        """Whether the step does something else once these counts are further on, and slices do not differ there.

        Raises:
            SlicesFail: they do.
        """
        self._counts = counts
        ahead = self._first_change(first)
        if ahead is None:
            return False
        # Draws of slices are others than those of one device, so nothing that slices do says anything.
        if unstable:
            found = self._use_among_draws(ahead)
        else:
            found = self._difference(judge, ahead, told)
            # What slices before it have added may bring a slice to a level that one device has not reached.
            if not found and ahead > 1 and any(count.is_shared for count in counts):
                ahead -= 1
                found = self._difference(judge, ahead, told)
        if found:
            named = some_of([str(count) for count in counts])
            raise SlicesFail(
                f"It uses what it adds up in {named}, where a slice does not find what one device does: {ahead} "
                f"further on, {found}.",
                "For all devices to take part, add up in on_train_batch_end and its like, which see the whole batch.",
            )
        return True

    def _first_change(self, first: Observation) -> int | None:
        """The smallest number of units after which the step does something else; ``None`` if it never does."""
        # What follows the count row by row (a log of it) was compared already: that would differ as it is.
        by_row = self._changed(first, 1)
        low, high = 1, self._farthest()
        if self._changed(first, high) <= by_row:
            return None
        # By factors first, as levels lie thousands of rows apart or a few.
        while high - low > 1:
            middle = (low + high) // 2 if high <= 4 * low else math.isqrt(low * high)
            if self._changed(first, middle) <= by_row:
                low = middle
            else:
                high = middle
        return high

    def _farthest(self) -> int:
        """How many units are added to any of the counts until the run is over, at the most."""
        call = self._step.call
        num_batches = _batches_of_run(self._step.strategy.lightning_module.trainer)
        most = _LONG if any(isinstance(count, Length) for count in self._counts) else _FAR
        if call.name != "training_step" or not math.isfinite(num_batches):
            return most
        of_few_rows = max(_num_added(count, self._sizes) for count in self._counts)
        of_batch = _MORE * of_few_rows * call.num_rows / sum(self._sizes)
        return int(min(most, max(2, num_batches * of_batch)))

    def _changed(self, first: Observation, ahead: int) -> frozenset[str]:
        """What the step does otherwise when its counts begin so much further on."""
        other = self._observed_whole(ahead)
        if other is None:
            return frozenset({"error"})  # such as the end of a list of levels
        return results_of(unstable_between(first, other, self._step.tolerance))

    def _observed_whole(self, ahead: int, num_rows: int = 0) -> Observation | None:
        self._step.ahead = [(count, ahead) for count in self._counts]
        try:
            return self._whole_run.observe(num_rows or sum(self._sizes))
        # Of a step that does not fit nothing is known, and no level either.
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  the run may never come so far
            traceback.clear_frames(error.__traceback__)
            return None

    def _difference(self, judge: JudgingRules, ahead: int, told: frozenset[str]) -> str:
        """What slices do otherwise than one device when their counts begin so much further on; empty if no news."""
        whole = self._observed_whole(ahead)
        if whole is None:
            return ""
        # Rules are found anew: those of before hold for the old level.
        try:
            again, sliced = self._sliced_run.observe(self._sizes, whole, judge.loss_reduction)
        except (torch.OutOfMemoryError, SlicesFail):
            raise
        except Exception as error:  # noqa: BLE001  one device has run
            traceback.clear_frames(error.__traceback__)
            return f"a slice raises {in_one_line(error)[:-1]}"
        found = compare_step(self._step, whole, sliced, again, sizes=self._sizes)
        return "" if found.subjects() <= told else found.summary()

    def _use_among_draws(self, ahead: int) -> str:
        """As :meth:`_difference`, of a step whose slices draw other numbers than one device, by that device alone.

        With fewer rows a step that uses its count after it has counted is not yet where it does something else.
        """
        text = "it does something else with the same random numbers"
        # There a slice finds what those before it have added, whether it asks before it adds or after.
        if any(count.is_shared for count in self._counts):
            return text
        few = [self._observed_whole(number, self._sizes[0]) for number in (ahead - 1, ahead)]
        before, after = few
        if before is None or after is None or not results_of(unstable_between(before, after, self._step.tolerance)):
            return text
        return ""


def _own_counts(judge: JudgingRules, first: Observation, num_rows: int) -> list[Count]:
    """The attributes and buffers that slices add their own parts to."""
    numbers = judge.attributes.numbers
    added = [path for path, fitting in numbers.fitting.items() if Rule(kind="added") in fitting[:1]]
    # A number of steps is the same on all slices, and its rule is the first one's.
    paths = [path for path in added if path not in numbers.equal]
    paths += [path for path, rule in judge.buffers.items() if rule == "sum"]
    found: list[Count] = []
    for path in paths:
        after = first.state.get(path)
        before = first.state_before.get(path)
        if _is_count(after):
            # A first step may make it.
            found.append(count_between(Count(path=path), 0 if before is None else before, after, num_rows))
    return found


def _shared_counts(first: Observation, num_rows: int) -> list[Count]:
    """The numbers that all slices add to."""
    return counts_between(first.state_before, first.state, num_rows)


def _num_added(count: Count | Length, sizes: tuple[int, ...]) -> float:
    """How many units one step adds, at the least one for each row."""
    if isinstance(count, Length):
        return max(len(count.items), sum(sizes))
    return max(count.num_units, sum(sizes))


def _batches_of_run(trainer: Any) -> float:
    """How many batches it trains on, at the most; infinity where that is not known."""
    bounds = [math.inf]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * trainer.num_training_batches)
    if trainer.max_steps >= 0:
        bounds.append(trainer.max_steps * trainer.accumulate_grad_batches)
    return float(min(bounds))


def _is_count(value: Any) -> bool:
    """Whether it is a number, or few of them; counts in buffers, and of tokens, are often floats."""
    if isinstance(value, torch.Tensor):
        is_real = value.dtype != torch.bool and not value.is_complex()
        return is_real and 0 < value.numel() <= MOST and bool(value.isfinite().all())
    # A truth is an int as well, and is not counted with.
    return type(value) in (int, float) and math.isfinite(value)
