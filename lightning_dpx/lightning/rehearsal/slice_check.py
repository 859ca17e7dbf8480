"""Some rows in slices, beside the same rows as one device: what agrees, by which rules, and why the rest does not.

whole, sliced --compare--> agree --> a second step, where the first has left something behind
                             |
                             +-----> differ: roundings that grow? gradients of an earlier step?
                                     other from run to run? --> what is left is told
"""

import torch

from lightning_dpx.devices import distinct_devices
from lightning_dpx.lightning.expected_gradient import names_gradients
from lightning_dpx.lightning.rehearsal.both_runs import BothRuns
from lightning_dpx.lightning.rehearsal.comparison.comparer import (
    ROUNDINGS_OF_SLICES,
    compare_step,
    drew_alike,
    grown_from_roundings,
    largest_error_of_gradients,
    unstable_between,
)
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation
from lightning_dpx.lightning.rehearsal.comparison.parity_report import Comparison
from lightning_dpx.lightning.rehearsal.counts_in_use import CountsInUse
from lightning_dpx.lightning.rehearsal.outcome import Outcome, SlicesFail
from lightning_dpx.lightning.rehearsal.second_steps import SecondSteps
from lightning_dpx.lightning.rehearsal.whole_run import NUDGES
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.replicas import drawn_on_devices, drawn_once, draws_both_ways
from lightning_dpx.replicas.merging.tolerance import Tolerance, difference

# Times what a handful of roundings comes to. Nearly all steps are nearer to one device, and cost no further run.
_FEW_ROUNDINGS = 4


class SliceCheck:
    """Compares what slices do with what one device has done.

    Args:
        runs: Of the step, as one device and in slices.
        whole: What one device has done.
        loss_reduction: As given: "auto", "mean" or "sum".
        is_look: Whether the step was rehearsed before, on other rows.
    """

    def __init__(self, runs: BothRuns, whole: Observation, *, loss_reduction: str, is_look: bool) -> None:
        self._step = runs.step
        self._runs = runs
        self._whole = whole
        self._loss_reduction = loss_reduction
        self._is_look = is_look
        self._tolerance = runs.step.tolerance

    def outcome(self, judge: JudgingRules, sliced: Observation) -> Outcome:
        """Compares, and runs more where something differs, until it is known what that comes from.

        Args:
            judge: The rules by which the slices were put together.
            sliced: What they have done.

        Raises:
            SlicesFail: the step is not one for slices.
        """
        judge, sliced = self._by_mean_or_sum(judge, sliced)
        self._note_draws(judge, sliced)
        self._refuse_lone_draws(sliced)
        comparison = self._compared(judge, sliced)
        if not comparison.differences and self._narrow_tolerance(sliced, comparison):
            comparison = self._compared(judge, sliced)
        if {kind for kind, _ in comparison.differences} == {"new weight"}:
            self._whole.magnified = self._magnified()
            comparison = self._compared(judge, sliced)
        self._refuse_old_gradients(comparison)
        unstable: frozenset[str] = frozenset()
        if comparison.differences:
            unstable = self._unstable(sliced, comparison)
        rounding = self._rounding(sliced, comparison, unstable)
        unstable |= rounding
        if unstable:
            # Of roundings neither the mean nor the sum is nearer to those of one device, but by chance.
            is_open = "loss" not in rounding and not self._step.by_hand
            reduction = self._loss_reduction if is_open else judge.loss_reduction
            # The second judge knows what is unstable, and is told of the draws that the first one has seen.
            judge, again = self._runs.sliced.observe(self._runs.sizes, self._whole, reduction, unstable)
            self._note_draws(judge, sliced)
            comparison = self._compared(judge, again, unstable, rounding)
        second = SecondSteps(self._runs)
        # What changes from run to run cannot be compared in a second step either.
        if unstable - rounding and not self._is_look:
            second.refuse_use(judge, comparison, self._whole, unstable)
        elif not unstable - rounding and self._needs_second_steps(judge, comparison):
            second.compare(judge, comparison, self._whole, rounds=bool(rounding))
        if not self._is_look and not unstable:
            counts = CountsInUse(self._runs)
            counts.refuse(judge, self._whole, comparison.subjects())
        return Outcome(
            comparison=comparison,
            judge=judge,
            findings={**judge.findings, **judge.attributes.findings},
            logged=judge.logged_findings,
            unstable=unstable,
            rounding=rounding,
        )

    def _by_mean_or_sum(self, judge: JudgingRules, sliced: Observation) -> tuple[JudgingRules, Observation]:
        """What slices do whose losses are averaged, or added up if only that gives what one device does."""
        # A step by hand returns no loss that could be compared, so the new weights decide between both.
        is_open = self._step.by_hand and self._loss_reduction == "auto"
        if is_open and self._compared(judge, sliced).differences:
            of_sum, summed = self._runs.sliced.observe(self._runs.sizes, self._whole, "sum")
            if not self._compared(of_sum, summed).differences:
                return of_sum, summed
        return judge, sliced

    def _note_draws(self, judge: JudgingRules, sliced: Observation) -> None:
        """What a step draws, and what of it once for its batch."""
        whole = self._whole
        calls = [*whole.draws.of_steps, *sliced.draws.of_steps]
        once, by_rows = drawn_once(calls)
        # Beside the host every device has a generator of its own: threads do not wait for one another's.
        once_there, by_rows_there = drawn_on_devices(calls)
        if self._step.by_hand:  # whose slices take turns, and draw in between
            once, by_rows = set(), set()
            if self._has_slices_on_one_device:
                once_there, by_rows_there = set(), set()
        judge.draws_once = once | once_there
        judge.draws_by_rows = by_rows | by_rows_there
        # A step that draws for the first time later on is checked again, so any draw counts here.
        judge.draws = whole.draws.drew or bool(judge.draws_once or judge.draws_by_rows or whole.draws.left_alone)

    @property
    def _has_slices_on_one_device(self) -> bool:
        """Whether there may be slices that go on from one another's draws."""
        devices = [replica.device for replica in self._step.replicas.replicas]
        return len(distinct_devices(devices)) < len(devices)

    def _refuse_lone_draws(self, sliced: Observation) -> None:
        """Raises where the step draws once for its batch what slices of the run would each draw for themselves.

        Here all of them draw the same, so that no comparison shows it.

        Raises:
            SlicesFail: it does.
        """
        calls = [*self._whole.draws.of_steps, *sliced.draws.of_steps]
        once, _ = drawn_once(calls)
        if self._has_slices_on_one_device:
            once |= drawn_on_devices(calls)[0]
        # By hand slices meet in between, and take turns.
        if draws_both_ways(calls) or (self._step.by_hand and once):
            raise SlicesFail(
                "It draws random numbers once for its batch, such as how far to mix it, and every slice would draw "
                "others.",
                "For all devices to take part, draw them in a hook that runs once (on_train_batch_start).",
            )

    def _compared(
        self,
        judge: JudgingRules,
        sliced: Observation,
        unstable: frozenset[str] = frozenset(),
        rounding: frozenset[str] = frozenset(),
    ) -> Comparison:
        with overridden(self._step, tolerance=self._tolerance):
            return compare_step(
                self._step, self._whole, sliced, judge, sizes=self._runs.sizes, unstable=unstable, rounding=rounding
            )

    def _narrow_tolerance(self, sliced: Observation, comparison: Comparison) -> bool:
        """Whether gradients are further apart than roundings have been seen to take them, which is all that is allowed.

        The tolerance is what roundings may come to in sums as long as the largest tensor, and in a loss that is nearly
        a mean over rows, such as a Dice loss of the whole batch, slices may be nearer to it than that.
        """
        step = self._step
        # Weights of its own take room, for which a budget has none, and a step by hand has moved them.
        if self._is_look or step.by_hand or not step.trains or step.strategy.plans_memory:
            return False
        grown = _FEW_ROUNDINGS * self._tolerance.of_neighbors
        # Known of the comparison: gradients are looked at once more only where something is further apart.
        if comparison.largest <= grown:
            return False
        few_roundings = Tolerance(grown, self._tolerance.of_neighbors)
        apart = largest_error_of_gradients(self._whole, sliced, few_roundings)
        if apart <= grown:
            return False
        for places in NUDGES:
            nudged = self._runs.whole.observe_nudged(self._runs.num_rows, places=places)
            if nudged is None:
                return False
            of_nudge = largest_error_of_gradients(self._whole, nudged, few_roundings)
            grown = max(grown, ROUNDINGS_OF_SLICES * of_nudge)
            # One nudge that explains it is enough.
            if apart <= grown:
                return False
        self._tolerance = Tolerance(grown, self._tolerance.of_neighbors)
        return True

    def _magnified(self) -> dict[str, float]:
        """By how much roundings of the old weights have grown in each new one, as they do in many steps of L-BFGS."""
        nudged = self._runs.whole.observe_nudged(self._runs.num_rows)
        factors: dict[str, float] = {}
        if nudged is None:
            return factors
        for name, value in self._whole.weights.items():
            if value.is_floating_point():
                grown = difference(value, nudged.weights[name], self._step.tolerance)
                factors[name] = grown / torch.finfo(value.dtype).eps
        return factors

    def _refuse_old_gradients(self, comparison: Comparison) -> None:
        """Raises where the step reads gradients that an earlier one has left.

        Raises:
            SlicesFail: it does.
        """
        may_read = len(self._step.replicas.devices) > 1 and names_gradients(self._step.module)
        # Two more runs of one device, so only where the code names gradients or
        # something differs already.
        if (may_read or comparison.differences) and not self._is_look and self._reads_old_gradients():
            raise SlicesFail(
                "It reads gradients that the step before has left in .grad, which the first replica alone has.",
                "For all devices to take part, read them in on_before_optimizer_step or on_train_batch_end.",
            )

    def _reads_old_gradients(self) -> bool:
        """Whether the step does something else where the step before has left no gradients, and only then."""
        if self._step.by_hand or not self._step.trains:
            return False
        again = self._runs.whole.observe(self._runs.num_rows)
        # A step that two equal runs do not agree on says nothing about what gradients change.
        if unstable_between(self._whole, again, self._step.tolerance):
            return False
        without = self._runs.whole.observe(self._runs.num_rows, after_a_step=False)
        return bool(unstable_between(self._whole, without, self._step.tolerance))

    def _unstable(self, sliced: Observation, comparison: Comparison) -> frozenset[str]:
        """What differs because it differs from run to run, on one device as well."""
        whole = self._whole
        # By hand slices take turns, and draw in between.
        alike = drew_alike(whole, sliced, self._runs.sizes, shares_draws=not self._step.by_hand)
        # Other numbers on purpose, unless slices drew those of one device:
        # then nothing is due to draws.
        again = self._runs.whole.observe(comparison.rows, other_draws=not alike)
        unstable = unstable_between(whole, again, self._step.tolerance)
        if alike or not (whole.draws.drew or whole.draws.left_alone or again.draws.left_alone):
            # No draws explain it: something outside the module goes on from run to run, and cannot be put back.
            trained = ("loss", "gradient:", "new weight:")
            unstable = frozenset(path for path in unstable if not path.startswith(trained))
        of_structure = frozenset(path for path in unstable if path.startswith("structure:"))
        once, by_rows = drawn_once([*whole.draws.of_steps, *sliced.draws.of_steps])
        # All slices draw the same here, from where the batch began, and in the run each goes on from the one before.
        if "others" in by_rows or ("others" in once and self._step.by_hand):
            return unstable
        return (unstable & comparison.apart) | of_structure  # what agreed all the same has been compared

    def _rounding(self, sliced: Observation, comparison: Comparison, unstable: frozenset[str]) -> frozenset[str]:
        """What differs as roundings grow, beside what is ``unstable``."""
        # In a loss of two numbers that cancel out nothing else may be left. Noise is the same for all rows in
        # a rehearsal: what a norm makes of these is zero but for roundings, and which side of a kink that is
        # on decides a gradient; an optimizer that divides by its gradients moves what has none.
        moved = self._step.by_hand and bool(comparison.kept)  # by new weights, which only a step by hand has
        if not comparison.differences and not moved:
            return frozenset()
        # Weights of its own take room, for which a budget has none.
        if self._step.strategy.plans_memory and not self._step.by_hand:
            return frozenset()
        found = frozenset[str]()
        for places in NUDGES:
            left = comparison.apart - unstable - found
            nudged = self._runs.whole.observe_nudged(comparison.rows, places=places) if left else None
            if nudged is None:
                break
            found |= grown_from_roundings(self._whole, sliced, nudged, self._step.tolerance) & left
        if not found:
            return found
        # What a rehearsal cannot put back goes on from run to run, and would be taken for what a nudge has done.
        again = self._runs.whole.observe(comparison.rows)
        return found - unstable_between(self._whole, again, self._step.tolerance)

    def _needs_second_steps(self, judge: JudgingRules, comparison: Comparison) -> bool:
        """Whether the first step leaves something behind whose rule only another one can tell."""
        # A decayed count grows like any other from zero, a number that is set looks like one that is added to
        # it, and a running minimum that begins at infinity is the first loss.
        # A second step costs as much as the first, and what keeps nothing has no second one that differs.
        # So is that of a buffer, and whatever its rule is: those of the first slice alone are not listed.
        goes_on = comparison.kept or judge.attributes.numbers.settings or judge.buffers
        kinds = {kind for kind, _ in comparison.differences}
        # By hand a second step begins with the new weights; otherwise, with the same ones on both sides.
        begins_alike = not (self._step.by_hand and kinds & {"gradient", "new weight"})
        return bool(goes_on) and begins_alike and not self._is_look
