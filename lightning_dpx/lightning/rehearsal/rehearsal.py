"""A rehearsal: a step on a few rows, as one device and in slices of unequal size, and what both say together.

    rows --whole--> shadow ------------------> loss, gradients, outputs, logs, state --+
      |             (whole_run.py)                                                     +--> rules, one line
      +--3 + 2----> shadow's replicas -------> the same, merged by what reproduces  ---+    (comparison/)
                    (sliced_run.py)                                   (slice_check.py)

What is checked is what will run: the strategy's own step, pointed at shadows (`shadow_step.py`). What cannot be
rehearsed trains all the same, and one line says why (`verification.py`).
"""

import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.devices import free_garbage, is_host
from lightning_dpx.errors import GatherError, SharedWriteError, WholeBatchError
from lightning_dpx.lightning.own_backwards import ADVICE, REASON, OwnBackwardError
from lightning_dpx.lightning.rehearsal.both_runs import BothRuns
from lightning_dpx.lightning.rehearsal.comparison.comparer import Comparer, lost_number
from lightning_dpx.lightning.rehearsal.comparison.findings import is_kept, refined
from lightning_dpx.lightning.rehearsal.comparison.observation import Observation, own_attributes_of
from lightning_dpx.lightning.rehearsal.comparison.parity_report import Comparison
from lightning_dpx.lightning.rehearsal.few_rows import FewRows, unequal_sizes
from lightning_dpx.lightning.rehearsal.outcome import (
    Call,
    NotRehearsed,
    NumbersLost,
    Outcome,
    PartsAppear,
    RehearsalEnded,
    SlicesFail,
    in_one_line,
    writes_parameters,
)
from lightning_dpx.lightning.rehearsal.shadow_step import ShadowStep
from lightning_dpx.lightning.rehearsal.slice_check import SliceCheck
from lightning_dpx.lightning.rehearsal.sliced_run import SlicedRun
from lightning_dpx.lightning.rehearsal.whole_run import WholeRun
from lightning_dpx.python_objects.class_registries import class_registries
from lightning_dpx.python_objects.identity_registries import identity_registries
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.replicas import MergeRules
from lightning_dpx.replicas.collectives import UnequalShapesError
from lightning_dpx.replicas.drawn_rows import find_drawn_rows, orders_of_rows
from lightning_dpx.replicas.merging.rule_search import Finding
from lightning_dpx.replicas.same_draws import CollectiveInRehearsal
from lightning_dpx.torch_compat import is_refused_by_modes

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy

NOT_ALIKE = "they are not what one device gives: "
_MORE_ROWS = 8  # times as many, where what the first rows show fits several rules by chance
# Where more rows show no more, other rows: those after so large a part of what is left.
_OTHER_PARTS = (1.0, 0.5, 0.25, 0.75, 0.125, 0.625)


class Rehearsal:
    """Rehearses one stage's step.

    Args:
        strategy: Whose step it is.
        call: What the trainer called.
        loss_reduction: As given.
        requested: Gets the iterators that were asked for an item, though it could not be given back.

    Attributes:
        needs_equal_slices: Whether the step runs in slices of one size only.
        least_rows: Of a slice, those that the step is known to run on, where a few rows were too few; else 0.
    """

    def __init__(self, strategy: "DPXStrategy", call: Call, loss_reduction: str, requested: list[str]) -> None:
        self._loss_reduction = loss_reduction
        self._requested = requested
        self._step = ShadowStep(strategy, call, requested)
        self._module = self._step.module
        self._rows = FewRows(call, self._step.replicas)
        self._whole = WholeRun(self._step, self._rows)
        self._sliced = SlicedRun(self._step, self._rows)
        self._looks_again = False
        self._most_seen = 0  # rows of one look
        self._plans_memory: bool = strategy.plans_memory
        self._has_micro_batches: bool = strategy.plans_memory or strategy.options.micro_batches not in (1, "auto")
        self.needs_equal_slices: bool = False
        self.least_rows: int = 0

    @property
    def norms(self) -> list[str]:
        """Batch norms that normalize by their slice."""
        return self._step.norms

    @property
    def metric_rules(self) -> Any:
        """How arguments of metrics are joined, as was learned."""
        return self._sliced.metric_rules

    def run(self, *, follows_steps: bool = False) -> Outcome:
        """Rehearses the step on a few rows, and says what was found.

        Args:
            follows_steps: Whether steps of the run have been planned and taken by now.

        Raises:
            NotRehearsed: nothing could be.
            SlicesFail: the slices raise where the whole batch does not.
        """
        self._check_registries()
        # A profile takes more than any plan, so the first rehearsal may as well; later ones are beside steps that fit.
        if follows_steps and self._plans_memory:
            self._rows.keep_to_micro_batch()
        outcome = self._visited(self._on_first_batch)
        outcome.settle_numbers()
        real_module = self._step.sandbox.real_module
        if self._step.trains and real_module.has_hooks:
            outcome.comparison.tell_of_hooks(real_module.changed_by_hooks)
        return outcome

    def _check_registries(self) -> None:
        """Refuses slices for modules that code finds by their class: a copy is not there, so no comparison shows it.

        Raises:
            SlicesFail: there are some.
        """
        names = class_registries(self._module)
        if names:
            raise SlicesFail(
                f"Parts of the module are listed in {', '.join(names[:3])}, by which code finds those of the first "
                "replica alone.",
                "For all devices to take part, find them by modules(), and keep no list of instances on a class.",
            )
        names = identity_registries(self._module, own_attributes_of(self._module))
        if names:
            raise SlicesFail(
                f"Parts of the module are looked up in {', '.join(names[:3])} by id() or as keys, where those of the "
                "first replica alone are found.",
                "For all devices to take part, look them up by their names (named_parameters(), named_modules()).",
            )

    def look_again(
        self,
        part: float | None,
        earlier: tuple[dict[str, Finding], dict[str, Finding]],
        rules: MergeRules,
    ) -> Outcome:
        """Rehearses on a few other rows; the outcome is that of earlier rows and these together.

        Args:
            part: Of the rows that are not taken, the part in front of those that are; ``None`` where a few rows are too
                few for the step, and all are taken.
            earlier: What was found of outputs and kept values, and of logged values.
            rules: By which results are merged now.

        Raises:
            NotRehearsed: nothing could be found.
            SlicesFail: the slices raise where the whole batch does not.
        """
        self._looks_again = True
        self._rows.skipped = part or 0.0
        if self._plans_memory:
            self._rows.keep_to_micro_batch()
        on_rows = self._on_real_rows if part is None else partial(self._on_rows, 1)
        look = partial(self._in_some_order, on_rows)
        # What the first rehearsal found of rows that draw alike, it has found.
        self._step.sandbox.sizes_of_draws = self._rows.real_sizes if part is None else self._rows.unequal_sizes(1)
        self._step.sandbox.rows_of_draws = rules.drawn_rows
        # The question of metrics has been answered by the first rehearsal, and
        # steps run by that answer.
        self._sliced.gives_slices = rules.metrics_give_slices
        try:
            # Without graphs it takes as much memory as a few rows do; by hand there is no step without them.
            with nullcontext() if self._step.by_hand else torch.no_grad():
                outcome = self._visited(look)
        except NotRehearsed as reason:
            if self._step.by_hand or not self._step.trains:
                raise
            # What a graph keeps of a few rows is planned for no budget: micro-batches may have one row each.
            if self._plans_memory:
                raise NotRehearsed(f"without a graph, for which memory_budget has no room, {reason}") from None
            # A step with a backward of its own (a gradient penalty) runs with graphs only.
            outcome = self._visited(look)
        # What one look finds may fit by chance: rules count only together with those of before.
        findings, logged = earlier
        rows, sizes, stage = outcome.comparison.rows, outcome.comparison.sizes, outcome.comparison.stage
        before = Outcome(
            comparison=Comparison(rows=rows, sizes=sizes, stage=stage),
            judge=outcome.judge,
            findings=findings,
            logged=logged,
        )
        return self._refine(outcome, before)

    def check_real_slices(self) -> None:
        """Runs the step on all rows of the batch, in the slices that it has in the run.

        Raises:
            NotRehearsed: nothing could be found.
            SlicesFail: the slices raise where the whole batch does not.
        """
        self._visited(self._on_real_rows)

    def _visited(self, look: Callable[[], Outcome]) -> Outcome:
        with self._step.sandbox.opened(calls_hooks=self._step.by_hand):
            try:
                outcome = look()
                self._check_iterators()
                return outcome
            # A step that was refused an item may fail in any way because
            # of it, so that comes first.
            except RehearsalEnded:
                self._check_iterators()
                raise
            # Not a fault of the step: other processes may not rehearse at this moment.
            except CollectiveInRehearsal as error:
                raise NotRehearsed(f"it calls torch.distributed itself ({error}).") from None
            except Exception as error:  # noqa: BLE001  a failure in here is none of the run
                traceback.clear_frames(error.__traceback__)
                self._check_iterators()
                if isinstance(error, torch.OutOfMemoryError):
                    free_garbage()  # the step itself needs the room that shadows hold in reference cycles
                raise NotRehearsed(f"the rehearsal failed with {in_one_line(error)}") from None

    def _on_first_batch(self) -> Outcome:
        """What is found on rows of the first batch of a stage."""
        outcome = self._on_own_values() or self._on_all_rows()
        self._check_single_rows()
        return outcome

    def _check_single_rows(self) -> None:
        """Tries batch norms on one row where slices have no more: in training mode, in which they are not compared.

        Raises:
            SlicesFail: they need more.
        """
        step = self._step
        if not step.norms or 1 not in self._rows.real_sizes:
            return
        step.trains_norms = True
        try:
            self._whole.observe(1)
        except (NotRehearsed, PartsAppear, CollectiveInRehearsal, torch.OutOfMemoryError):
            return  # the step itself meets it, or not
        except Exception as error:  # noqa: BLE001  the whole batch has more rows
            traceback.clear_frames(error.__traceback__)
            raise SlicesFail(
                f"Batch norm ({step.norms[0]}) is trained on slices of one row, and there it raises "
                f"{in_one_line(error)}",
                "For all devices to take part, give batches at least two rows for each device.",
            ) from None
        finally:
            step.trains_norms = False

    def _on_own_values(self) -> Outcome | None:
        """What is found where micro-batches wait for no value of a metric; ``None`` if it is not as on one device."""
        # Waiting costs memory: micro-batches that meet in a metric are all held at once.
        if not (self._sliced.gives_slices and self._step.session.metrics):
            return None
        with suppress(NotRehearsed, SlicesFail):
            outcome = self._on_all_rows()
            if not outcome.comparison.differences:
                return outcome
        self._sliced.gives_slices = False
        return None

    def _on_all_rows(self) -> Outcome:
        """What is found on a few rows, and on more and other ones where those show too little."""
        # The second try, after one with values of metrics, begins with the same rows as the first.
        self._rows.skipped = 0.0
        self._sliced.has_waited = False
        outcome = self._beside_zero_losses(self._on_rows(1))
        # For micro-batches there may be no more room than one of them takes.
        has_counts = outcome.has_counts and not self._has_micro_batches
        if not outcome.is_sure or has_counts:
            # More rows are a bonus: what the first ones have shown stands,
            # whatever becomes of these.
            with suppress(RehearsalEnded, torch.OutOfMemoryError):
                outcome = self._refine(outcome, self._on_rows(_MORE_ROWS))
        looked_at = {self._rows.taken()}
        for part in _OTHER_PARTS:
            # Asked each time, as every further look may leave one rule only.
            if not outcome.is_ambiguous and not (outcome.has_constants and len(looked_at) == 1):
                break
            # Rows that are nearly alike mostly are so in the whole batch. But where it is sorted, the last ones are
            # others, and there may be no later batch to tell means apart.
            if outcome.is_some_mean and len(looked_at) > 1:
                break
            self._rows.skipped = part
            # A small batch has not as many other rows.
            if self._rows.taken() in looked_at:
                continue
            looked_at.add(self._rows.taken())
            # What else the step does, the first rows have shown; these are only asked for their rules.
            # They may take more memory than the first ones did, as longer texts do.
            with suppress(RehearsalEnded, torch.OutOfMemoryError), overridden(self, _looks_again=True):
                outcome = self._refine(outcome, self._on_rows(1))
        return self._beside_all_rows(self._beside_own_draws(outcome))

    def _beside_zero_losses(self, first: Outcome) -> Outcome:
        """What is found where slices have losses that are not zero, of a loss that is a sum by one slice alone."""
        if not first.judge.loss.rests_on_one:
            return first
        for part in (None, *_OTHER_PARTS):
            self._rows.skipped = part or 0.0
            with suppress(RehearsalEnded, torch.OutOfMemoryError), overridden(self, _looks_again=True):
                other = self._on_rows(1 if part else _MORE_ROWS)
                # Zeros on all slices are a mean and a sum as well.
                if other.judge.loss.rests_on_one or not other.judge.loss.largest:
                    continue
                # Both rules cannot hold, and where neither does the other rows have shown it.
                if other.judge.loss_reduction != "sum" and not other.comparison.differences:
                    text = "the loss is the mean of the slices' on some rows, and their sum where all but one have zero"
                    other.comparison.differences.append(("loss", text))
                self._rows.skipped = 0.0
                return self._refine(other, first)
        self._rows.skipped = 0.0
        first.comparison.skipped.append("whether losses of slices are added up or averaged (all but one are zero)")
        return first

    def _beside_own_draws(self, outcome: Outcome) -> Outcome:
        """What is found as well where not all rows draw the same numbers."""
        # By hand it is not known which draws are by rows.
        may_draw_by_rows = outcome.judge.draws if self._step.by_hand else outcome.judge.draws_by_rows
        if not may_draw_by_rows or outcome.comparison.differences or self.needs_equal_slices:
            return outcome
        sizes = outcome.comparison.sizes
        # No more rows than before: nearly every network with dropout comes here, and more may not fit. Few may draw the
        # same by chance, so that later looks go on with this.
        # Slices of one size all draw alike again, row by row.
        if len(set(sizes)) == 1:
            sizes = unequal_sizes(sum(sizes), 2)
        sandbox = self._step.sandbox
        # A bonus, as more rows are.
        with suppress(RehearsalEnded, torch.OutOfMemoryError):
            with overridden(self, _looks_again=True), overridden(sandbox, sizes_of_draws=sizes):
                return self._refine(outcome, self._in_some_order(lambda: self._on_sizes(sizes)))
        return outcome

    def _on_sizes(self, sizes: tuple[int, ...]) -> Outcome:
        return self._with_slices(self._whole.observe(sum(sizes)), sizes)

    def _in_some_order(self, look: Callable[[], Outcome]) -> Outcome:
        """What a look finds where rows draw their own, in the order in which flattened rows seem to lie.

        Nothing tells whether places of a row follow one another, or lie apart by time or by view; in the wrong order
        they draw what belongs to other rows, and slices are not what one device is.
        """
        sandbox = self._step.sandbox
        first = look()
        parts = orders_of_rows(sandbox.rows_of_draws)[1:]
        for number in parts if first.comparison.differences else ():
            with overridden(sandbox, parts_of_draws=number):
                other = look()
            if not other.comparison.differences:
                return other
        return first

    def _beside_all_rows(self, outcome: Outcome) -> Outcome:
        """What is found on all rows as well, of an evaluation: where a few show too little, it may have one batch."""
        # Without graphs they take little room, for which a budget has not asked all the same.
        is_settled = outcome.is_sure and not outcome.has_constants and not outcome.has_counts
        if self._step.trains or is_settled or self._plans_memory or outcome.comparison.differences:
            return outcome
        self._rows.skipped = 0.0
        # The slices of the run, as a few more rows in the first one would not be those.
        sizes = self._rows.real_sizes
        if sum(sizes) <= self._most_seen:
            return outcome
        try:
            with overridden(self, _looks_again=True):
                return self._refine(outcome, self._with_slices(self._whole.observe(sum(sizes)), sizes))
        except SlicesFail:
            raise
        except Exception as error:  # noqa: BLE001  a bonus, as above; the step itself will raise it, or not
            traceback.clear_frames(error.__traceback__)
            return outcome

    def what_micro_batches_change(self, outcome: Outcome) -> str:
        """What is not as on one device if slices are cut further, in a sentence; empty if nothing."""
        # Norms run in eval mode on both sides, so the comparison does not show
        # what cutting further changes.
        if self._step.norms:
            return f"{NOT_ALIKE}{', '.join(self._step.norms[:3])} would normalize by micro-batch."
        # Held at once they need the memory of the step in one piece, which
        # is what they should save.
        if self._sliced.has_waited:
            return "they wait for each other in the step (a collective, or a metric's value), so all are held at once."
        found = outcome.comparison
        if found.differences:
            return f"{NOT_ALIKE}on {found.rows} rows, {found.summary()}."
        return ""

    def _check_iterators(self) -> None:
        """Refuses what came of a step that takes items from iterators, which cannot be given back.

        Raises:
            SlicesFail: it does.
            NotRehearsed: it does by now.
        """
        if self._requested:
            names = ", ".join(dict.fromkeys(self._requested))
            # In its real steps replicas share an iterator that one of them has made; a shadow cannot.
            if self._looks_again:
                raise NotRehearsed(f"it takes items of {names}, which cannot be given back.") from None
            raise SlicesFail(
                f"It takes items of {names}, and what belongs to the rows of a slice cannot be found out.",
                "For all devices to take part, let a loader of the trainer give them (CombinedLoader).",
            ) from None

    def _refine(self, first: Outcome, second: Outcome) -> Outcome:
        """The outcome of both together: a rule must fit on all rows that were tried."""
        findings = refined(first.findings, second.findings)
        logged = refined(first.logged, second.logged)
        # Differences of values follow from rules, and are worked out anew from the rules of both.
        of_values = ("logged value", "output", "kept value")
        seen_later = [one for one in second.comparison.differences if one[0] not in of_values]
        seen_at_once = [one for one in first.comparison.differences if one[0] not in of_values]
        base = second if seen_later and not seen_at_once else first
        comparison = base.comparison
        comparison.differences = seen_at_once or seen_later
        comparison.changed |= first.comparison.changed | second.comparison.changed
        # Notes on rules and on values that were skipped are written again by the comparer below.
        comparison.notes = [note for note in comparison.notes if "put together" not in note]
        comparison.skipped = [text for text in comparison.skipped if not text.startswith(of_values)]
        comparer = Comparer(self._step.tolerance, base.unstable, base.rounding, draws=base.judge.draws)
        comparer.values("logged value", logged, comparison)
        comparer.values("output", {path: findings[path] for path in findings if not is_kept(path)}, comparison)
        comparer.values("kept value", {path: findings[path] for path in findings if is_kept(path)}, comparison)
        return Outcome(
            comparison=comparison,
            judge=base.judge,
            findings=findings,
            logged=logged,
            unstable=base.unstable,
            rounding=base.rounding,
        )

    def _on_rows(self, factor: int) -> Outcome:
        """What is found on a few rows; on the whole batch, where the step does not run on a few."""
        sizes = self._rows.unequal_sizes(factor)
        self._most_seen = max(self._most_seen, sum(sizes))
        try:
            whole = self._observe_whole(sum(sizes))
        except (RehearsalEnded, CollectiveInRehearsal, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001  the step itself will raise it, or not
            traceback.clear_frames(error.__traceback__)
            # No rows would do: the step raises because it is watched, and trains all the same.
            if is_refused_by_modes(error):
                raise SlicesFail(
                    "It calls the constructor of a tensor subclass, which torch refuses while a rehearsal watches "
                    "operators, so that nothing is known of its slices.",
                    "For all devices to take part, use tensor.as_subclass(Class) in its place.",
                ) from None
            if sum(sizes) == self._step.call.num_rows or self._looks_again:
                # All rows were tried already; or it is a look, which takes a few rows and no more.
                raise NotRehearsed(f"on {sum(sizes)} rows it raises {in_one_line(error)}") from None
        else:
            return self._with_slices(whole, sizes)
        return self._on_real_rows()  # a step that needs more rows than a few

    def _on_real_rows(self) -> Outcome:
        """What is found on all rows, in the slices of the run, where a few rows are too few."""
        sizes = self._rows.real_sizes
        self.least_rows = min(sizes)
        whole = self._whole.observe(sum(sizes))
        return self._with_slices(whole, sizes)

    def _observe_whole(self, num_rows: int) -> Observation:
        """Runs rows as one device; where they do not fit, what backward needs is on the host."""
        try:
            return self._whole.observe(num_rows)
        except torch.OutOfMemoryError as error:
            # What is on the host already stays where it is. Worse, autograd would hold such a value of its own through
            # the hook that hands it back, in a cycle that nothing can see, where the forward fails again.
            if self._step.saves_on_host or is_host(self._step.replicas.root.device):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
        free_garbage()  # as shadows do, in reference cycles
        # From here on for every run of this rehearsal: slices hold as much as the whole.
        self._step.saves_on_host = True
        return self._whole.observe(num_rows)

    def _with_slices(self, whole: Observation, sizes: tuple[int, ...]) -> Outcome:
        """What is found beside what one device has done."""
        self._refuse_what_slices_cannot_do(whole)
        try:
            judge, sliced = self._sliced.observe(sizes, whole, self._loss_reduction)
            lost = lost_number(whole, sliced)
            # From one such step on the run has no other numbers. A look at later batches says what differs, and no
            # more.
            if lost and not self._looks_again:
                raise NumbersLost(lost)
        except (RehearsalEnded, CollectiveInRehearsal):
            raise
        # A step by hand says itself what slices cannot do in it.
        except WholeBatchError as error:
            traceback.clear_frames(error.__traceback__)
            raise SlicesFail(error.reason, error.advice) from None
        # It drops the gradients of the first replica alone, as by self.optimizers().zero_grad().
        except OwnBackwardError as error:
            traceback.clear_frames(error.__traceback__)
            raise SlicesFail(REASON, ADVICE) from None
        # A collective of the step needs one shape on all ranks, and slices
        # here are unequal on purpose.
        except UnequalShapesError as error:
            traceback.clear_frames(error.__traceback__)
            if len(set(sizes)) == 1:
                raise SlicesFail(f"On slices of {sizes[0]} rows each, {error}", "") from None
            return self._on_equal_slices(sizes)
        except Exception as error:  # noqa: BLE001  whatever a slice does not survive, the whole batch did
            traceback.clear_frames(error.__traceback__)
            try:
                return self._on_real_slices(error, sizes)
            except (NotRehearsed, CollectiveInRehearsal, torch.OutOfMemoryError):  # or there is no room for it
                reason = f"in slices of {sizes[0]} and fewer rows it raises {in_one_line(error)}"
                raise NotRehearsed(reason) from None
        self._step.sandbox.real_module.note_slices()
        if self._finds_drawn_rows(whole, sliced, sizes):
            # Once: from here on all runs know of them.
            return self._with_slices(self._whole.observe(sum(sizes)), sizes)
        judge.drawn_rows = self._step.sandbox.rows_of_draws
        runs = BothRuns(self._whole, self._sliced, sizes)
        check = SliceCheck(runs, whole, loss_reduction=self._loss_reduction, is_look=self._looks_again)
        return check.outcome(judge, sliced)

    def _finds_drawn_rows(self, whole: Observation, sliced: Observation, sizes: tuple[int, ...]) -> bool:
        """Whether rows have drawn as if they were something else, so that slices did not draw what one device did."""
        sandbox = self._step.sandbox
        if sandbox.rows_of_draws or len(whole.draws.shapes) != 1:
            return False
        found = find_drawn_rows(whole.draws.shapes[0], sliced.draws.shapes, sizes)
        sandbox.rows_of_draws = tuple(one for one in found if not one.is_usual)
        # Flattened ones were alike in all rows, as the last dim is that of their features.
        return any(one.dim for one in sandbox.rows_of_draws) and len({*whole.draws.per_row, *sliced.draws.per_row}) > 1

    def _refuse_what_slices_cannot_do(self, whole: Observation) -> None:
        """Looks at what one device has done for what is of the whole batch.

        Raises:
            SlicesFail: it has done such a thing.
        """
        reached = self._step.sandbox.real_module.reached
        if reached:
            raise SlicesFail(
                f"It changes {', '.join(reached[:3])} of the module itself, to which something outside of it leads (a "
                "global, a class, an object that has kept it, code compiled by torch.jit), and every slice would, "
                "instead of its own.",
                "For all devices to take part, go by self.",
            )
        # By hand, optimizers write parameters inside of the step, as they should.
        if self._step.sandbox.last.written and not self._step.by_hand:
            raise writes_parameters(self._step.sandbox.last.written)
        # By hand, slices hear of it when they ask for one.
        if whole.keeps_graph:
            raise SlicesFail("Its backward creates a graph of the gradients (create_graph=True).", "")
        if whole.runs_backward:
            raise SlicesFail(REASON, ADVICE)
        if whole.trained_tensors:
            names = ", self.".join(sorted(whole.trained_tensors)[:3])
            raise SlicesFail(
                f"Its backward gives gradients to self.{names}, which is no parameter: nothing sums what slices have.",
                "For all devices to take part, make it an nn.Parameter.",
            )
        if whole.set_on_parameters:
            names = ", ".join(whole.set_on_parameters[:3])
            raise SlicesFail(
                f"It, or its backward, sets attributes of parameters ({names}), which in slices are of the rows of a "
                "slice, and what reads them, such as an optimizer, finds those of the first replica alone.",
                "For all devices to take part, keep on parameters what an optimizer or a hook between steps sets.",
            )
        if whole.read_back:
            names = ", ".join(map(repr, sorted(whole.read_back)))
            raise SlicesFail(
                f"It reads {names} in the Trainer's metrics after it has logged it, and slices log together when all "
                "of them have ended.",
                "For all devices to take part, use the value itself, or read it in on_train_batch_end.",
            )
        self._refuse_other_logs()

    def _refuse_other_logs(self) -> None:
        """Raises where one device has logged what no slice can be asked for.

        Raises:
            SlicesFail: it has.
        """
        names = self._step.sandbox.logged_elsewhere
        if names:
            raise SlicesFail(
                f"It logs {', '.join(map(repr, names[:3]))} past self.log, by a method of the module that was kept "
                "elsewhere or by super(), where every slice would log for itself.",
                "For all devices to take part, call self.log in the step.",
            )

    def _on_equal_slices(self, sizes: tuple[int, ...]) -> Outcome:
        """Rehearses on equal slices; batches that cannot be cut evenly stay whole from then on."""
        # The smallest size, so that there are enough rows for all of them.
        equal = (min(sizes),) * len(sizes)
        self.needs_equal_slices = True
        whole = self._whole.observe(sum(equal))
        return self._with_slices(whole, equal)

    def _on_real_slices(self, failure: Exception, sizes: tuple[int, ...]) -> Outcome:
        """Rehearses on the slices of the whole batch, after those of a few rows have failed.

        Raises:
            SlicesFail: they do.
            NotRehearsed: this is a look beside what a rehearsal has found, which stands.
        """
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure
        # A look says nothing of what it could not run. But results that were put together in other batches, and by no
        # rule any more, are what it was for.
        if self._looks_again and not isinstance(failure, GatherError):
            raise NotRehearsed(in_one_line(failure)) from None
        # A few rows may be too few for a slice; those of the batch are what the run will have.
        if sizes != self._rows.real_sizes and not self._looks_again:
            return self._on_real_rows()
        # These have a remedy of their own, which the general advice would hide.
        if isinstance(failure, SharedWriteError):
            raise writes_parameters([failure.name])
        if isinstance(failure, NumbersLost):
            rows = "1 row" if max(sizes) == 1 else f"{min(sizes)} to {max(sizes)} rows"
            raise SlicesFail(
                f"In slices of {rows} it gives nan; {failure}.",
                "For all devices to take part, let it give numbers on any number of rows.",
            )
        if isinstance(failure, GatherError):
            raise SlicesFail(
                f"What its slices return cannot be put together. {in_one_line(failure).partition(': ')[2]}",
                "For all devices to take part, let it return tensors, numbers, or containers and plain objects of "
                "them.",
            )
        raise SlicesFail(
            f"It runs on the whole batch, but on a slice it raises {in_one_line(failure)}",
            "For all devices to take part, let it run on any number of rows.",
        )
