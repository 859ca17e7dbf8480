"""Before the first real step of a stage, the step is rehearsed: on a few rows, as one device and in unequal slices.

    rows --whole--> shadow ------------------> loss, gradients, outputs, logs, state --+
      |                                                                                +--> rules, one line
      +--3 + 2----> shadow's replicas -------> the same, merged by what reproduces  ---+

What is checked is what will run: the strategy's own step, pointed at shadows. What cannot be rehearsed trains all the
same, and one line says why.
"""

import copy
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_dpx.errors import GatherError, ParityError, ReplicationError, SharedWriteError
from lightning_dpx.lightning.batch_writes import BatchWrites, unlike_one_batch
from lightning_dpx.lightning.expected_gradient import names_gradients
from lightning_dpx.lightning.gradient_hooks import GradientHooks
from lightning_dpx.lightning.lightning_api import pl, rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.lightning_compat import set_trainer, states_of, trainer_of
from lightning_dpx.lightning.logging import StepLog, path_of
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics, recorded_calls
from lightning_dpx.lightning.new_replicas import new_replicas, private_attributes
from lightning_dpx.lightning.processes.connect import gather_objects
from lightning_dpx.lightning.rehearsal.parity_report import (
    OUTSIDE,
    SETTING,
    Comparer,
    Comparison,
    JudgingRules,
    Logged,
    Observation,
    changed_again,
    chosen,
    drew_alike,
    found_at,
    is_kept,
    python_state,
    refined,
    undecided,
    unstable_between,
)
from lightning_dpx.lightning.rehearsal.shadow import (
    Guest,
    ShadowReplicas,
    make_shadow,
    pointing_at_shadow,
    shared_parameters,
    with_copied_optimizers,
)
from lightning_dpx.lightning.transfers import Transfer
from lightning_dpx.lightning.whole_batches import WholeBatches
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.replicas import (
    BatchSlice,
    ListWatch,
    MergeRules,
    ReplicaSet,
    changed_numbers,
    find_lists,
    first_loss,
    numbers_of,
    without_graphs,
)
from lightning_dpx.replicas.collectives import UnequalShapesError
from lightning_dpx.replicas.merging import Finding, Rule
from lightning_dpx.replicas.same_draws import CollectiveInRehearsal
from lightning_dpx.replicas.shared_iterators import code_iterators_guarded
from lightning_dpx.replicas.tolerance import Tolerance
from lightning_dpx.shifting import applied_shift, forget_shift, shift_like
from lightning_dpx.step import TrainingStep
from lightning_dpx.torch_compat import tree_leaves

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

Verify = Literal["warn", "raise", "first", "off"]
_NOT_ALIKE = "they are not what one device gives: "
_AT_MOST = 5  # more rehearsals of a stage, one after each batch with a value that was zero or not there before
_MORE_ROWS = 8  # times as many, where what the first rows show fits several rules by chance
# Where more rows show no more, other rows: those after so large a part of what is left.
_OTHER_PARTS = (1.0, 0.5, 0.25, 0.75, 0.125, 0.625)


class NotRehearsed(Exception):  # noqa: N818  the step goes on without
    """The step cannot be rehearsed; the message says why."""


class ParametersAppear(Exception):  # noqa: N818  one batch goes whole, the next one is rehearsed
    """The step makes parameters, which replicas would draw each for itself; the message names them."""


class SlicesFail(Exception):  # noqa: N818  the stage goes on with whole batches
    """The step runs on the whole batch, but not on its slices."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the trainer called.

    Attributes:
        name: Of the step.
        args: The batch and the indices.
        kwargs: What else was given.
        active: Indices of the replicas that take part.
        num_rows: Of the batch.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    active: tuple[int, ...]
    num_rows: int

    @property
    def dataloader_idx(self) -> int:
        """Of an evaluation with several loaders."""
        return self.args[2] if self.name != "training_step" and len(self.args) > 2 else 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a rehearsal on some rows has shown."""

    comparison: Comparison
    judge: JudgingRules
    findings: dict[str, Finding] = field(default_factory=dict)
    logged: dict[str, Finding] = field(default_factory=dict)
    unstable: frozenset[str] = frozenset()

    def settle_numbers(self) -> None:
        """Of numbers that several rules fit still, and that may be added to or set, none is put together.

        Where others than the first slice have added nothing, the step is rehearsed again as soon as one does.
        """
        for path in self.judge.numbers_among(self.findings):
            rules = self.findings[f"self.{path}"].rules
            kinds = {rule.kind for rule in rules}
            adds_nothing = "first" in kinds and not kinds.isdisjoint({"added", "sum"})
            if not adds_nothing and ("added" not in kinds or len(kinds) == 1):
                continue
            del self.findings[f"self.{path}"]
            self.judge.settle(path, ())
            if adds_nothing:
                self.comparison.changed.discard(path)
            else:
                self.comparison.blame_unsettled(path)

    @property
    def is_sure(self) -> bool:
        """Whether more rows could show nothing else."""
        return not self._unsure

    @property
    def is_ambiguous(self) -> bool:
        """Whether other rows could: several rules fit, of values that were not zero."""
        return any(len(one.rules) > 1 and one.rules[0].kind != "by type" for one in self._unsure)

    @property
    def _unsure(self) -> list[Finding]:
        found = (*self.findings.values(), *self.logged.values())
        return [one for one in found if not one.is_sure and one.path not in self.unstable]


class Rehearsals:
    """The rehearsals of a run, and the rules that they found.

    Args:
        strategy: Whose steps are rehearsed.
        verify: What happens when they differ from one device.
        loss_reduction: As given.
    """

    def __init__(self, strategy: Any, verify: Verify, loss_reduction: str) -> None:
        self._strategy = strategy
        self._verify = verify
        self._loss_reduction = loss_reduction
        self._done: set[tuple[str, int]] = set()
        self._rules: dict[tuple[str, int], MergeRules] = {}
        self._found: dict[tuple[str, int], tuple[dict[str, Finding], dict[str, Finding]]] = {}
        self._again: dict[tuple[str, int], int] = {}  # how often a stage was rehearsed again
        self._said: set[str] = set()
        self._agreed = False

    def forget(self) -> None:
        """The run is over."""
        self._done.clear()
        self._rules.clear()
        self._found.clear()
        self._again.clear()
        self._agreed = False

    def reopen(self, name: str) -> None:
        """The next step of this stage is rehearsed, as its first one was."""
        for key in [key for key in self._done if key[0] == name]:
            self._done.discard(key)
            self._found.pop(key, None)
            self._again.pop(key, None)

    def rules(self, name: str, dataloader_idx: int) -> MergeRules:
        """How the results of a stage are merged."""
        key = name, dataloader_idx
        if key not in self._rules:
            self._rules[key] = MergeRules(loss_reduction="sum" if self._loss_reduction == "sum" else "mean")
        return self._rules[key]

    def before_step(
        self, name: str, slices: Sequence[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Rehearses the step, if it is the first one on several replicas; says whether it did.

        Raises:
            ParityError: it is not what it is on one device, and ``verify="raise"``.
        """
        idx = args[2] if name != "training_step" and len(args) > 2 else 0
        key = name, idx
        is_open = key not in self._done or self._is_outdated(key)
        rehearses = is_open and len(slices) > 1 and self._verify != "off"
        if rehearses:
            self._again[key] = self._again.get(key, -1) + 1
            self._done.add(key)
            rows = sum(batch_slice.num_rows for batch_slice in slices)
            active = tuple(batch_slice.replica.index for batch_slice in slices)
            self._rehearse(Call(name=name, args=args, kwargs=kwargs, active=active, num_rows=rows))
        elif key not in self._done and len(slices) > 1:
            self._done.add(key)
            self._strategy.session.replicas.python_state.share_iterators_of_code()  # a rehearsal would have found them
        if name == "training_step" and not self._agreed:
            self._agreed = True
            self._agree()
        return rehearses

    def _is_outdated(self, key: tuple[str, int]) -> bool:
        """Whether the step does what no rehearsal has seen; not for ever, as some steps log another name each time."""
        return key in self._rules and self._rules[key].is_outdated and self._again.get(key, 0) < _AT_MOST

    def _agree(self) -> None:
        """Of several processes, all take the loss for a sum if one of them saw that it is."""
        strategy = self._strategy
        if self._loss_reduction != "auto" or strategy.num_processes == 1:
            return
        rules = strategy.session.step.rules
        mine = rules.loss_reduction
        if "sum" in gather_objects("agreeing on the loss", mine):
            rules.loss_reduction = "sum"

    def _rehearse(self, call: Call) -> None:
        strategy = self._strategy
        key = (call.name, call.dataloader_idx)
        before = self.rules(*key)
        before.is_outdated = False
        news = self._take_news(call.name, before)
        try:
            requested: list[str] = []
            with code_iterators_guarded(strategy.lightning_module, requested), uncompiled():
                rehearsal = _Rehearsal(strategy, call, self._loss_reduction, requested)
                outcome = rehearsal.run()
        except SlicesFail as failure:
            if self._left_micro_batches(call, _NOT_ALIKE + failure.reason) or self._left_slices(call, failure):
                return
            strategy.session.whole_batches.give_whole(call.name, failure.reason, failure.advice)
            return
        except ParametersAppear as made:
            self.reopen(call.name)
            strategy.session.whole_batches.give_next_whole(
                call.name, f"The step makes parameters in it: {made}.", "Make them before fit, or in configure_model."
            )
            return
        except NotRehearsed as reason:
            if self._left_micro_batches(call, f"they could not be checked: {reason}"):
                return
            self._say(f"dpx: {call.name} was not checked against one device: {reason}")
            return
        except BaseException as error:  # such as Ctrl-C; any other error of the step is announced, and ends nothing
            error.add_note(f"In the rehearsal of {call.name}, which checks its slices against one device.")
            raise
        if self._left_micro_batches(call, rehearsal.what_micro_batches_change(outcome)):
            return
        if rehearsal.needs_equal_slices:
            strategy.session.whole_batches.keep_unequal(call.name)
        rules = self._joined(key, outcome, news)
        if self._again[key] and not (news and strategy.num_processes == 1):
            rules.loss_reduction = before.loss_reduction
        self._rules[key] = rules
        strategy.session.metrics.take_rules(rehearsal.metric_rules)
        if call.name == "training_step":
            strategy.session.step.rules = rules
        if self._verify == "first" and rehearsal.norms and not outcome.comparison.differences:
            norms = ", ".join(rehearsal.norms[:3])
            strategy.session.whole_batches.give_whole(
                call.name,
                f"{norms} would normalize by slice, and not by batch as on one device.",
                "Trainer(sync_batchnorm=True) makes it the whole batch's; verify='warn' runs slices all the same.",
            )
        else:
            self._tell(call.name, outcome.comparison, is_first=bool(news) or not self._again[key])

    def _left_micro_batches(self, call: Call, reason: str) -> bool:
        """Micro-batches that nobody asked for are given up where there is a reason."""
        if not reason or call.name != "training_step":
            return False
        left: bool = self._strategy.session.memory.leave_micro_batches(reason)
        return left

    def _left_slices(self, call: Call, failure: SlicesFail) -> bool:
        """Where micro-batches fail, slices of several devices may not: those are rehearsed instead."""
        replicas = self._strategy.session.replicas
        if not replicas.cuts_slices or len(replicas.devices) == 1:
            return False
        replicas.partition.leave_slices(training=call.name == "training_step")
        self._say(f"dpx: {call.name} has its slices in one piece, not in micro-batches: {failure.reason}")
        sizes = replicas.sizes(call.num_rows)
        active = tuple(index for index, size in enumerate(sizes) if size)
        if len(active) > 1:
            self._rehearse(replace(call, active=active))
        return True

    def _take_news(self, name: str, rules: MergeRules) -> frozenset[str]:
        """What a step has logged or returned for the first time since it was rehearsed, which is said here."""
        news = frozenset(rules.news)
        rules.news.clear()
        if news:
            rules.seen = (rules.seen or frozenset()) | news  # once each, whatever the next rehearsal sees of it
            paths = ", ".join(sorted(path.removeprefix("result.") for path in news))
            self._say(
                f"dpx: {name} has done more in the last batch than when it was checked ({paths}): that was put "
                "together unchecked there (an attribute holds what slices made of it), and the step is checked again."
            )
        return news

    def _tell(self, name: str, comparison: Comparison, *, is_first: bool) -> None:
        """Says what was found, or acts on it."""
        if not comparison.differences:
            if is_first:
                self._say(comparison.line())
        elif self._verify == "raise":
            raise ParityError(comparison.complaint())
        elif self._verify == "first":
            text = f"on {comparison.rows} rows its slices differ from one device: {comparison.summary()}."
            self._strategy.session.whole_batches.give_whole(name, text, "verify='warn' runs its slices all the same.")
        else:
            rank_zero_warn(comparison.complaint())

    def _joined(self, key: tuple[str, int], outcome: Outcome, news: frozenset[str]) -> MergeRules:
        """The rules that a rehearsal found, together with those of an earlier one that saw only zeros, or not all."""
        findings = outcome.findings
        logged = outcome.logged
        earlier = self._found.get(key)
        if earlier is not None and news:
            earlier = tuple({path: one for path, one in own.items() if path not in news} for own in earlier)  # type: ignore[assignment]
        if earlier is not None:
            findings = refined(earlier[0], findings)
            logged = refined(earlier[1], logged)
            found = {path: one.rules[0].kind for path, one in {**findings, **logged}.items() if one.rules}
            sums = [path.removeprefix("result.") for path in self._rules[key].undecided if found.get(path) == "sum"]
            if sums:
                rank_zero_warn(
                    f"dpx: {', '.join(sums)} of {key[0]} had been zero until the last batch, so its values were merged "
                    "by their type there; they add up, as is seen now."
                )
        self._found[key] = findings, logged
        outputs = chosen(findings)
        values = chosen(logged)
        known = MergeRules(outputs, values, outcome.judge.loss_reduction)
        known.undecided = undecided(findings) | undecided(logged)
        known.seen = (self._rules[key].seen or frozenset()) | findings.keys() | logged.keys()
        known.same_batch_sizes = outcome.judge.same_batch_sizes
        known.buffers = outcome.judge.buffers
        known.metrics_give_slices = outcome.judge.metrics_give_slices
        for place, number in outcome.judge.appended.items():
            if all(one.rules for one in found_at(place, findings)):
                known.appended[place] = number
        known.seen_attributes = self._rules[key].seen_attributes | outcome.comparison.changed
        known.times_unseen = self._rules[key].times_unseen
        known.rebound = {path for path in outcome.judge.numbers_among(findings) if f"self.{path}" in outputs}
        if known.undecided and self._again[key] == _AT_MOST:
            names = ", ".join(sorted(path.removeprefix("result.") for path in known.undecided))
            rank_zero_warn(
                f"dpx: {names} of {key[0]} was zero in {_AT_MOST + 1} rehearsals and not in batches, so nothing is "
                "known about whether it adds up over slices; it is merged by its type (floating-point numbers are "
                "averaged, integers added)."
            )
            known.undecided = frozenset()
        return known

    def _say(self, text: str) -> None:
        if text not in self._said:
            rank_zero_info(text)
        self._said.add(text)


class _Rehearsal:
    """One stage's rehearsal.

    Args:
        strategy: Whose step it is.
        call: What the trainer called.
        loss_reduction: As given.
        requested: Gets the iterators that were asked for an item, though it could not be given back.

    Attributes:
        metric_rules: How arguments of metrics are joined, as was learned.
        needs_equal_slices: Whether the step runs in slices of one size only.
        norms: Batch norms that normalize by their slice.
        gives_slices: Whether metrics that are called as functions give each micro-batch its own value.
        waits: Whether slices have waited for each other.
    """

    def __init__(self, strategy: Any, call: Call, loss_reduction: str, requested: list[str]) -> None:
        self._strategy = strategy
        self._call = call
        self._loss_reduction = loss_reduction
        self._module: pl.LightningModule = strategy.lightning_module
        self._session: Session = strategy.session
        self._replicas = self._session.replicas
        self._trains = call.name == "training_step"
        self._by_hand = self._trains and not self._module.automatic_optimization
        self.norms: list[str] = []
        self._writes = BatchWrites()
        self._watches_batch = self._session.batch_writes.is_watched
        self._requested = requested
        self.gives_slices = self._trains and not self._by_hand and self._replicas.cuts_slices
        self.waits = False
        self._skipped = 0.0  # of the rows that are not rehearsed, the part in front of those that are
        self.needs_equal_slices = False
        self.metric_rules = copy.deepcopy(self._session.metrics.rules_by_path())
        self._guest = Guest(self._module.trainer, self._module, self._replicas.replicas, self._replicas.devices)
        self._tolerance = _tolerance_of(strategy, self._module, call)

    def run(self) -> Outcome:
        """What was found.

        Raises:
            NotRehearsed: nothing could be.
            SlicesFail: the slices raise where the whole batch does not.
        """
        with self._guest.visit(calls_hooks=self._by_hand):
            try:
                outcome = self._on_own_values() or self._on_all_rows()
                self._check_iterators()
                outcome.settle_numbers()
                return outcome
            except (NotRehearsed, SlicesFail, ParametersAppear):
                self._check_iterators()
                raise
            except CollectiveInRehearsal as error:
                raise NotRehearsed(f"it calls torch.distributed itself ({error}).") from None
            except Exception as error:  # noqa: BLE001  a guest's failure is not the host's
                traceback.clear_frames(error.__traceback__)
                self._check_iterators()
                raise NotRehearsed(f"the rehearsal failed with {_described(error)}") from None

    def _on_own_values(self) -> Outcome | None:
        """What is found where micro-batches wait for no value of a metric; ``None`` if it is not as on one device."""
        if not (self.gives_slices and self._session.metrics):
            return None
        with suppress(NotRehearsed, SlicesFail):
            outcome = self._on_all_rows()
            if not outcome.comparison.differences:
                return outcome
        self.gives_slices = False
        return None

    def _on_all_rows(self) -> Outcome:
        """What is found on a few rows, and on more and other ones where those show too little."""
        self._skipped = 0.0
        self.waits = False
        outcome = self._on_rows(1)
        if not outcome.is_sure:
            with suppress(NotRehearsed, SlicesFail, ParametersAppear):
                outcome = self._refine(outcome, self._on_rows(_MORE_ROWS))
        for part in _OTHER_PARTS:
            if outcome.is_ambiguous:
                self._skipped = part
                with suppress(NotRehearsed, SlicesFail, ParametersAppear):
                    outcome = self._refine(outcome, self._on_rows(1))
        return outcome

    def what_micro_batches_change(self, outcome: Outcome) -> str:
        """What is not as on one device if slices are cut further, in a sentence; empty if nothing."""
        if self.norms:
            return f"{_NOT_ALIKE}{', '.join(self.norms[:3])} would normalize by micro-batch."
        if self.waits:
            return "they wait for each other in the step (a collective, or a metric's value), so all are held at once."
        found = outcome.comparison
        return f"{_NOT_ALIKE}on {found.rows} rows, {found.summary()}." if found.differences else ""

    def _check_iterators(self) -> None:
        """What came of a rehearsal says nothing about a step that takes items which cannot be given back.

        Raises:
            SlicesFail: it does.
        """
        if self._requested:
            names = ", ".join(dict.fromkeys(self._requested))
            raise SlicesFail(
                f"It takes items of {names}, and what belongs to the rows of a slice cannot be found out.",
                "For all devices to take part, let a loader of the trainer give them (CombinedLoader).",
            ) from None

    def _refine(self, first: Outcome, second: Outcome) -> Outcome:
        """Both together: rules fit on all rows that were tried, or are none."""
        findings = refined(first.findings, second.findings)
        logged = refined(first.logged, second.logged)
        of_values = ("logged value", "output", "kept value")
        seen_later = [one for one in second.comparison.differences if one[0] not in of_values]
        seen_at_once = [one for one in first.comparison.differences if one[0] not in of_values]
        base = second if seen_later and not seen_at_once else first
        comparison = base.comparison
        comparison.differences = seen_at_once or seen_later
        comparison.changed |= first.comparison.changed | second.comparison.changed
        comparison.notes = [note for note in comparison.notes if "put together" not in note]
        comparison.skipped = [text for text in comparison.skipped if not text.startswith(of_values)]
        comparer = Comparer(self._tolerance, base.unstable)
        comparer.values("logged value", logged, comparison)
        comparer.values("output", {path: findings[path] for path in findings if not is_kept(path)}, comparison)
        comparer.values("kept value", {path: findings[path] for path in findings if is_kept(path)}, comparison)
        return Outcome(
            comparison=comparison, judge=base.judge, findings=findings, logged=logged, unstable=base.unstable
        )

    def _on_rows(self, factor: int) -> Outcome:
        sizes = unequal_sizes(self._call.num_rows, len(self._call.active), factor)
        before = self._state(self._shadow())
        try:
            whole = self._whole(self._few_rows(sum(sizes))[0], sum(sizes))
        except (NotRehearsed, SlicesFail, ParametersAppear, CollectiveInRehearsal):
            raise
        except Exception as error:  # noqa: BLE001  the step itself will raise it, or not
            traceback.clear_frames(error.__traceback__)
            if sum(sizes) == self._call.num_rows:
                raise NotRehearsed(f"on {sum(sizes)} rows it raises {_described(error)}") from None
            sizes = self._real_sizes  # a step that needs more rows than a few
            whole = self._whole(self._call.args[0], sum(sizes))
        return self._with_slices(before, whole, sizes)

    @property
    def _real_sizes(self) -> tuple[int, ...]:
        return tuple(size for size in self._replicas.sizes(self._call.num_rows) if size)

    def _with_slices(self, before: Mapping[str, Any], whole: Observation, sizes: tuple[int, ...]) -> Outcome:
        if self._guest.written and not self._by_hand:
            raise _writes_parameters(self._guest.written)
        try:
            judge, sliced = self._sliced(sizes, whole, self._loss_reduction)
        except (NotRehearsed, SlicesFail, ParametersAppear, CollectiveInRehearsal):
            raise
        except UnequalShapesError as error:
            traceback.clear_frames(error.__traceback__)
            if len(set(sizes)) == 1:
                raise SlicesFail(f"On slices of {sizes[0]} rows each, {error}", "") from None
            return self._on_equal_slices(before, sizes)
        except Exception as error:  # noqa: BLE001  whatever a slice does not survive, the whole batch did
            traceback.clear_frames(error.__traceback__)
            try:
                return self._on_real_slices(before, error, sizes)
            except (NotRehearsed, CollectiveInRehearsal, torch.OutOfMemoryError):  # or there is no room for it
                reason = f"in slices of {sizes[0]} and fewer rows it raises {_described(error)}"
                raise NotRehearsed(reason) from None
        if self._by_hand and self._loss_reduction == "auto" and self._differs(before, whole, sliced, judge, sizes):
            by_sum = self._sliced(sizes, whole, "sum")
            if not self._differs(before, whole, by_sum[1], by_sum[0], sizes):
                judge, sliced = by_sum
        comparison = self._compare(before, whole, sliced, judge, sizes, frozenset())
        unstable: frozenset[str] = frozenset()
        may_read = len(self._replicas.devices) > 1 and names_gradients(self._module)
        if (may_read or comparison.differences) and self._reads_old_gradients(whole, sizes):
            raise SlicesFail(
                "It reads gradients that the step before has left in .grad, which the first replica alone has.",
                "For all devices to take part, read them in on_before_optimizer_step or on_train_batch_end.",
            )
        if comparison.differences:
            alike = drew_alike(whole, sliced)
            again = self._whole(self._few_rows(sum(sizes))[0], sum(sizes), other_draws=not alike)
            unstable = unstable_between(whole, again, self._tolerance)
            if alike or not (whole.drew or whole.left_alone or again.left_alone):
                # No draws explain it: something outside the module goes on from run to run, and cannot be put back.
                trained = ("loss", "gradient:", "new weight:")
                unstable = frozenset(path for path in unstable if not path.startswith(trained))
            of_structure = frozenset(path for path in unstable if path.startswith("structure:"))
            unstable = (unstable & comparison.apart) | of_structure  # what agreed all the same has been compared
            if unstable:
                judge, sliced = self._sliced(sizes, whole, self._loss_reduction, unstable)
                comparison = self._compare(before, whole, sliced, judge, sizes, unstable)
        kinds = {kind for kind, _ in comparison.differences}
        trained_alike = not kinds & {"loss", "gradient", "new weight"}
        # A decayed count grows like any other from zero, and a number that is set looks like one that is added to it.
        goes_on = comparison.kept or judge.unsettled or "sum" in judge.buffers.values()
        if goes_on and trained_alike and not unstable and not self._by_hand:
            self._compare_second_steps(judge, sizes, comparison, whole)
        return Outcome(
            comparison=comparison,
            judge=judge,
            findings={**judge.findings, **judge.kept_findings},
            logged=judge.logged_findings,
            unstable=unstable,
        )

    def _reads_old_gradients(self, whole: Observation, sizes: tuple[int, ...]) -> bool:
        """Whether the step does something else where the step before has left no gradients, and only then."""
        if self._by_hand or not self._trains:
            return False
        rows = self._few_rows(sum(sizes))[0]
        again = self._whole(rows, sum(sizes))
        if unstable_between(whole, again, self._tolerance):
            return False
        without = self._whole(rows, sum(sizes), after_a_step=False)
        return bool(unstable_between(whole, without, self._tolerance))

    def _on_equal_slices(self, before: Mapping[str, Any], sizes: tuple[int, ...]) -> Outcome:
        """A step whose collectives need tensors of one shape; batches that cannot be cut evenly stay whole then."""
        equal = (min(sizes),) * len(sizes)
        self.needs_equal_slices = True
        whole = self._whole(self._few_rows(sum(equal))[0], sum(equal))
        return self._with_slices(before, whole, equal)

    def _compare_second_steps(
        self, judge: JudgingRules, sizes: tuple[int, ...], out: Comparison, first: Observation
    ) -> None:
        """What a step keeps may be of a slice by design; unless the next step uses it, or adds to it."""
        try:
            whole = self._whole(self._few_rows(sum(sizes))[0], sum(sizes), num_steps=2)
        except (NotRehearsed, SlicesFail, ParametersAppear, CollectiveInRehearsal):
            raise
        except Exception as error:  # noqa: BLE001  two steps on the same rows may be one too many
            traceback.clear_frames(error.__traceback__)
            out.skipped.append(f"a second step ({_described(error)})")
            judge.buffers = {name: rule for name, rule in judge.buffers.items() if rule != "sum"}
            return
        try:
            again, sliced = self._sliced(sizes, whole, judge.loss_reduction, earlier=[judge])
        except (NotRehearsed, SlicesFail, ParametersAppear, CollectiveInRehearsal):
            raise
        except Exception as error:  # noqa: BLE001  such as a state of too many rows
            traceback.clear_frames(error.__traceback__)
            out.blame_kept(f"it raises {_described(error).removesuffix('.')}")
            return
        for path in judge.unsettled:
            fits = (*SETTING, Rule(kind="first"))  # what steps set is the same after a second one on the same rows
            if path in whole.changed_numbers:
                fits = again.fitting_numbers.get(path, ())
            judge.settle(path, [rule for rule in judge.fitting_numbers[path] if rule in fits])
            if path not in judge.rebound:
                out.differences.append(("kept", f"self.{path} comes together from slices in a first step only"))
        added_up = self._adding_up(out.kept, first, whole, sizes)
        fitting = again.fitting_buffers
        for name in [name for name, rule in judge.buffers.items() if name in fitting and rule not in fitting[name]]:
            del judge.buffers[name]
            text = f"self.{name} comes together from slices in a first step, and not in a second"
            out.differences.append(("kept", text))
        whole.state = {}
        sliced.state = {}
        second = self._compare({}, whole, sliced, again, sizes, frozenset())
        known = {kind for kind, _ in out.differences}
        second.differences = [one for one in second.differences if one[0] not in {*known, "kept value"}]
        if second.differences and out.kept:
            out.blame_kept(second.summary())
        elif added_up:
            out.blame_sums(added_up)

    def _adding_up(
        self, kept: Sequence[str], first: Observation, second: Observation, sizes: tuple[int, ...]
    ) -> list[str]:
        """Of the attributes that steps ``kept``, those that a second step on the same rows has changed again.

        A loss that is kept to be looked at is the same then; a count of hits, or a matrix of confusions, is not.
        """
        unstable: frozenset[str] = frozenset()
        if second.drew:  # then what changes may be another draw
            other = self._whole(self._few_rows(sum(sizes))[0], sum(sizes), other_draws=True)
            unstable = unstable_between(first, other, self._tolerance)
        return [name for name in changed_again(first, second, unstable, self._tolerance) if name in kept]

    def _differs(
        self, before: Mapping[str, Any], whole: Observation, sliced: Observation, judge: JudgingRules, sizes: Any
    ) -> bool:
        return bool(self._compare(before, whole, sliced, judge, sizes, frozenset()).differences)

    def _compare(
        self,
        before: Mapping[str, Any],
        whole: Observation,
        sliced: Observation,
        judge: JudgingRules,
        sizes: tuple[int, ...],
        unstable: frozenset[str],
    ) -> Comparison:
        comparison = Comparison(rows=sum(sizes), sizes=sizes, stage=self._call.name)
        Comparer(self._tolerance, unstable).compare(before, whole, sliced, judge, comparison)
        if self.norms:
            named = ", ".join(self.norms[:3])
            more = ", ..." if len(self.norms) > 3 else ""
            comparison.notes.append(
                f"Batch norm ({named}{more}) normalizes by its slice and was checked in eval mode; "
                "Trainer(sync_batchnorm=True) makes it that of the whole batch"
            )
        return comparison

    def _few_rows(self, *sizes: int) -> list[Any]:
        """A few rows of the batch in parts; cut as the batch is, whose few rows alone might be read otherwise."""
        batch = self._call.args[0]
        rest = self._call.num_rows - sum(sizes)
        if not rest and len(sizes) == 1:
            return [batch]
        skipped = int(self._skipped * rest)
        every = [skipped, *sizes, rest - skipped]
        parts: list[Any] = self._replicas.slicer.read(batch).cut([size for size in every if size])
        first = 1 if skipped else 0
        return parts[first : first + len(sizes)]

    def _shadow(self) -> Any:
        try:
            shadow, self.norms = make_shadow(self._replicas, self._requested, own_parameters=self._by_hand)
        except ReplicationError as error:
            raise NotRehearsed(str(error).partition(". Remove the attribute")[0] + ".") from None
        return shadow

    def _own(self, rows: Any) -> Any:
        """A step may write its batch in place; the real one must find what the loader gave."""
        try:
            return copy.deepcopy(rows)
        except Exception as error:  # noqa: BLE001  whatever the class of an item says to being copied
            raise NotRehearsed(f"its batch cannot be copied ({_described(error)})") from None

    # ---- as one device ----

    def _whole(
        self, rows: Any, num_rows: int, *, other_draws: bool = False, num_steps: int = 1, after_a_step: bool = True
    ) -> Observation:
        """What the last of ``num_steps`` steps on the same rows does."""
        strategy = self._strategy
        call = self._call
        shadow = self._shadow()
        replicas = self._replicas_of(shadow, [strategy.root_device], workload="even", micro_batches=1)
        seen = Observation()
        known = {name for name, _ in shadow.named_parameters()}
        with ExitStack() as stack:
            stack.enter_context(self._pointing_at(shadow, None, None, seen))
            stack.enter_context(self._guest.run(shadow, other_draws=other_draws))
            stack.callback(replicas.close)
            for _ in range(num_steps):
                self._forget_gradients(shadow.parameters())
                if after_a_step:
                    self._leave_gradients(shadow.parameters())
                batch_slice = BatchSlice(replicas.root, num_rows, self._own(rows))
                writes = self._watch_batch(batch_slice.batch)
                log = StepLog(batch_slice)
                lists = ListWatch([shadow], find_lists(_attributes(shadow, private_attributes())))
                numbers = numbers_of(_own_attributes(shadow))
                with self._context(), recorded_calls(shadow) as seen.metric_calls:
                    seen.output = replicas.run(call.name, [batch_slice], partial(self._step_of_one, log))[0]
                with _recording(log, shadow):
                    final = self._session.finished(call.name, seen.output)
                grown = lists.grown(find_lists(_attributes(shadow, private_attributes())))
                seen.appended = {place: without_graphs(items) for place, items in grown.items()}
                seen.numbers = numbers_of(_own_attributes(shadow))
                seen.changed_numbers = changed_numbers(numbers, seen.numbers)
                seen.logged = {path_of(key): _logged(*entry) for key, entry in log.entries.items()}
                self._note_writes(writes, replicas, MergeRules(), seen)
                self._finish(seen, final, shadow, list(shadow.parameters()))
        made = [name for name, _ in shadow.named_parameters() if name not in known]
        if made:
            raise ParametersAppear(", ".join(made))
        self._forget_gradients(shadow.parameters())
        self._tolerance = _tolerance_of(strategy, self._module, call, self._guest.low_precision)
        seen.drew = self._guest.drew
        self._note_draws(seen)
        return seen

    def _note_draws(self, seen: Observation) -> None:
        seen.draws = self._guest.draws
        seen.left_alone = self._guest.left_alone

    def _step_of_one(self, log: StepLog, batch_slice: BatchSlice) -> Any:
        call = self._call
        shadow: Any = batch_slice.replica.module
        with log.recording(shadow), self._session.context(shadow):
            transfer = Transfer(shadow.trainer, shadow, call.dataloader_idx)
            batch = transfer.to_replica(batch_slice)
            self._writes.note(batch_slice, batch, is_as_loaded=transfer.is_plain)
            return getattr(shadow, call.name)(batch, *call.args[1:], **call.kwargs)

    def _watch_batch(self, rows: Any) -> BatchWrites:
        """Sees what the next run writes into its batch, if hooks of the real run look at that."""
        writes = BatchWrites()
        if self._watches_batch:
            writes.show(rows)
        self._writes = writes
        return writes

    def _note_writes(self, writes: BatchWrites, replicas: ReplicaSet, rules: MergeRules, seen: Observation) -> None:
        """What was written is compared as a logged value is.

        Raises:
            SlicesFail: it cannot be put together.
        """
        problem = writes.finish(rules, self._strategy.root_device, replicas.output_dim)
        if problem is not None:
            raise SlicesFail(*unlike_one_batch(problem))
        for name, value in writes.values.items():
            seen.logged[name] = Logged(value=value, reduce_fx="mean", batch_size=None)

    # ---- in slices ----

    def _sliced(
        self,
        sizes: tuple[int, ...],
        whole: Observation,
        loss_reduction: str,
        unstable: frozenset[str] = frozenset(),
        earlier: Sequence[JudgingRules] = (),
    ) -> tuple[JudgingRules, Observation]:
        """What a step in slices does, after as many others as there are rules of ``earlier`` ones."""
        strategy = self._strategy
        auto = loss_reduction == "auto" and not self._by_hand
        judge = JudgingRules(
            whole,
            self._tolerance,
            decides_loss=auto,
            loss_reduction="sum" if loss_reduction == "sum" else "mean",
            unstable=unstable,
        )
        judge.metrics_give_slices = self.gives_slices
        shadow = self._shadow()
        forget_shift(shadow)  # of the first replica; each gets its own
        parameters = () if self._by_hand else shared_parameters(self._replicas, shadow)
        own = {"existing": parameters, "workload": "even", "micro_batches": self._replicas.partition.micro_batches}
        replicas = self._replicas_of(shadow, list(self._replicas.devices), **own)
        self._shift_alike(replicas)
        options = strategy.options
        reducer = options.reducer if isinstance(options.reducer, str) else "auto"
        step = TrainingStep(replicas, reducer, "mean", options.wire_dtype, options.gradient_buckets, None)
        session = self._session.for_shadow(replicas, replicas.metrics, step)
        seen = Observation()
        replicas.metrics.take_rules(self.metric_rules)
        with ExitStack() as stack:
            stack.enter_context(self._guest.run(shadow))
            stack.callback(replicas.close)
            stack.callback(step.close)
            for rules in (*earlier, judge):
                replicas.metrics.example = whole.metric_calls if rules is judge else None
                for replica in replicas.replicas:
                    self._forget_gradients(replica.module.parameters())
                self._leave_gradients(step.owner_parameters)
                step.rules = rules
                slices = session.slices.weighted(self._slices_of(replicas, sizes), shadow)
                merged_log = StepLog(replace(slices[0], num_rows=sum(sizes)))
                with self._pointing_at(shadow, session, rules, seen):
                    writes = self._watch_batch(self._own(self._few_rows(sum(sizes))[0]))
                    session.batch_writes = writes
                    with _recording(merged_log, shadow):
                        final = self._step_of_replicas(session, slices)
                    self._check_left_whole(session.whole_batches)
                    seen.logged = {path_of(key): _logged(*entry) for key, entry in merged_log.entries.items()}
                    self._note_writes(writes, replicas, rules, seen)
                    self._finish(seen, final, shadow, step.owner_parameters, step)
        self._note_draws(seen)
        self.metric_rules = replicas.metrics.rules_by_path()
        self.waits |= replicas.has_met
        for replica in replicas.replicas:
            self._forget_gradients(replica.module.parameters())
        return judge, seen

    def _check_left_whole(self, found: WholeBatches) -> None:
        """What a step on slices has found out may be a reason against slices.

        Raises:
            SlicesFail: it is.
        """
        reason = found.reason_for(self._call.name)
        if reason is not None:
            raise SlicesFail(reason, found.advice_for(self._call.name))

    def _slices_of(self, replicas: ReplicaSet, sizes: tuple[int, ...]) -> list[BatchSlice]:
        parts = self._own(self._few_rows(*sizes))
        active = self._call.active
        return [
            BatchSlice(replicas.replicas[index], size, part)
            for index, size, part in zip(active, sizes, parts, strict=True)
        ]

    def _step_of_replicas(self, session: "Session", slices: list[BatchSlice]) -> Any:
        call = self._call
        if self._trains:
            return session.training.forward(slices, call.args, call.kwargs)
        return session.evaluation.forward(call.name, slices, call.args, call.kwargs)

    def _on_real_slices(self, before: Mapping[str, Any], failure: Exception, sizes: tuple[int, ...]) -> Outcome:
        """Slices of a few rows fail; if those of the batch do, too, the stage cannot run in slices.

        Raises:
            SlicesFail: they do.
        """
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure
        if sizes != self._real_sizes:
            whole = self._whole(self._call.args[0], self._call.num_rows)
            return self._with_slices(before, whole, self._real_sizes)
        if isinstance(failure, SharedWriteError):
            raise _writes_parameters([failure.name])
        if isinstance(failure, GatherError):
            raise SlicesFail(
                f"What its slices return cannot be put together. {_described(failure).partition(': ')[2]}",
                "For all devices to take part, let it return tensors, numbers, or containers of them.",
            )
        raise SlicesFail(
            f"It runs on the whole batch, but on a slice it raises {_described(failure)}",
            "For all devices to take part, let it run on any number of rows.",
        )

    # ---- what both have in common ----

    def _replicas_of(self, shadow: Any, devices: list[torch.device], **changes: Any) -> ShadowReplicas:
        options = {"beyond": None, "check_every": 0, **changes}
        metrics = ReplicaMetrics(shadow, number=self._strategy.options.number_rule)
        replicas = new_replicas(self._strategy, shadow, devices, metrics, ShadowReplicas, **options)
        assert isinstance(replicas, ShadowReplicas), "that kind was requested for"
        replicas.metrics = metrics
        metrics.dim = replicas.output_dim
        replicas.guest = self._guest
        for replica in replicas.replicas[1:]:
            copied: Any = replica.module
            set_trainer(copied, trainer_of(shadow))  # LightningModule drops it from its copies
        return replicas

    def _shift_alike(self, replicas: ReplicaSet) -> None:
        """What is shifted of a real replica is shifted of its shadow."""
        for real, shadow in zip(self._replicas.replicas, replicas.replicas, strict=True):
            shift = applied_shift(real.module)
            if shift is not None:
                shift_like(shadow.module, shift)

    @contextmanager
    def _pointing_at(
        self, shadow: Any, session: "Session | None", judge: JudgingRules | None, seen: Observation
    ) -> Iterator[None]:
        """The strategy, and through it the trainer, has the shadow for its module for a while.

        Args:
            shadow: Stands in for the user's module.
            session: Of its replicas; ``None`` as on one device.
            judge: Finds out how results are merged.
            seen: Gets the gradients that optimizers are given.
        """
        strategy = self._strategy
        call = self._call
        attributes = pointing_at_shadow(strategy, shadow)
        if session is not None:
            attributes |= {"session": session, "ranks": strategy.ranks.of_shadow(len(session.replicas.replicas))}
        if self._by_hand:
            attributes |= self._optimizers_for(shadow, session, seen)
            if session is not None:
                session.gradient_hooks = GradientHooks()
                session.gradient_hooks.begin(shadow, session.replicas, session.step)
        rules = dict(strategy.rehearsals._rules)
        if judge is not None:
            rules[call.name, call.dataloader_idx] = judge
        with overridden(strategy, **attributes), overridden(strategy.rehearsals, _rules=rules):
            yield

    def _optimizers_for(self, shadow: Any, session: "Session | None", seen: Observation) -> dict[str, Any]:
        """Copies of the optimizers and schedulers that act on the shadow; they tell what gradients they were given."""
        strategy = self._strategy
        mine = list(shadow.parameters()) if session is None else session.step.owner_parameters
        modules = [shadow] if session is None else [replica.module for replica in session.replicas.replicas]
        owners = self._session.step.owner_parameters
        copies = with_copied_optimizers(strategy, self._module, modules, owners, mine)
        names = {id(own): name for (name, _), own in zip(shadow.named_parameters(), mine, strict=True)}

        def note(optimizer: Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names.get(id(parameter))
                    if name is not None and parameter.grad is not None:
                        number = sum(key.partition("@")[0] == name for key in seen.gradients)
                        seen.gradients[f"{name}@{number}"] = _on_host(parameter.grad)

        for optimizer in copies["_optimizers"]:
            optimizer.register_step_pre_hook(note)
        return copies

    def _context(self) -> Any:
        precision = self._strategy.precision_plugin
        return precision.train_step_context() if self._trains else precision.val_step_context()

    def _finish(
        self, seen: Observation, final: Any, shadow: Any, owners: list[Any], step: TrainingStep | None = None
    ) -> None:
        """Backward, and then all that can be seen of the run."""
        names = [name for name, _ in shadow.named_parameters()]
        if self._by_hand:
            seen.weights = {name: _on_host(one) for name, one in zip(names, owners, strict=True)}
        elif self._trains:
            loss = first_loss(final)
            if isinstance(loss, torch.Tensor):
                self._forget_gradients(owners)  # Lightning zeroes them between a step and its backward
                if loss.requires_grad:
                    with self._guest.in_step("backward"):
                        shadow.backward(loss)
                    if step is not None:
                        step.backward(last=True)
                        step.reduce()
                seen.loss = loss.detach().cpu()
            seen.gradients = {
                name: _on_host(one.grad) for name, one in zip(names, owners, strict=True) if one.grad is not None
            }
        seen.state = self._state(shadow)

    def _state(self, shadow: Any) -> dict[str, Any]:
        outside = ((f"{OUTSIDE}{path}", value) for path, value in self._guest.surroundings.values())
        return python_state(chain(_attributes(shadow, private_attributes()), outside))

    def _leave_gradients(self, owners: Iterable[torch.Tensor]) -> None:
        """A step begins with the gradients of the one before, where optimizers take them; any numbers will do."""
        if self._trains and not self._by_hand:
            for parameter in owners:
                parameter.grad = parameter.detach() + 0.01 if parameter.requires_grad else None

    def _forget_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """A shadow is in reference cycles and may live on for a while; what is large must not."""
        for parameter in parameters:
            parameter.grad = None


def _writes_parameters(names: Sequence[str]) -> SlicesFail:
    return SlicesFail(
        f"It writes parameter {', '.join(names[:3])} in its forward, which each replica would do for itself.",
        "Write it between the steps instead (on_train_batch_end).",
    )


def _recording(log: StepLog, shadow: Any) -> AbstractContextManager[None]:
    """What is logged on the whole batch's behalf; the replicas' own logs take its place while their steps run."""

    def record(*args: Any, **options: Any) -> None:
        log.record(*args, **options)

    return overridden(shadow, log=record)


def _logged(value: Any, options: Mapping[str, Any]) -> Logged:
    reduce_fx = options.get("reduce_fx", "mean")
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    whole = None if isinstance(value, Metric) else value
    return Logged(value=whole, reduce_fx=name, batch_size=options.get("batch_size"))


def _attributes(module: Any, private: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """What a step may have changed: attributes of all submodules, states of metrics, and buffers."""
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(child, Metric):
            for key in states_of(child):
                value = getattr(child, key)
                yield prefix + key, dim_zero_cat(value) if isinstance(value, list) and value else value
            continue
        for key, value in vars(child).items():
            if key not in private and not _is_of_a_metric(module, path):
                yield prefix + key, value
    yield from module.named_buffers()


def _own_attributes(module: Any) -> Iterator[tuple[str, Any]]:
    """The same, but for what metrics and torch look after: metrics' states, and buffers."""
    private = private_attributes()
    for path, child in module.named_modules():
        if not isinstance(child, Metric) and not _is_of_a_metric(module, path):
            prefix = f"{path}." if path else ""
            yield from ((prefix + key, value) for key, value in vars(child).items() if key not in private)


def _is_of_a_metric(module: Any, path: str) -> bool:
    while path:
        if isinstance(module.get_submodule(path), Metric):
            return True
        path = path.rpartition(".")[0]
    return False


def unequal_sizes(num_rows: int, num_slices: int, factor: int = 1) -> tuple[int, ...]:
    """Rows of each slice, and one more for the first, so that no dim fits by chance; fewer where there are few.

    The more rows, the less a loss over something else than rows (positives, tokens) looks like a mean over them by
    chance: as many as all together take no more room on one device than a slice of the batch does, eight at the most,
    but two in any case.
    """
    largest = num_rows // num_slices
    usual = max(2 * factor, min(8, (largest - 1) // num_slices))
    if num_rows >= usual * num_slices + 1:
        return (usual + 1, *(usual,) * (num_slices - 1))
    least, more = divmod(num_rows, num_slices)
    if not more and least > 1:  # 3 and 1 rather than 2 and 2
        return (least + 1, *(least,) * (num_slices - 2), least - 1)
    return tuple(least + (index < more) for index in range(num_slices))


def _tolerance_of(strategy: Any, module: pl.LightningModule, call: Call, seen: Iterable[torch.dtype] = ()) -> Tolerance:
    """By the coarsest dtype that the step computes in, or that gradients travel in."""
    dtypes = [parameter.dtype for parameter in module.parameters() if parameter.dtype.is_floating_point]
    dtypes.append(torch.float32 if not dtypes else dtypes[0])
    dtypes.extend(seen)
    if strategy.options.wire_dtype is not None:
        dtypes.append(strategy.options.wire_dtype)
    context = copy.copy(strategy.precision_plugin.wrapped).train_step_context()  # a user's own may count its calls
    kind = strategy.root_device.type
    with context:
        if torch.is_autocast_enabled(kind):
            dtypes.append(torch.get_autocast_dtype(kind))
    eps = {dtype: torch.finfo(dtype).eps for dtype in dtypes}
    coarsest = max(eps, key=lambda dtype: eps[dtype])
    if kind == "cuda" and coarsest == torch.float32 and _uses_tf32():
        coarsest = torch.float16  # ten bits of mantissa, as TF32
    numbers = [leaf.numel() for leaf in tree_leaves(call.args[0]) if isinstance(leaf, torch.Tensor)]
    largest = max((parameter.numel() for parameter in module.parameters()), default=1)
    return Tolerance.of(coarsest, max([largest, *numbers]))


def _uses_tf32() -> bool:
    try:
        return bool(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the process has used torch's other way of asking for it
        return True


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach()
    return (dense.to_dense() if dense.layout != torch.strided else dense).to("cpu", copy=True)


def _described(error: BaseException) -> str:
    try:
        text = str(error).partition("\n")[0]
    except Exception:  # noqa: BLE001  the user's own class
        text = ""
    return f"{type(error).__name__}: {text}".rstrip(": ").rstrip(".") + "."
