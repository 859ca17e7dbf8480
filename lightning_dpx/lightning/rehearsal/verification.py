"""When a step is rehearsed, and what follows from what was found.

One rehearsal of one step is in `rehearsal.py`; here is what a run makes of all of them:

    before a step --is it due?--> Rehearsal --> Outcome --> known_rules.py   how results are merged
      first batch, news, a spot check  |           +------> verdicts.py      a line, an error, whole batches
                                       +--> slices fail --> fallbacks.py     fewer pieces
                                       +--> not rehearsed: it trains all the same, and one line says so
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_dpx.devices import is_host
from lightning_dpx.lightning.options import Verify
from lightning_dpx.lightning.processes.connect import gather_objects
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.observation import OUTSIDE
from lightning_dpx.lightning.rehearsal.comparison.parity_report import Comparison
from lightning_dpx.lightning.rehearsal.fallbacks import Fallbacks
from lightning_dpx.lightning.rehearsal.known_rules import KnownRules
from lightning_dpx.lightning.rehearsal.outcome import (
    Call,
    Key,
    NotRehearsed,
    Outcome,
    PartsAppear,
    SlicesFail,
    key_of,
)
from lightning_dpx.lightning.rehearsal.recurrence import Recurrence
from lightning_dpx.lightning.rehearsal.rehearsal import NOT_ALIKE, Rehearsal
from lightning_dpx.lightning.rehearsal.spot_checks import SpotChecks
from lightning_dpx.lightning.rehearsal.verdicts import Verdicts
from lightning_dpx.lightning.whole_batches import COUNT_ELSEWHERE
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.python_objects.trial_garbage import TRIAL_GARBAGE
from lightning_dpx.replicas import AttributeRules, BatchSlice, MergeRules
from lightning_dpx.replicas.shared_iterators import code_iterators_guarded
from lightning_dpx.units import format_bytes

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session
    from lightning_dpx.lightning.strategy import DPXStrategy

_AT_MOST = 5  # more rehearsals of a stage, one after each batch with a value that was zero or not there before


class Verification:
    """The rehearsals of all steps of a run, and the rules that they found.

    Args:
        strategy: Whose steps are rehearsed.
        verify: What happens when they differ from one device.
        loss_reduction: As given.
    """

    def __init__(self, strategy: "DPXStrategy", verify: Verify, loss_reduction: str) -> None:
        self._strategy = strategy
        self._verify = verify
        self._loss_reduction = loss_reduction
        self._known = KnownRules(loss_reduction)
        self._verdicts = Verdicts(strategy, verify)
        self._fallbacks = Fallbacks(strategy, self._verdicts)
        self._done: set[Key] = set()
        self._again: dict[Key, int] = {}  # how often a stage was rehearsed again
        self._least_rows: dict[Key, int] = {}  # of a slice, where a few rows were too few for the step
        self._spot_checks = SpotChecks()
        self._recurrences: dict[Key, Recurrence] = {}
        self._agreed = False

    @property
    def _session(self) -> "Session":
        """The run whose steps are rehearsed."""
        return self._strategy.replicated_session

    def forget(self) -> None:
        """Forgets what a run has found, so that the next one rehearses anew."""
        self._known.forget()
        self._verdicts.forget()
        self._done.clear()
        self._again.clear()
        self._least_rows.clear()
        self._spot_checks.forget()
        self._recurrences.clear()
        self._agreed = False

    def reopen(self, name: str) -> None:
        """Has the next step of this stage rehearsed, as its first one was."""
        for key in [key for key in self._done if key[0] == name]:
            self._done.discard(key)
            self._known.forget_findings(key)
            self._again.pop(key, None)

    def reopen_all(self) -> None:
        """Has the next step of every stage rehearsed: the module is another one than those that were checked."""
        for name in {name for name, _ in self._done}:
            self.reopen(name)

    def rules(self, name: str, dataloader_idx: int) -> MergeRules:
        """How the results of a stage are merged."""
        return self._known.of((name, dataloader_idx))

    def judged_by(self, call: Call, judge: JudgingRules | None) -> AbstractContextManager[None]:
        """For a while, results of this step are merged by ``judge``; no rule that is found meanwhile remains."""
        return self._known.judged_by(call.key, judge)

    def before_step(
        self,
        name: str,
        slices: Sequence[BatchSlice],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_known: bool = False,
    ) -> bool:
        """Rehearses the step, if it is the first one on several replicas; looks again at some later ones.

        Args:
            name: Of the step.
            slices: Of its batch.
            args: What Lightning calls it with.
            kwargs: The arguments that it gives by name.
            is_known: Whether this batch has come by here already, and was cut otherwise since.

        Returns whether the batch may have to be cut in another way now.

        Raises:
            ParityError: it is not what it is on one device, and ``verify="raise"``.
        """
        key = key_of(name, args)
        if not is_known:
            self._follow_recurrence(key)
        # What is expected of this batch stays so until it has run: a check of it does not end that.
        is_open = key not in self._done or (not is_known and self._is_outdated(key))
        rehearses = is_open and len(slices) > 1 and self._verify != "off"
        if rehearses:
            self._again[key] = self._again.get(key, -1) + 1
            # Before the rehearsal, which may have the batch cut otherwise and come by here again.
            self._done.add(key)
            with self._trial():
                self._rehearse(_call_of(name, slices, args, kwargs))
        elif len(slices) > 1 and _least_rows_of(slices) < self._least_rows.get(key, 0):
            with self._trial():
                rehearses = self._check_smaller_slices(_call_of(name, slices, args, kwargs), _least_rows_of(slices))
        elif self._known.is_checked(key) and len(slices) > 1 and not self._lacks_room(name):
            is_due = not is_known and self._spot_checks.is_due(key, self._session.module.current_epoch)
            if is_due and self._has_room_for_copies(name, slices):
                with self._trial():
                    rehearses = self._look_again(_call_of(name, slices, args, kwargs))
        elif key not in self._done and len(slices) > 1:
            self._done.add(key)
            self._session.replicas.python_state.share_iterators_of_code()  # a rehearsal would have found them
        # Also where this process rehearsed nothing: the others wait for its answer.
        if name == "training_step" and not self._agreed:
            self._agreed = True
            self._agree()
        return rehearses

    def _lacks_room(self, name: str) -> bool:
        """Whether another look may break a budget: one at a step by hand copies all parameters and optimizers."""
        strategy = self._strategy
        by_hand = name == "training_step" and not self._session.module.automatic_optimization
        return by_hand and bool(strategy.plans_memory)

    def _has_room_for_copies(self, name: str, slices: Sequence[BatchSlice]) -> bool:
        """Whether a look keeps a budget; said where it does not, as what it would have found stays unseen."""
        needed = self._session.memory.bytes_too_many_for_look(slices)
        if needed:
            self._verdicts.say(
                f"dpx: {name}, checked in its first batch, is not looked at again in later ones: copies of the "
                f"module's buffers and of tensors in its attributes would take {format_bytes(needed)}, for which "
                "memory_budget has no room.",
                # Where lists grow, each look would take more than the last one.
                topic=f"no looks at {name}",
            )
        return not needed

    def _is_outdated(self, key: Key) -> bool:
        """Whether the step does what no rehearsal has seen; not for ever, as some steps log another name each time."""
        rules = self._known.asked_for(key)
        if rules is None:
            return False
        if rules.news.unchecked and self._recurrences[key].is_expected:
            return True
        return rules.news.is_pending and self._again.get(key, 0) < _AT_MOST

    def _follow_recurrence(self, key: Key) -> None:
        """Another batch: notes where the step has done what no rehearsal has seen."""
        recurrence = self._recurrences.setdefault(key, Recurrence())
        rules = self._known.asked_for(key)
        number = recurrence.begin_batch(0 if rules is None else rules.news.last_batch)
        if rules is not None:
            rules.news.batch = number

    def note_changed(self, key: Key, batch: int, known: frozenset[str], paths: set[str]) -> None:
        """A step has changed attributes, on other replicas than the first one.

        Args:
            key: The name of the step, and the index of its loader.
            batch: The number of its batch.
            known: The attributes that rehearsals had seen change by then.
            paths: What it has changed.
        """
        # Told before the next step, which may have been rehearsed anew by then, and seen to do so.
        unseen = paths - known
        if unseen:
            self.rules(*key).news.note_changed(unseen, batch)

    def _agree(self) -> None:
        """Lets all processes take the loss for a sum if one of them saw that it is."""
        strategy = self._strategy
        # Options are compared between processes at setup, so all leave here or none does.
        if self._loss_reduction != "auto" or strategy.num_processes == 1:
            return
        rules = self._session.step.rules
        mine = rules.loss_reduction
        # A sum is seen where slices show it, and a process whose batch stays whole sees nothing.
        if "sum" in gather_objects("agreeing on the loss", mine):
            rules.loss_reduction = "sum"

    @contextmanager
    def _rehearsal(self, call: Call, loss_reduction: str) -> Iterator[Rehearsal]:
        """A context in which a step can be rehearsed."""
        requested: list[str] = []
        # The dispatch mode of a rehearsal sees no operators inside of compiled code.
        with code_iterators_guarded(self._session.module, requested), uncompiled():
            yield Rehearsal(self._strategy, call, loss_reduction, requested)

    def _trial(self) -> AbstractContextManager[None]:
        """Frees what shadows hold in reference cycles: a step needs the room, on accelerators and under a budget.

        Python's collector comes by when many objects were made, knows nothing of their gigabytes, and since Python 3.12
        comes rarely.
        """
        devices = self._strategy.parallel_devices or []
        if self._strategy.plans_memory or not all(map(is_host, devices)):
            return TRIAL_GARBAGE.freed()
        return nullcontext()

    def _rehearse(self, call: Call, fresh: frozenset[str] = frozenset()) -> None:
        """Finds out how a step is put together.

        Args:
            call: Of the step.
            fresh: Paths of what it does that no rehearsal has seen before.
        """
        before = self.rules(*call.key)
        before.news.is_pending = False
        news = self._verdicts.take_news(call.name, before) | before.news.unchecked | fresh
        found = self._try(call)
        if found is not None:
            self._follow(call, *found, before, news)

    def _try(self, call: Call) -> tuple[Rehearsal, Outcome] | None:
        """Rehearses a step; ``None`` if it cannot be, or if its batches are cut in another way from here on."""
        fallbacks = self._fallbacks
        try:
            with self._rehearsal(call, self._loss_reduction) as rehearsal:
                # A larger batch may be the first one that is cut, and then its rehearsal is the first as well.
                has_planned = self._session.memory.has_planned_step
                outcome = rehearsal.run(follows_steps=has_planned or self._again.get(call.key, 0) > 0)
        except SlicesFail as failure:
            if not fallbacks.left_micro_batches(call.name, NOT_ALIKE + failure.reason):
                self._leave_slices(call, failure)
            return None
        # One batch goes whole, and makes them; by then replicas can be made with them.
        except PartsAppear as made:
            self._give_next_whole(call, made)
            return None
        except NotRehearsed as reason:
            if not fallbacks.left_micro_batches(call.name, f"they could not be checked: {reason}"):
                self._verdicts.note_unchecked(f"dpx: {call.name} was not checked against one device: {reason}")
            return None
        except BaseException as error:  # such as Ctrl-C; any other error of the step is announced, and ends nothing
            error.add_note(f"In the rehearsal of {call.name}, which checks its slices against one device.")
            raise
        if fallbacks.left_micro_batches(call.name, rehearsal.what_micro_batches_change(outcome)):
            return None
        return rehearsal, outcome

    def _follow(
        self, call: Call, rehearsal: Rehearsal, outcome: Outcome, before: MergeRules, news: frozenset[str]
    ) -> None:
        """What a rehearsal has found is how the step is put together from here on.

        Args:
            call: Of the step.
            rehearsal: Of it.
            outcome: What came out.
            before: The rules until here.
            news: What the step did for the first time since an earlier rehearsal.
        """
        strategy = self._strategy
        key = call.key
        # Remembered by the stage: a batch that does not divide evenly has its step on one device.
        if rehearsal.needs_equal_slices:
            self._session.whole_batches.keep_whole_if_unequal(call.name)
        if rehearsal.least_rows:
            self._least_rows[key] = rehearsal.least_rows
        num_repeats = self._again[key] if self._again[key] == _AT_MOST else None
        rules = self._known.learn(key, outcome, news, num_repeats=num_repeats)
        # Norms are in eval mode in a check, and write their buffers in the run.
        rules.written_buffers = rules.written_buffers.union(self._buffers_of(rehearsal.norms))
        # Kept unless the step does something new: processes have agreed on it, and one
        # alone must not leave that.
        if self._again[key] and not (news and strategy.num_processes == 1):
            rules.loss_reduction = before.loss_reduction
        # Before threads append to a list in any order, which no later step could put right.
        if rules.attributes.growing:
            self._session.replicas.order.note_shared_write(call.name)
        self._spot_checks.news(key, outcome.comparison.differences)
        self._keep_order(call.name, outcome.comparison)
        self._session.metrics.take_rules(rehearsal.metric_rules)
        if call.name == "training_step":
            self._session.step.rules = rules
        if outcome.comparison.differences:
            self._tell_differences(key, outcome.comparison)
        elif not self._verdicts.normalizes_slices(call.name, rehearsal.norms) and (news or not self._again[key]):
            self._verdicts.agrees(outcome.comparison)

    def _buffers_of(self, names: Sequence[str]) -> list[str]:
        module = self._session.module
        return [f"{name}.{own}" for name in names for own, _ in module.get_submodule(name).named_buffers()]

    def _tell_differences(self, key: Key, comparison: Comparison) -> None:
        is_told = self._spot_checks.is_told(key, comparison.subjects())
        self._verdicts.differs(key[0], comparison, is_told=is_told)

    def _look_again(self, call: Call) -> bool:
        """Rehearses a checked step on other rows, with the rules that were found; tells only news.

        Returns whether the batch may have to be cut in another way now.
        """
        key = call.key
        rules = self._known.of(key)
        # Processes have agreed on what it is.
        decides_loss = rules.loss_is_open and self._strategy.num_processes == 1
        try:
            with self._rehearsal(call, self._loss_reduction if decides_loss else rules.loss_reduction) as rehearsal:
                part = None if key in self._least_rows else self._spot_checks.part(key)
                outcome = rehearsal.look_again(part, self._known.findings(key), rules)
        except SlicesFail as failure:
            return self._leave_slices_later(call, failure)
        except PartsAppear as made:
            self._give_next_whole(call, made)
            return True
        except NotRehearsed as reason:
            self._verdicts.say(f"dpx: {call.name}, checked before, could not be looked at again: {reason}")
            return False
        fresh = frozenset((outcome.findings.keys() | outcome.logged.keys()) - (rules.news.seen or frozenset()))
        if fresh and self._again[key] < _AT_MOST:
            # What the step does for the first time in this batch is judged before it does so: in the real step
            # it would come together by types, and the next batch may not have it.
            self._again[key] += 1
            self._rehearse(call, fresh)
            return True
        if decides_loss and outcome.judge.loss.largest and not outcome.judge.loss.rests_on_one:
            rules.loss_reduction = outcome.judge.loss_reduction
            rules.loss_is_open = False
        comparison = outcome.comparison
        # What was told once is not told again at batches 2, 4, 8 and so on.
        comparison.differences = self._spot_checks.news(key, comparison.differences)
        # What is drawn by rows after all must not be drawn alike by all slices.
        rules.draws_once -= outcome.judge.draws_by_rows
        self._known.narrow(key, outcome)
        lost = self._known.narrow_buffers(key, outcome.judge, outcome.unstable)
        lost += self._known.narrow_numbers(key, outcome.judge, outcome.unstable)
        counts = [name for name in lost if rules.attributes.row_counts.is_count(name)]
        if counts:
            # Later steps would use a count that one device never has, such as an index that is out of bounds.
            what = f"self.{', self.'.join(counts)} has counted rows until now, and comes together from slices no more."
            if self._leave_slices_later(call, SlicesFail(what, COUNT_ELSEWHERE)):
                return True
        comparison.differences += [("kept value", f"self.{name} comes together from slices no more") for name in lost]
        self._keep_order(call.name, outcome.comparison)
        if not comparison.differences:
            return False
        comparison.notes.append("The batches that were checked before had shown nothing of it")
        # Without micro-batches the step may not fit, and would end in the middle.
        if self._session.replicas.cuts_slices:
            comparison.notes.append("With micro_batches=1 it stays in one piece")
        self._tell_differences(key, comparison)
        return True

    def _give_next_whole(self, call: Call, made: PartsAppear) -> None:
        """This batch goes whole; the next one is rehearsed with what it has made."""
        self.reopen(call.name)
        self._fallbacks.give_next_whole(call, made)

    def _leave_slices(self, call: Call, failure: SlicesFail) -> None:
        """Slices of devices where there were micro-batches of them, and are checked; else batches go whole."""
        fewer = self._fallbacks.with_slices_of_devices(call, failure)
        if fewer is None:
            self._fallbacks.give_whole(call, failure)
        elif len(fewer.active) > 1:
            # Other slices than before, so nothing of the failed rehearsal says how they behave.
            self._rehearse(fewer)

    def _leave_slices_later(self, call: Call, failure: SlicesFail) -> bool:
        """A step that was checked does by now what slices cannot; whether its batches may stay whole from here on."""
        if self._fallbacks.keeps_micro_batches(call.name, failure.reason):
            return False
        self._leave_slices(call, failure)
        return True

    def _keep_order(self, name: str, comparison: Comparison) -> None:
        """A step that writes what lies outside of the module takes turns, or threads would write it in any order."""
        if any(path.startswith(OUTSIDE) for path in comparison.changed):
            self._session.replicas.order.note_shared_write(name)

    def _check_smaller_slices(self, call: Call, rows: int) -> bool:
        """Tries slices of fewer rows than any before, of a step that did not run on a few rows, such as ``topk(8)``.

        Returns whether the batch stays whole now.
        """
        try:
            with self._rehearsal(call, self._loss_reduction) as rehearsal:
                rehearsal.check_real_slices()
        except SlicesFail as failure:
            self._session.whole_batches.keep_whole_if_small(call.name, rows, failure.reason)
            return True
        except (NotRehearsed, PartsAppear):
            return False  # whatever it is, the step itself meets it
        self._least_rows[call.key] = rows
        return False

    def after_step(self, name: str, rules: AttributeRules) -> None:
        """Acts on what a real step did that no rehearsal can have seen: lists are full by now."""
        if not rules.lost_items:
            return
        paths = ", ".join(sorted(rules.lost_items))
        rules.lost_items.clear()
        rules.growing = set()  # said once
        reason = f"It takes items out of {paths}, or puts others in their place, which every slice does for itself."
        if not self._fallbacks.keeps_micro_batches(name, reason):
            advice = "Do it in on_train_batch_end and its like, which see the whole batch."
            self._session.whole_batches.give_whole(name, reason, advice)

    def refuse_unchecked(self) -> None:
        """Called once a step has run.

        Raises:
            ParityError: it could not be checked, and ``verify="raise"``.
        """
        self._verdicts.refuse_unchecked()

    def tell_rest(self) -> None:
        """A run ends: tells what steps have done for the first time since they were rehearsed."""
        for (name, _), rules in self._known.items():
            self._verdicts.take_news(name, rules, "")


def _least_rows_of(slices: Sequence[BatchSlice]) -> int:
    return min(batch_slice.num_rows for batch_slice in slices)


def _call_of(name: str, slices: Sequence[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    rows = sum(batch_slice.num_rows for batch_slice in slices)
    active = tuple(batch_slice.replica.index for batch_slice in slices)
    return Call(name=name, args=args, kwargs=kwargs, active=active, num_rows=rows)
