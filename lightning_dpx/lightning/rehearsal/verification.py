"""What ``verify`` asks for: when a step is rehearsed, what follows from what was found, and what is said of it.

One rehearsal of one step is in `rehearsal.py`; here is what a run makes of all of them:

    before a step --is it due?--> Rehearsal --> Outcome --> rules by which results are merged
      first batch, news, a spot check           |             differences: a line, an error, or whole batches
                                                +--> cannot be rehearsed: it trains all the same, and one line says so
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from lightning_dpx.errors import ParityError
from lightning_dpx.lightning.lightning_api import rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.processes.connect import gather_objects
from lightning_dpx.lightning.rehearsal.comparison.attribute_judge import AttributeJudge
from lightning_dpx.lightning.rehearsal.comparison.findings import chosen, found_at, is_kept, refined, undecided
from lightning_dpx.lightning.rehearsal.comparison.judging_rules import JudgingRules
from lightning_dpx.lightning.rehearsal.comparison.number_judge import CHANGES
from lightning_dpx.lightning.rehearsal.comparison.observation import OUTSIDE
from lightning_dpx.lightning.rehearsal.comparison.parity_report import Comparison
from lightning_dpx.lightning.rehearsal.outcome import Call, Key, NotRehearsed, Outcome, PartsAppear, SlicesFail
from lightning_dpx.lightning.rehearsal.recurrence import Recurrence
from lightning_dpx.lightning.rehearsal.rehearsal import NOT_ALIKE, Rehearsal
from lightning_dpx.lightning.rehearsal.spot_checks import SpotChecks
from lightning_dpx.python_objects.compiled import uncompiled
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.python_objects.trial_garbage import TRIAL_GARBAGE
from lightning_dpx.replicas import AttributeRules, BatchSlice, ListPlace, MergeRules
from lightning_dpx.replicas.merging.rule_search import Finding
from lightning_dpx.replicas.shared_iterators import code_iterators_guarded

Verify = Literal["warn", "raise", "first", "off"]
_CHECKED_AGAIN = ", and is in later batches that do it, until a check has seen it; the step is checked again"
_AT_MOST = 5  # more rehearsals of a stage, one after each batch with a value that was zero or not there before


class Verification:
    """The rehearsals of all steps of a run, and the rules that they found.

    Args:
        strategy: Whose steps are rehearsed.
        verify: What happens when they differ from one device.
        loss_reduction: As given.
    """

    def __init__(self, strategy: Any, verify: Verify, loss_reduction: str) -> None:
        self._strategy = strategy
        self._verify = verify
        self._loss_reduction = loss_reduction
        self._done: set[Key] = set()
        self._rules: dict[Key, MergeRules] = {}
        self._found: dict[Key, tuple[dict[str, Finding], dict[str, Finding]]] = {}
        self._again: dict[Key, int] = {}  # how often a stage was rehearsed again
        self._least_rows: dict[Key, int] = {}  # of a slice, where a few rows were too few for the step
        self._spot_checks = SpotChecks()
        self._recurrences: dict[Key, Recurrence] = {}
        # Not emptied by forget: a second fit of the same strategy need not say the same again.
        self._said: set[str] = set()
        self._agreed = False
        self._unchecked: str = ""

    def forget(self) -> None:
        """Forgets what a run has found, so that the next one rehearses anew."""
        self._done.clear()
        self._rules.clear()
        self._found.clear()
        self._again.clear()
        self._least_rows.clear()
        self._spot_checks.forget()
        self._recurrences.clear()
        self._agreed = False
        self._unchecked = ""

    def reopen(self, name: str) -> None:
        """Has the next step of this stage rehearsed, as its first one was."""
        for key in [key for key in self._done if key[0] == name]:
            self._done.discard(key)
            self._found.pop(key, None)
            self._again.pop(key, None)

    def reopen_all(self) -> None:
        """Has the next step of every stage rehearsed: the module is another one than those that were checked."""
        for name in {name for name, _ in self._done}:
            self.reopen(name)

    def rules(self, name: str, dataloader_idx: int) -> MergeRules:
        """How the results of a stage are merged."""
        key = name, dataloader_idx
        if key not in self._rules:
            self._rules[key] = MergeRules(loss_reduction="sum" if self._loss_reduction == "sum" else "mean")
        return self._rules[key]

    @contextmanager
    def judged_by(self, call: Call, judge: JudgingRules | None) -> Iterator[None]:
        """For a while, results of this step are merged by ``judge``; no rule that is found meanwhile remains."""
        rules = dict(self._rules)
        if judge is not None:
            rules[call.key] = judge
        # A rehearsal that fails half-way leaves no rule behind.
        with overridden(self, _rules=rules):
            yield

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
        call = _call_of(name, slices, args, kwargs)
        key = call.key
        if not is_known:
            self._follow_recurrence(key)
        is_open = key not in self._done or self._is_outdated(key)
        rehearses = is_open and len(slices) > 1 and self._verify != "off"
        if rehearses:
            self._again[key] = self._again.get(key, -1) + 1
            # Before the rehearsal, which may have the batch cut otherwise and come by here again.
            self._done.add(key)
            with self._trial():
                self._rehearse(call)
        elif len(slices) > 1 and _least_rows_of(slices) < self._least_rows.get(key, 0):
            with self._trial():
                rehearses = self._check_smaller_slices(call, _least_rows_of(slices))
        elif key in self._found and len(slices) > 1 and not self._lacks_room(name):
            if not is_known and self._spot_checks.is_due(key):
                with self._trial():
                    rehearses = self._look_again(call)
        elif key not in self._done and len(slices) > 1:
            self._done.add(key)
            self._strategy.session.replicas.python_state.share_iterators_of_code()  # a rehearsal would have found them
        # Also where this process rehearsed nothing: the others wait for its answer.
        if name == "training_step" and not self._agreed:
            self._agreed = True
            self._agree()
        return rehearses

    def _lacks_room(self, name: str) -> bool:
        """Whether another look may break a budget: one at a step by hand copies all parameters and optimizers."""
        strategy = self._strategy
        by_hand = name == "training_step" and not strategy.lightning_module.automatic_optimization
        return by_hand and bool(strategy.plans_memory)

    def _is_outdated(self, key: Key) -> bool:
        """Whether the step does what no rehearsal has seen; not for ever, as some steps log another name each time."""
        rules = self._rules.get(key)
        if rules is None:
            return False
        if rules.news.unchecked and self._recurrences[key].is_expected:
            return True
        return rules.news.is_pending and self._again.get(key, 0) < _AT_MOST

    def _follow_recurrence(self, key: Key) -> None:
        """Another batch: notes where the step has done what no rehearsal has seen."""
        recurrence = self._recurrences.setdefault(key, Recurrence())
        rules = self._rules.get(key)
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
        rules = strategy.session.step.rules
        mine = rules.loss_reduction
        # A sum is seen where slices show it, and a process whose batch stays whole sees nothing.
        if "sum" in gather_objects("agreeing on the loss", mine):
            rules.loss_reduction = "sum"

    @contextmanager
    def _rehearsal(self, call: Call, loss_reduction: str) -> Iterator[Rehearsal]:
        """A context in which a step can be rehearsed."""
        requested: list[str] = []
        # The dispatch mode of a rehearsal sees no operators inside of compiled code.
        with code_iterators_guarded(self._strategy.lightning_module, requested), uncompiled():
            yield Rehearsal(self._strategy, call, loss_reduction, requested)

    def _trial(self) -> AbstractContextManager[None]:
        """Under a memory budget, the step needs the room that shadows hold in reference cycles."""
        if self._strategy.plans_memory:
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
        news = self._take_news(call.name, before) | before.news.unchecked | fresh
        found = self._try(call)
        if found is not None:
            self._follow(call, *found, before, news)

    def _try(self, call: Call) -> tuple[Rehearsal, Outcome] | None:
        """Rehearses a step; ``None`` if it cannot be, or if its batches are cut in another way from here on."""
        strategy = self._strategy
        try:
            with self._rehearsal(call, self._loss_reduction) as rehearsal:
                outcome = rehearsal.run()
        except SlicesFail as failure:
            if not self._left_micro_batches(call, NOT_ALIKE + failure.reason) and not self._left_slices(call, failure):
                strategy.session.whole_batches.give_whole(call.name, failure.reason, failure.advice)
            return None
        # One batch goes whole, and makes them; by then replicas can be made with them.
        except PartsAppear as made:
            self._give_whole_for(call, made)
            return None
        except NotRehearsed as reason:
            if not self._left_micro_batches(call, f"they could not be checked: {reason}"):
                self._note_unchecked(f"dpx: {call.name} was not checked against one device: {reason}")
            return None
        except BaseException as error:  # such as Ctrl-C; any other error of the step is announced, and ends nothing
            error.add_note(f"In the rehearsal of {call.name}, which checks its slices against one device.")
            raise
        if self._left_micro_batches(call, rehearsal.what_micro_batches_change(outcome)):
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
            strategy.session.whole_batches.keep_unequal(call.name)
        if rehearsal.least_rows:
            self._least_rows[key] = rehearsal.least_rows
        rules = self._joined(key, outcome, news)
        # Kept unless the step does something new: processes have agreed on it, and one
        # alone must not leave that.
        if self._again[key] and not (news and strategy.num_processes == 1):
            rules.loss_reduction = before.loss_reduction
        self._rules[key] = rules
        # Before threads append to a list in any order, which no later step could put right.
        if rules.attributes.growing:
            strategy.session.replicas.note_shared_write(call.name)
        self._spot_checks.news(key, outcome.comparison.differences)
        self._keep_order(call.name, outcome.comparison)
        strategy.session.metrics.take_rules(rehearsal.metric_rules)
        if call.name == "training_step":
            strategy.session.step.rules = rules
        # Norms are left out of the comparison, and they are a difference
        # from one device all the same.
        if self._verify == "first" and rehearsal.norms and not outcome.comparison.differences:
            norms = ", ".join(rehearsal.norms[:3])
            strategy.session.whole_batches.give_whole(
                call.name,
                f"{norms} would normalize by slice, and not by batch as on one device.",
                "Trainer(sync_batchnorm=True) makes it the whole batch's; verify='warn' runs slices all the same.",
            )
        else:
            self._tell(key, outcome.comparison, is_first=bool(news) or not self._again[key])

    def _look_again(self, call: Call) -> bool:
        """Rehearses a checked step on other rows, with the rules that were found; tells only news.

        Returns whether the batch may have to be cut in another way now.
        """
        key = call.key
        rules = self.rules(*key)
        strategy = self._strategy
        try:
            with self._rehearsal(call, rules.loss_reduction) as rehearsal:
                part = None if key in self._least_rows else self._spot_checks.part(key)
                outcome = rehearsal.look_again(part, self._found[key], rules)
        except SlicesFail as failure:
            return self._leave_slices_later(call, failure)
        except PartsAppear as made:
            self._give_whole_for(call, made)
            return True
        except NotRehearsed as reason:
            self._say(f"dpx: {call.name}, checked before, could not be looked at again: {reason}")
            return False
        fresh = frozenset((outcome.findings.keys() | outcome.logged.keys()) - (rules.news.seen or frozenset()))
        if fresh and self._again[key] < _AT_MOST:
            # What the step does for the first time in this batch is judged before it does so: in the real step
            # it would come together by types, and the next batch may not have it.
            self._again[key] += 1
            self._rehearse(call, fresh)
            return True
        comparison = outcome.comparison
        # What was told once is not told again at batches 2, 4, 8 and so on.
        comparison.differences = self._spot_checks.news(key, comparison.differences)
        # What is drawn by rows after all must not be drawn alike by all slices.
        rules.draws_once -= outcome.judge.draws_by_rows
        self._narrow(key, outcome)
        self._keep_order(call.name, outcome.comparison)
        if not comparison.differences:
            return False
        comparison.notes.append("The batches that were checked before had shown nothing of it")
        if strategy.session.replicas.cuts_slices:  # without them the step may not fit, and would end in the middle
            comparison.notes.append("With micro_batches=1 it stays in one piece")
        self._tell(key, comparison, is_first=False)
        return True

    def _give_whole_for(self, call: Call, made: PartsAppear) -> None:
        """This batch goes whole; the next one is rehearsed with what it has made."""
        self.reopen(call.name)
        self._strategy.session.metric_watch.note_hooks()
        self._strategy.session.whole_batches.give_next_whole(call.name, made.reason, made.advice)

    def _keep_order(self, name: str, comparison: Comparison) -> None:
        """A step that writes what lies outside of the module takes turns, or threads would write it in any order."""
        if any(path.startswith(OUTSIDE) for path in comparison.changed):
            self._strategy.session.replicas.note_shared_write(name)

    def _check_smaller_slices(self, call: Call, rows: int) -> bool:
        """Tries slices of fewer rows than any before, of a step that did not run on a few rows, such as ``topk(8)``.

        Returns whether the batch stays whole now.
        """
        try:
            with self._rehearsal(call, self._loss_reduction) as rehearsal:
                rehearsal.check_real_slices()
        except SlicesFail as failure:
            self._strategy.session.whole_batches.keep_small(call.name, rows, failure.reason)
            return True
        except (NotRehearsed, PartsAppear):
            return False  # whatever it is, the step itself meets it
        self._least_rows[call.key] = rows
        return False

    def _narrow(self, key: Key, outcome: Outcome) -> None:
        """Keeps the rules that fit other rows, too; what is still undecided is left alone."""
        rules = self.rules(*key)
        of_outputs, of_logs = self._found[key]
        for chosen_rules, before, now in (
            (rules.outputs, of_outputs, outcome.findings),
            (rules.logged, of_logs, outcome.logged),
        ):
            # Of what was only zero nothing has been found that could be narrowed.
            for path in before.keys() & now.keys() - rules.news.undecided:
                before[path] = now[path]
                if CHANGES not in now[path].rules:
                    rules.attributes.disjoint.discard(path.removeprefix("self."))
                if now[path].rules and path in chosen_rules:
                    chosen_rules[path] = now[path].rules[0]

    def _left_micro_batches(self, call: Call, reason: str) -> bool:
        """Gives up micro-batches that were chosen for memory, if there is a reason to."""
        if not reason:
            return False
        left: bool = self._strategy.session.memory.leave_micro_batches(call.name, reason)
        return left

    def _leave_slices_later(self, call: Call, failure: SlicesFail) -> bool:
        """A step that was checked does by now what slices cannot; whether its batches may stay whole from here on."""
        if self._keeps_micro_batches(call.name, failure.reason):
            return False
        if not self._left_slices(call, failure):
            self._strategy.session.whole_batches.give_whole(call.name, failure.reason, failure.advice)
        return True

    def _keeps_micro_batches(self, name: str, reason: str) -> bool:
        """Whether the step stays in micro-batches, though slices cannot do what it does by now; warns if so."""
        strategy = self._strategy
        # In one piece the step may not fit, and would end the run here: that is left to the user.
        if not strategy.session.replicas.cuts_slices or not strategy.plans_memory:
            return False
        rank_zero_warn(
            f"dpx: {name} is no longer what one device does: {reason} With micro_batches=1 it stays in one piece."
        )
        return True

    def after_step(self, name: str, rules: AttributeRules) -> None:
        """Acts on what a real step did that no rehearsal can have seen: lists are full by now."""
        if not rules.lost_items:
            return
        paths = ", ".join(sorted(rules.lost_items))
        rules.lost_items.clear()
        rules.growing = set()  # said once
        reason = f"It takes items out of {paths}, or puts others in their place, which every slice does for itself."
        if not self._keeps_micro_batches(name, reason):
            advice = "Do it in on_train_batch_end and its like, which see the whole batch."
            self._strategy.session.whole_batches.give_whole(name, reason, advice)

    def _note_unchecked(self, text: str) -> None:
        """A step could not be rehearsed, as ``text`` says; with ``verify="raise"`` its run ends after the step."""
        # Not before it: what the step raises in a rehearsal it mostly raises itself, and then as the user's own error,
        # which a debugger, or a search for a batch size, knows.
        if self._verify == "raise":
            self._unchecked = text
        else:
            self._say(text)

    def refuse_unchecked(self) -> None:
        """Called once a step has run.

        Raises:
            ParityError: it could not be checked, and ``verify="raise"``.
        """
        text = self._unchecked
        self._unchecked = ""
        if text:
            raise ParityError(
                f"{text.rstrip('.')}. With verify='raise' every step has to be checked: mend what the check cannot do, "
                "or give verify='warn', which goes on unchecked and says so."
            )

    def _left_slices(self, call: Call, failure: SlicesFail) -> bool:
        """Gives up micro-batches and rehearses the slices of devices, where there are several."""
        replicas = self._strategy.session.replicas
        if not replicas.cuts_slices or len(replicas.devices) == 1:
            return False
        replicas.partition.leave_slices(training=call.name == "training_step")
        self._say(f"dpx: {call.name} has its slices in one piece, not in micro-batches: {failure.reason}")
        sizes = replicas.sizes(call.num_rows)
        active = tuple(index for index, size in enumerate(sizes) if size)
        if len(active) > 1:
            # Other slices than before, so nothing of the failed rehearsal says how they behave.
            self._rehearse(replace(call, active=active))
        return True

    def tell_rest(self) -> None:
        """A run ends: tells what steps have done for the first time since they were rehearsed."""
        for (name, _), rules in self._rules.items():
            self._take_news(name, rules, "")

    def _take_news(self, name: str, rules: MergeRules, then: str = _CHECKED_AGAIN) -> frozenset[str]:
        """Takes, and announces, what a step did for the first time since it was rehearsed."""
        news = rules.news.take()
        if news:
            paths = ", ".join(sorted(path.removeprefix("result.") for path in news))
            self._say(
                f"dpx: {name} has done more in the last batch than when it was checked ({paths}): that was put "
                f"together unchecked there (an attribute holds what slices made of it){then}."
            )
        return news

    def _tell(self, key: Key, comparison: Comparison, *, is_first: bool) -> None:
        """Says what was found, or acts on it."""
        if not comparison.differences:
            if is_first:
                self._say(comparison.line())
        # Raised for any difference, also in a later look: the user asked for
        # parity and not for a report.
        elif self._verify == "raise":
            raise ParityError(comparison.complaint())
        elif self._verify == "first":
            text = f"on {comparison.rows} rows its slices differ from one device: {comparison.summary()}."
            self._strategy.session.whole_batches.give_whole(key[0], text, "verify='warn' runs its slices all the same.")
        # Rehearsed again because it has done something new, a step differs by what was told before as well.
        elif not self._spot_checks.is_told(key, comparison.subjects()):
            rank_zero_warn(comparison.complaint())

    def _joined(self, key: Key, outcome: Outcome, news: frozenset[str]) -> MergeRules:
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
            was_zero = self._rules[key].news.undecided
            sums = [path.removeprefix("result.") for path in was_zero if found.get(path) == "sum"]
            if sums:
                rank_zero_warn(
                    f"dpx: {', '.join(sums)} of {key[0]} had been zero until the last batch, so its values were merged "
                    "by their type there; they add up, as is seen now."
                )
        self._found[key] = findings, logged
        news_of_stage = self._rules[key].news
        # What differs from run to run was compared with nothing, and is no number that has only been zero.
        still_zero = (undecided(findings) | undecided(logged)) - outcome.unstable
        if still_zero and self._again[key] == _AT_MOST:
            names = ", ".join(sorted(path.removeprefix("result.") for path in still_zero))
            rank_zero_warn(
                f"dpx: {names} of {key[0]} was zero, or missing on some slices, in {_AT_MOST + 1} rehearsals and not "
                "in batches, so nothing is known about whether it adds up over slices; it is merged by its type "
                "(floating-point numbers are averaged, integers added)."
            )
            still_zero = frozenset()
        news_of_stage.learn(
            findings.keys() | logged.keys(),
            outcome.comparison.changed,
            undecided=still_zero,
            news=news,
            checked=outcome.findings.keys() | outcome.logged.keys(),
        )
        judge = outcome.judge
        return MergeRules(
            outputs={path: rule for path, rule in chosen(findings).items() if not is_kept(path)},
            logged=chosen(logged),
            loss_reduction=judge.loss_reduction,
            news=news_of_stage,
            attributes=_attribute_rules(self._rules[key].attributes, judge.attributes, findings),
            buffers=judge.buffers,
            same_batch_sizes=judge.same_batch_sizes,
            metrics_give_slices=judge.metrics_give_slices,
            draws_once=judge.draws_once,
            draws=self._rules[key].draws or judge.draws,
        )

    def _say(self, text: str) -> None:
        if text not in self._said:
            rank_zero_info(text)
        self._said.add(text)


def _attribute_rules(earlier: AttributeRules, judge: AttributeJudge, findings: Mapping[str, Finding]) -> AttributeRules:
    """How attributes come together after another rehearsal.

    Args:
        earlier: The rules until here.
        judge: Of the rehearsal.
        findings: Of it and earlier ones, together.
    """
    rules = {path: rule for path, rule in chosen(findings).items() if is_kept(path)}
    appended = dict[ListPlace, int]()
    for place, number in judge.appended.items():
        if all(one.rules for one in found_at(place, findings)):
            appended[place] = number
    rebound = {path for path in judge.numbers_among(findings) if f"self.{path}" in rules}
    return AttributeRules(
        rules=rules,
        appended=appended,
        growing=earlier.growing | judge.growing,
        rebound=rebound,
        disjoint={path for path in rebound if CHANGES in findings[f"self.{path}"].rules},
        row_counts=earlier.row_counts,
    )


def _least_rows_of(slices: Sequence[BatchSlice]) -> int:
    return min(batch_slice.num_rows for batch_slice in slices)


def _call_of(name: str, slices: Sequence[BatchSlice], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    rows = sum(batch_slice.num_rows for batch_slice in slices)
    active = tuple(batch_slice.replica.index for batch_slice in slices)
    return Call(name=name, args=args, kwargs=kwargs, active=active, num_rows=rows)
