"""The user's own step as every replica runs it, and what its calls of ``self.log`` become: third stage of a step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_dpx.devices import is_out_of_memory
from lightning_dpx.errors import DPXError, GatherError, some_of
from lightning_dpx.lightning.first_draws import FirstDraws
from lightning_dpx.lightning.first_writes import follow_first_writes
from lightning_dpx.lightning.lightning_api import ClosureResult, rank_zero_warn
from lightning_dpx.lightning.logging import StepLog, path_of, replay
from lightning_dpx.lightning.lost_numbers import (
    LostNumbersError,
    follow_lost_numbers,
    give_whole_after_lost,
    numbers_of_output,
    single_numbers,
)
from lightning_dpx.lightning.metrics.made_metrics import ADVICE, MetricsAppear, why_whole
from lightning_dpx.lightning.open_losses import OpenLossError, sum_of_several_losses
from lightning_dpx.lightning.own_backwards import BACKWARDS_ASK, RUNNING, BackwardWatch, may_drop_gradients
from lightning_dpx.lightning.rehearsal.outcome import in_one_line
from lightning_dpx.lightning.slice_errors import SliceStepError, SomeStopError, may_be_of_slices
from lightning_dpx.lightning.step_beginning import StepBeginning
from lightning_dpx.lightning.transfers import Transfer
from lightning_dpx.lightning.whole_batches import COUNT_ELSEWHERE
from lightning_dpx.replicas import BatchDraws, BatchSlice, ListWatch, MergeRules, NumberWatch, weights_of

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

_NOTHING = nullcontext()


class ReplicaCall:
    """One step of the user's, to be called with every replica's slice, perhaps in several threads at once.

    Args:
        session: Whose replicas run it.
        name: Of the step.
        args: What it gets after its batch.
        kwargs: What it gets beside.
        dataloader_idx: Of an evaluation with several loaders.
        checks_loss: Whether a replica's output must be what Lightning takes for a loss.
    """

    __slots__ = (
        "_args",
        "_backwards",
        "_changes_settings_once",
        "_checks_loss",
        "_draws",
        "_drops_backwards",
        "_key",
        "_kwargs",
        "_logs",
        "_logs_at_once",
        "_name",
        "_numbers",
        "_others_follow",
        "_session",
        "_stops",
        "_trainer",
        "_transfer",
    )

    def __init__(
        self,
        session: "Session",
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        dataloader_idx: int = 0,
        checks_loss: bool = False,
    ) -> None:
        self._session = session
        self._name = name
        self._key = name, dataloader_idx
        self._args = args
        self._kwargs = kwargs
        self._checks_loss = checks_loss
        # Asked for once a step: of a module, for every slice, the two of them took 4 us.
        self._trainer = session.trainer
        self._others_follow = session.replicas.cuts_slices
        self._transfer = Transfer(self._trainer, session.module, dataloader_idx)
        self._logs: dict[int, StepLog] = {}
        self._logs_at_once = False
        # By the index of a replica, what its slice gives for its batch; where that is looked at.
        self._numbers: dict[int, dict[str, Any]] | None = None
        self._changes_settings_once = False
        self._draws: BatchDraws | None = None
        self._stops: list[int] | None = None  # replicas that have said that the run shall end
        self._backwards: BackwardWatch | None = None  # of all slices, where none may run one
        self._drops_backwards = False  # whether slices may run some whose gradients they drop

    def __call__(self, batch_slice: BatchSlice) -> Any:
        """What the replica's own step returns for its slice."""
        session = self._session
        module = batch_slice.replica.module
        if self._changes_settings_once:
            session.settings.begin_slice()
        if self._draws is not None:
            self._draws.begin_slice(batch_slice.replica.device)
        # Outside of effects_once(), as in a second pass, what is logged is dropped with this object.
        log = self._logs.get(batch_slice.replica.index) or StepLog(batch_slice)
        recording = _NOTHING if self._logs_at_once else log.recording(module)  # type: ignore[arg-type]
        context = session.context(module) if session.has_contexts else _NOTHING
        with recording, context:
            batch = session.batches.to_replica(batch_slice, self._transfer)
            # As step_of() does, which is three more calls for every slice.
            watch = BackwardWatch(refuses=False) if self._drops_backwards else self._backwards
            running = RUNNING.set(None if watch is None else (watch, module))
            try:
                output = getattr(module, self._name)(batch, *self._args, **self._kwargs)
            finally:
                RUNNING.reset(running)
        if watch is not None and self._drops_backwards:
            watch.refuse_gradients()
        session.batches.writes.let_go(batch_slice, others_follow=self._others_follow)
        if self._stops is not None and self._trainer.should_stop:
            # All replicas have one Trainer: taken back at once, the answer of the next slice
            # is its own.
            self._trainer.should_stop = False
            self._stops.append(batch_slice.replica.index)
        if self._checks_loss and output is not None and not isinstance(output, Tensor):
            # After the merge it would not be known which replica returned it.
            _check_loss(output)
        if self._numbers is not None and output is not None:
            self._numbers[batch_slice.replica.index] = numbers_of_output(output)
        return output

    def share_draws(self, rules: MergeRules) -> None:
        """What one device draws once for a batch, all slices draw alike, as far as it is known."""
        if rules.draws_once:
            replicas = self._session.replicas
            self._draws = BatchDraws(rules.draws_once, replicas.traits.draws.generators, replicas.root.device)

    @contextmanager
    def effects_once(self, slices: Sequence[BatchSlice], rules: MergeRules) -> Iterator[None]:
        """Runs the slices in here; what each does to objects that all share happens once, for the whole batch.

        That is: logs, metrics, iterators, settings of optimizers, ``should_stop``. Where the slices do not fit
        together, all of it is taken back, as the step may run again.

        Args:
            slices: The slices.
            rules: How logged values are merged.
        """
        session = self._session
        self._begin(slices, rules)
        # It may have to run again, whole: where it draws for the first time, or fails on a slice.
        beginning: StepBeginning | None = None
        if len(slices) > 1 and rules.news.seen is not None:
            beginning = StepBeginning(session, self._name, slices, rules)
            self._numbers = {}
            session.replicas.state.buffers.watch(rules.written_buffers)
        session.metric_watch.made.begin()
        with _joined_state(session, self._name, slices, rules) if rules.attributes else _NOTHING as numbers:
            try:
                with self._shared_objects(slices), self._settings_changed_once(), self._stopped_once(slices, beginning):
                    # A clone of a shared metric is where that is, and fails on the rows of another device.
                    try:
                        with self._backwards_asked(slices, rules):
                            yield
                    except Exception as error:
                        _blame_metrics(session, self._name, slices, error)
                        # In here as well: what the slices have done is taken back.
                        if beginning is not None and may_be_of_slices(error) and beginning.can_begin_again():
                            beginning.put_back()
                            raise SliceStepError(error) from error
                        raise
                    # In here, where what the slices have done to metrics and iterators can be taken back.
                    if len(slices) > 1:
                        self._follow_news(slices, rules, beginning, numbers)
            except GatherError as error:
                self._take_back(error, beginning)
                raise
            state = session.replicas.python_state
            if rules.news.seen is not None:
                known = rules.news.seen_attributes
                note = partial(session.verification.note_changed, self._key, rules.news.batch, known)
                state.unseen.begin(note, known)
            state.collect([batch_slice.replica for batch_slice in slices])
        self._end(rules)

    def _begin(self, slices: Sequence[BatchSlice], rules: MergeRules) -> None:
        """The slices find the objects that they share, with logs of their own."""
        session = self._session
        metrics = session.metrics
        if rules.draws_once:
            self.share_draws(rules)
        self._logs = {batch_slice.replica.index: StepLog(batch_slice) for batch_slice in slices}
        # The whole batch on the user's own module, which may read what it has logged.
        self._logs_at_once = len(slices) == 1 and slices[0].replica is session.replicas.root
        session.replicas.python_state.share(by_several=len(slices) > 1)
        metrics.refresh(session.replicas.root.modules)
        # Whether values of slices, merged, are those of the batch is what a rehearsal has found.
        metrics.gives_slices = rules.metrics_give_slices

    def _follow_news(
        self,
        slices: Sequence[BatchSlice],
        rules: MergeRules,
        beginning: StepBeginning | None,
        numbers: NumberWatch | None,
    ) -> None:
        """Looks for what slices have done for the first time, which the whole batch is to do.

        Raises:
            GatherError: the step is to run again, on the whole batch.
        """
        session = self._session
        if beginning is not None:
            if not rules.draws:
                FirstDraws(session, self._name, beginning, rules).follow()
            follow_first_writes(session, slices, rules, beginning)
            self._follow_numbers(slices, rules, beginning)
        begun_again = _begun_again(session, slices, rules, numbers)
        if begun_again:
            _follow_counts(session, self._name, begun_again)
        _follow_metrics(session, self._name)

    def _follow_numbers(self, slices: Sequence[BatchSlice], rules: MergeRules, beginning: StepBeginning) -> None:
        """Has the whole batch give what is nan on its slices.

        Raises:
            LostNumbersError: the step is to run again.
            OpenLossError: likewise.
        """
        values: dict[int, dict[str, Any]] = self._numbers or {}
        for index, log in self._logs.items():
            logged = single_numbers((path_of(key), value) for key, (value, _) in log.entries.items())
            values[index] = {**values.get(index, {}), **logged}
        names = follow_lost_numbers(slices, values, rules)
        if names:
            if beginning.can_begin_again():
                raise LostNumbersError(names, rules)
            give_whole_after_lost(self._session, self._name, names)
            return
        # Processes have agreed on what the loss is, and run again together only.
        if rules.loss_is_open and not self._session.spans_processes and beginning.can_begin_again():
            total = sum_of_several_losses(values)
            if total is not None:
                raise OpenLossError(total, rules)

    def _take_back(self, error: GatherError, beginning: StepBeginning | None) -> None:
        """The step may run again, on the whole batch, and must not count twice."""
        session = self._session
        session.replicas.python_state.put_back()
        session.batches.writes.begin_again()
        # What slices have drawn the whole batch draws again, from where one device would.
        if beginning is not None:
            beginning.put_back()
        # In objects they are still there, with what slices have given them.
        if isinstance(error, MetricsAppear):
            session.metric_watch.made.reset(session.modules)

    def _end(self, rules: MergeRules) -> None:
        """What the slices have logged, and given to metrics, is logged and given for the batch."""
        session = self._session
        metrics = session.metrics
        replay(list(self._logs.values()), session.module, session.strategy.root_device, metrics, rules)
        # Only after the replay, which asks which logged values are those of the
        # whole batch already.
        metrics.end_step()
        for reason in metrics.separate:
            advice = "Give the metric one row per sample, padded to one size."
            session.whole_batches.give_whole(self._name, reason, advice)

    def _backwards_asked(self, slices: Sequence[BatchSlice], rules: MergeRules) -> AbstractContextManager[Any]:
        """A backward that a step with automatic optimization runs itself has the step run on the whole batch."""
        session = self._session
        # By hand replicas meet in their backwards; and what cannot run again goes on.
        if self._name != "training_step" or len(slices) == 1 or not session.can_repeat(self._name):
            return _NOTHING
        self._drops_backwards = rules.drops_gradients and may_drop_gradients(self._trainer)
        self._backwards = BackwardWatch(refuses=True)
        return BACKWARDS_ASK

    @contextmanager
    def _stopped_once(self, slices: Sequence[BatchSlice], beginning: StepBeginning | None) -> Iterator[None]:
        """A run ends by ``trainer.should_stop`` where all slices say so; what some say is no word of the batch.

        Raises:
            SomeStopError: the step is to run again, on the whole batch, which says it for all.
        """
        trainer = self._trainer
        # The run was stopped before this step, or one slice is the whole batch.
        if trainer.should_stop or len(slices) == 1:
            yield
            return
        self._stops = []
        yield
        if not self._stops:
            return
        if len(self._stops) == len(slices):
            trainer.should_stop = True
            return
        if beginning is not None and beginning.can_begin_again():
            raise SomeStopError(self._name)
        rank_zero_warn(
            f"dpx: {self._name} has set trainer.should_stop on some of its slices, and not on all: what one device "
            "would do is not known, so the run goes on. Decide it in on_train_batch_end and its like, which see the "
            "whole batch."
        )

    @contextmanager
    def _settings_changed_once(self) -> Iterator[None]:
        """What slices do to optimizers and schedulers, which they share, is done once in here."""
        session = self._session
        # By hand every replica has a view of the optimizers instead: see manual/replica_views.py.
        if not (session.strategy.optimizers and session.module.automatic_optimization):
            yield
            return
        replicas = session.replicas
        self._changes_settings_once = replicas.order.runs_one_by_one(self._name)
        with session.settings.changed_once():
            yield
        if session.settings.has_changed and not self._changes_settings_once:
            replicas.order.note_shared_write(self._name)
            rank_zero_warn(
                f"dpx: {self._name} has changed settings of an optimizer (a learning rate, say) while its slices ran "
                "at once, so each of them may have changed them in this batch. From the next one on they take turns, "
                "and change them once."
            )

    def _shared_objects(self, slices: Sequence[BatchSlice]) -> AbstractContextManager[Any]:
        """What replicas do to metrics and iterators, which they share, is done once in here."""
        session = self._session
        state = session.replicas.python_state
        if not session.metrics and not state.has_iterators:
            return _NOTHING
        with ExitStack() as stack:
            # A step that may be repeated must find the metrics as they were before its first run.
            stack.enter_context(session.metrics.step(slices, restore=session.memory.repeats_steps))
            if state.has_iterators:
                stack.enter_context(state.iterators_shared())
            # Until here an error in entering the second context leaves the first one as well.
            return stack.pop_all()


@contextmanager
def _joined_state(
    session: "Session", name: str, slices: Sequence[BatchSlice], rules: MergeRules
) -> Iterator[NumberWatch]:
    """A step on slices in here leaves in lists and attributes what it would on one device, as far as it is known.

    Gives what has seen the numbers.
    """
    root = session.module
    modules = [batch_slice.replica.module for batch_slice in slices]
    places = {*rules.attributes.appended, *rules.attributes.growing}
    # The user's own module is watched even where it has no slice: what is joined ends up there.
    lists = ListWatch([root, *(module for module in modules if module is not root)], places)
    numbers = NumberWatch(modules, root, rules.attributes.rebound, rules.attributes.read)
    try:
        yield numbers
    except GatherError:
        lists.put_back()
        numbers.put_back()
        raise
    weights = weights_of(slices)
    rules.attributes.join_appended(lists, weights, session.strategy.root_device)
    rules.attributes.join_rebound(numbers, weights, session.strategy.root_device)
    session.verification.after_step(name, rules.attributes)


def _begun_again(
    session: "Session", slices: Sequence[BatchSlice], rules: MergeRules, numbers: NumberWatch | None
) -> list[str]:
    """Attributes and buffers that have counted rows until now, and that a slice has taken back."""
    sums = [name for name, rule in rules.buffers.items() if rule == "sum"]
    if numbers is None and not sums:
        return []
    weights = weights_of(slices)
    found = [] if numbers is None else rules.attributes.counts_begun_again(numbers, weights)
    if sums:
        active = [batch_slice.replica for batch_slice in slices]
        found += rules.attributes.sums_begun_again(session.replicas.state.buffers.added(active, sums), weights)
    return found


def _follow_counts(session: "Session", name: str, begun_again: list[str]) -> None:
    """Has the whole batch count where slices cannot: a count that begins again does so once, and by all rows.

    Raises:
        GatherError: the step is to run again, on the whole batch.
    """
    reason = (
        f"self.{', self.'.join(begun_again)} has counted rows until now, and begins again in this batch: on one device "
        "that depends on the count of the whole batch, of which a slice has its own part (so the count may have begun "
        "again late)."
    )
    if session.can_repeat(name):
        raise GatherError(reason)
    session.whole_batches.give_whole(name, reason, COUNT_ELSEWHERE)


def _follow_metrics(session: "Session", name: str) -> None:
    """Has the whole batch make metrics where slices have each made their own.

    Raises:
        MetricsAppear: the step is to run again, on the whole batch.
    """
    paths = session.metric_watch.made.held_by(session.modules, list(session.metrics.named))
    if not paths:
        return
    if session.can_repeat(name):
        raise MetricsAppear(*why_whole(paths))
    session.metric_watch.note_hooks()
    rank_zero_warn(
        f"dpx: {name} has made metrics in a batch ({some_of(paths)}), which have the rows of the first replica alone "
        f"there. {ADVICE}"
    )


def _blame_metrics(session: "Session", name: str, slices: Sequence[BatchSlice], error: Exception) -> None:
    """Has the whole batch try what slices have failed in, if these have made metrics: a clone is on another's device.

    Raises:
        MetricsAppear: the step is to run again, on the whole batch.
    """
    # An error of this package has a remedy of its own, and what does not fit as slices fits less as a whole.
    may_be_theirs = session.metric_watch.made and len(slices) > 1 and not is_out_of_memory(error)
    if may_be_theirs and not isinstance(error, DPXError) and session.can_repeat(name):
        reason = f"The step makes metrics in it, and slices, which make their own, raise {in_one_line(error)}"
        raise MetricsAppear(reason, ADVICE) from error


def _check_loss(output: Any) -> None:
    """Lightning's own complaint about what a step returns, where the replica that returned it is known."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        ClosureResult.from_training_step_output(output)
