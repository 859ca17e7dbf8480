"""Counts that the step which adds to them also uses: a slice finds its own part there, and the rest comes later.

self.num_seen += len(batch)                 one device adds 7 to 33          40, a new level
level = self.num_seen // 40                 slices add 4 and 3, each to 33   37 and 36, the old one

A few rows seldom reach the next level. So the counts of shadows begin further on: where that changes what the step
does, the first such place is looked for, and slices are compared there.
"""

import math
import traceback
from typing import Any

import torch

from lightning_dpx.errors import some_of
from lightning_dpx.lightning.rehearsal.both_runs import BothRuns
from lightning_dpx.lightning.rehearsal.comparison.comparer import compare_step, results_of, unstable_between
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation
from lightning_dpx.lightning.rehearsal.outcome import SlicesFail
from lightning_dpx.replicas.merging.rules import Rule

# What is added to a count until a run without an end is over. A step may well run up to its count, or make a tensor as
# long, so it never begins much further on than the run comes.
_FAR = 2**24
_MORE = 2  # times as much as was added to the first batch, as batches may differ


class CountsInUse:
    """Looks for what a step does otherwise once its counts are further on.

    Args:
        runs: Of the step, as one device and in slices.
    """

    def __init__(self, runs: BothRuns) -> None:
        self._step = runs.step
        self._runs = runs
        self._counts: list[str] = []
        self._added: dict[str, float] = {}

    def refuse(self, judge: JudgingRules, first: Observation, told: frozenset[str]) -> None:
        """Refuses slices where the step uses what it counts, after it has counted.

        Args:
            judge: By whose rules slices are what one device is, as the counts are now.
            first: The step as one device.
            told: What differs as the counts are now.

        Raises:
            SlicesFail: more does, a number of rows later.
        """
        self._counts = _counts_among(judge, first)
        if not self._counts:
            return
        # Of what is left (of a warm-up, say) steps take away.
        self._added = {path: _added(path, first) for path in self._counts}
        try:
            ahead = self._first_change(first)
            found = "" if ahead is None else self._difference(judge, ahead, told)
        finally:
            # Later runs of the rehearsal begin where the module does.
            self._step.ahead = {}
        if found:
            named = some_of([f"self.{path}" for path in self._counts])
            raise SlicesFail(
                f"It uses what it adds up in {named}, where a slice has added its own part only: {ahead} further on, "
                f"{found}.",
                "For all devices to take part, add up in on_train_batch_end and its like, which see the whole batch.",
            )

    def _first_change(self, first: Observation) -> int | None:
        """The smallest number of rows after which the step does something else; ``None`` if it never does."""
        # What follows the count row by row (a log of it) was compared already: that would differ as it is.
        by_row = self._changed(first, 1)
        low, high = 1, self._farthest()
        if self._changed(first, high) <= by_row:
            return None
        # By factors first, as levels lie thousands of rows apart or a few.
        while high - low > 1:
            # At the least one further: the root of 1 times 3 is 1 again, for ever.
            middle = (low + high) // 2 if high <= 2 * low else max(low + 1, math.isqrt(low * high))
            if self._changed(first, middle) <= by_row:
                low = middle
            else:
                high = middle
        return high

    def _farthest(self) -> int:
        """How much is added to any of the counts until the run is over, at the most."""
        call = self._step.call
        num_batches = _batches_of_run(self._step.module.trainer)
        if call.name != "training_step" or not math.isfinite(num_batches):
            return _FAR
        of_few_rows = max(map(abs, self._added.values()))
        of_batch = _MORE * of_few_rows * call.num_rows / self._runs.num_rows
        return int(min(_FAR, max(2, num_batches * of_batch)))

    def _changed(self, first: Observation, ahead: int) -> frozenset[str]:
        """What the step does otherwise when its counts begin so much further on."""
        other = self._observed_whole(ahead)
        if other is None:
            return frozenset({"error"})  # such as the end of a list of levels
        return results_of(unstable_between(first, other, self._step.tolerance))

    def _observed_whole(self, ahead: int) -> Observation | None:
        self._step.ahead = {path: -ahead if added < 0 else ahead for path, added in self._added.items()}
        try:
            return self._runs.whole.observe(self._runs.num_rows)
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
        again, sliced = self._runs.sliced.observe(self._runs.sizes, whole, judge.loss_reduction)
        found = compare_step(self._step, whole, sliced, again, sizes=self._runs.sizes)
        return "" if found.subjects() <= told else found.summary()


def _counts_among(judge: JudgingRules, first: Observation) -> list[str]:
    """The attributes and buffers that slices add their own parts to."""
    numbers = judge.attributes.numbers
    added = [path for path, fitting in numbers.fitting.items() if Rule(kind="added") in fitting[:1]]
    found = [path for path in added if path not in numbers.equal and _is_count(first.numbers[path])]
    # A number of steps is the same on all slices, and its rule is the first one's.
    of_buffers = [path for path, rule in judge.buffers.items() if rule == "sum"]
    return [*found, *(path for path in of_buffers if _is_count(first.state.get(path)))]


def _added(path: str, first: Observation) -> float:
    """What the step as one device has added to a count."""
    after: Any = first.numbers.get(path, first.state.get(path))
    before: Any = first.state_before.get(path)  # a first step may make it
    return float(after) - float(before or 0)


def _batches_of_run(trainer: Any) -> float:
    """How many batches it trains on, at the most; infinity where that is not known."""
    bounds = [math.inf]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * trainer.num_training_batches)
    if trainer.max_steps >= 0:
        bounds.append(trainer.max_steps * trainer.accumulate_grad_batches)
    return float(min(bounds))


def _is_count(value: Any) -> bool:
    """Whether it is one whole number; counts in buffers, and of tokens, are often floats."""
    if isinstance(value, torch.Tensor):
        is_real = value.dtype != torch.bool and not value.is_complex()
        return is_real and value.numel() == 1 and float(value).is_integer()
    # A truth is an int as well, and is not counted with.
    return type(value) in (int, float) and float(value).is_integer()
