"""Manual optimization on replicas: backward is each replica's own, whatever touches an optimizer happens once.

User code drives backward and optimizers, on every replica. Each replica's backward is a meeting after which all hold
the gradients of the whole batch (see :mod:`lightning_dpx.lightning.manual.shared_gradients`), so what the code does
with gradients it does as on one device. ``optimizer.step()``, ``scheduler.step()`` and any other method of theirs are
meetings, too: when the last replica has arrived, the real method runs once, and the new parameters go back to the
replicas. The objects themselves know who is asking (see :mod:`lightning_dpx.lightning.manual.acts_once`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dpx.errors import WholeBatchError
from lightning_dpx.lightning.lightning_api import (
    Callback,
    LightningModule,
    MixedPrecision,
    Precision,
    Strategy,
    is_overridden,
)
from lightning_dpx.lightning.lightning_compat import lightning_optimizers_of
from lightning_dpx.lightning.manual.acts_once import Exchanged, held_optimizers, unwrapped_optimizer, viewed
from lightning_dpx.lightning.manual.backward_calls import backwards_intercepted
from lightning_dpx.lightning.manual.closures import ClosureRounds, Command, RunClosure, StepDone
from lightning_dpx.lightning.manual.loss_merger import LossMerger
from lightning_dpx.lightning.manual.replica_views import ReplicaView, optimizers_checked
from lightning_dpx.lightning.manual.restarts import Restarts
from lightning_dpx.lightning.manual.shared_gradients import SharedGradients
from lightning_dpx.lightning.precision import DPXPrecision
from lightning_dpx.replicas import (
    BatchSlice,
    Replica,
    ReplicaSet,
    current_rank,
    weights_of,
)
from lightning_dpx.shifting import unshifted
from lightning_dpx.step import TrainingStep
from lightning_dpx.torch_compat import preserve_version_counter, version_counter

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy


class ManualOptimization:
    """What the replicas of a manual step do together, from the first step of a fit to its end.

    Args:
        strategy: Knows the optimizers and the schedulers.
        replicas: The replicas.
        step: Sums gradients.
        precision: Scales losses and steps optimizers.

    Attributes:
        gradients: Those of all slices, as every replica finds them after its backward.
        exchanged: Optimizers and schedulers that replicas share, which ask who calls while a step runs.
        active: The replicas that have rows of the batch.
        views: What each of them sees of optimizers; none where one replica does the whole step on its own.
    """

    def __init__(
        self, strategy: "DPXStrategy", replicas: ReplicaSet, step: TrainingStep, precision: DPXPrecision
    ) -> None:
        self.strategy = strategy
        self.replicas = replicas
        self.step = step
        self.precision = precision
        self.gradients: SharedGradients = SharedGradients(replicas, step)
        self.exchanged: Exchanged = Exchanged()
        self.active: list[Replica] = []
        self.views: list[ReplicaView] = []
        self._restarts = Restarts(strategy, replicas, step)
        self._losses = LossMerger(step, replicas.root.device)
        self._rows = 0.0
        self._rounds: ClosureRounds | None = None
        self._loss: Any = None  # of the backward that is under way, as on_before_backward got it
        self._names = _names_of(replicas)
        self._numbers: dict[int, int] = {}
        self._versions: list[int] = []  # of the first active replica's parameters, as all have them

    def follow_replicas(self) -> None:
        """The replicas were made anew: nothing is known of their gradients, which only the owners have."""
        self.gradients = SharedGradients(self.replicas, self.step)
        self._names = _names_of(self.replicas)

    @property
    def root(self) -> LightningModule:
        """The user's own module."""
        module: LightningModule = self.replicas.root.module  # type: ignore[assignment]
        return module

    @property
    def is_shared(self) -> bool:
        """Whether several replicas, or one that owns not all parameters, are in a step."""
        return bool(self.views)

    @property
    def _works_on_root(self) -> bool:
        """Whether one replica does the whole step on the user's own module, which owns all parameters."""
        return self.active == [self.replicas.root] and not self.step.has_other_owners and not self.step.has_processes

    @property
    def sums_nothing(self) -> bool:
        """Whether one replica has all rows of the batch, so that its gradients are those of the batch."""
        return len(self.active) == 1 and not self.step.has_processes

    @contextmanager
    def running(self, slices: Sequence[BatchSlice]) -> Iterator[None]:
        """A manual step of these slices, from before its forward to after its end."""
        weights = self.step.weights(slices)
        self.active = [batch_slice.replica for batch_slice in slices]
        self._rows = sum(weights_of(slices).of_loss)
        # A hook may have added a parameter group since the last step.
        self.strategy.session.optimize_owners()
        self.gradients.begin(self.active)
        # One replica on the user's own module: optimizers, gradients and hooks are those of
        # one device already.
        if self._works_on_root:
            yield
            self.gradients.end(self.active)
            return
        shared = self._shared_objects()
        self._restarts.begin(shared)
        self._note_versions()
        self.gradients.before_adding = self._restarts.before_adding
        self._numbers = _numbered(shared)
        # From here on they ask the view of whichever replica calls them.
        self.exchanged.add(shared)
        self.views = [
            ReplicaView(self, batch_slice, weight, is_first=index == 0)
            for index, (batch_slice, weight) in enumerate(zip(slices, weights, strict=True))
        ]
        try:
            with backwards_intercepted(), optimizers_checked():
                yield
            # What the step wrote after its last meeting counts as well.
            self._refuse_shared_writes()
            self._commit()
            self._give_values()
            self.gradients.end(self.active)
            if len(self.active) < len(self.replicas.replicas):
                # Those without rows did not write what the step wrote by hand.
                self.replicas.state.parameters.mark_changed()
            self._restarts.end()
        finally:
            # First of all, as the thread of an optimizer may still use what is restored next.
            self._abandon_rounds()
            self.exchanged.restore()
            self.gradients.before_adding = None
            self.views = []
            self._loss = None

    def _refuse_shared_writes(self) -> None:
        """What a step writes by hand into a parameter that several replicas share was written several times."""
        if len(self.active) > 1 and (name := self.replicas.state.parameters.written_by_step()):
            raise WholeBatchError(
                f"It writes parameter {name}, which the replicas on {self.replicas.root.device} share, once for each.",
                "Write it in a hook between the steps (on_train_batch_end) for all replicas to take part.",
            )

    def undo_first_step(self) -> bool:
        """Puts everything back as it was before the first step, if that is the one which has just failed."""
        was_first = self._restarts.undo_first_step()
        if was_first:
            self._forget_marks()
        return was_first

    def begin_anew(self) -> bool:
        """Puts back what slices have changed that do not agree on what to do, if nothing has been done yet."""
        begins_anew = self._restarts.begin_anew()
        if begins_anew:
            self._forget_marks()
        return begins_anew

    def _forget_marks(self) -> None:
        """After everything was put back: what was noted of parameters and gradients is of values no longer there."""
        self.replicas.state.parameters.mark_changed()
        self.gradients = SharedGradients(self.replicas, self.step)

    @contextmanager
    def on(self, batch_slice: BatchSlice) -> Iterator[None]:
        """The calling code is the step of one of the slices, for a while."""
        # There is none where the step is that of one device.
        view = next((view for view in self.views if view.replica is batch_slice.replica), None)
        with viewed(view):
            yield

    # ---- called by the views, in the replicas' own threads ----

    def meet(self, what: str, value: Any, act: Callable[[list[Any]], Any], *, optional: bool = False) -> Any:
        """``act`` of all replicas' values, run once, outside of any replica.

        Raises:
            WholeBatchError: the caller is no replica, but a thread that one has started.
        """
        rank = current_rank()
        if rank is None:
            raise WholeBatchError(f"It calls {what} in a thread of its own.", "Call it in training_step itself.")
        return rank.meet(what, value, act, optional=optional)

    def call_once(self, what: str, arguments: Any, act: Callable[[Any], Any]) -> Any:
        """``act`` of the arguments of all, run once on the owners; the replicas follow what it wrote."""
        return self.meet(what, arguments, lambda given: self._act(act, given))

    def step_once(self, what: str, closure: Callable[[], Any] | None, take_step: Callable[..., Any]) -> Any:
        """``take_step`` of a closure that is every replica's own ``closure``, which it may call any number of times."""
        command: Command = self.meet(what, closure is not None, lambda given: self._begin(take_step, given))
        try:
            while isinstance(command, RunClosure):
                loss = None
                if closure is not None:
                    # Grad mode belongs to a thread: the optimizer has set it in its own.
                    with torch.set_grad_enabled(command.grad_enabled):
                        loss = closure()
                command = self.meet(f"the closure of {what}", loss, partial(self._answer, command.rounds))
        except BaseException:
            self._abandon_rounds()
            raise
        return command.result

    def add_gradients(self, columns: Sequence[Any]) -> None:
        """Every replica gets the sum of what all backwards gave."""
        with unshifted():
            self.gradients.add(self.active, columns, self._rows)

    def total_gradients(self, columns: Sequence[Any]) -> list[Any]:
        """The sums of what the active replicas have, without a trace in any gradient."""
        with unshifted():
            return self.gradients.totals(self.active, columns, self._rows)

    def number_of(self, owner: Any) -> int | None:
        """The place of an optimizer or a scheduler among its kind; ``None`` if it is alone, or was not known."""
        return self._numbers.get(id(unwrapped_optimizer(owner)))

    def before_backward(self, losses: Sequence[Any]) -> Tensor | None:
        """Calls the hooks with the loss of the whole batch; the factor by which they scaled it, if they did."""
        self._restarts.note_act()
        present = [index for index, loss in enumerate(losses) if loss is not None]
        weights = [self.views[index].weight for index in present]
        merged = self._losses.merge([losses[index] for index in present], weights)
        # The hooks get a leaf of their own. What a scaler or hook multiplies it by is the gradient
        # of the result, and every replica scales its loss by that.
        leaf = merged.detach().clone().requires_grad_()
        self.strategy.pre_backward(leaf)
        scaled = self.precision.pre_backward(leaf, self.root)
        self._loss = scaled
        if scaled is leaf:
            return None
        factor: Tensor = torch.autograd.grad(scaled, leaf, retain_graph=True)[0]
        return factor

    def after_backward(self, _: Sequence[Any]) -> None:
        """Calls the hooks; the replicas follow what they did to gradients."""
        marks = self.gradients.marks()
        # Hooks find gradients on the user's module, and other code on the owners: either
        # may be written.
        of_root = self.gradients.marks_of_root()
        loss = self.precision.post_backward(self._loss, self.root)
        self.strategy.post_backward(loss)
        self._loss = None
        self.gradients.follow(self.active, marks)
        self.gradients.follow_root(self.active, of_root)

    def has_backward_hooks(self) -> bool:
        """Whether anything happens round a backward, beside the backward itself."""
        # Two meetings are spared in every backward where nothing would happen in them.
        names = "on_before_backward", "on_after_backward"
        trainer: Any = self.root.trainer
        wrapped = self.precision.wrapped
        # MixedPrecision only scales there, which the scaler tells.
        scales = type(wrapped).pre_backward not in (Precision.pre_backward, MixedPrecision.pre_backward)
        around = type(wrapped).post_backward is not Precision.post_backward
        own = type(self.strategy).pre_backward is not Strategy.pre_backward
        own = own or type(self.strategy).post_backward is not Strategy.post_backward
        return (
            scales
            or around
            or own
            or self.precision.scaler is not None
            or any(is_overridden(name, self.root) for name in names)
            or any(is_overridden(name, callback, parent=Callback) for callback in trainer.callbacks for name in names)
        )

    # ---- run once, while all replicas wait ----

    def _act(self, act: Callable[[Any], Any], given: Sequence[Any]) -> Any:
        self._restarts.note_act()
        merged = self._losses.merge_arguments(given, [view.weight for view in self.views])
        self._prepare()
        with unshifted():
            result = act(merged)
        # What an arbitrary method has written is not known, so the replicas take
        # all gradients again.
        self._settle(None)
        return result

    def _begin(self, take_step: Callable[..., Any], has_closure: Sequence[bool]) -> Command:
        self._restarts.note_act()
        self._prepare()
        marks = self.gradients.marks()
        if any(has_closure):
            assert self._rounds is None, "an optimizer steps inside of another one's closure outside of a replica"
            # Without a closure no thread is needed: the step is taken in the meeting itself.
            rounds = ClosureRounds(take_step, self.replicas.root.device)
            self._rounds = rounds
            with unshifted(), self.exchanged.plain():
                command: Command = rounds.begin()
        else:
            with unshifted(), self.exchanged.plain():
                command = StepDone(take_step(None))
        self._settle(marks)
        return self._continued(command)

    def _answer(self, rounds: ClosureRounds, losses: Sequence[Any]) -> Command:
        self._prepare()
        marks = self.gradients.marks()
        with unshifted(), self.exchanged.plain():
            weights = [view.weight for view in self.views]
            command = rounds.answer(self._losses.merge_of_closures(losses, weights))
        self._settle(marks)
        return self._continued(command)

    def _continued(self, command: Command) -> Command:
        if isinstance(command, StepDone):
            self._rounds = None
        return command

    def _abandon_rounds(self) -> None:
        rounds = self._rounds
        self._rounds = None
        if rounds is not None:
            rounds.abandon()

    def _prepare(self) -> None:
        """Before something happens to the owners: they get what the step wrote."""
        self._refuse_shared_writes()
        # Before the owners get the first replica's gradients: later the others' would
        # be lost unseen.
        self.gradients.check_edits(self.active, self._names)
        self._commit()
        self._give_values()
        self.gradients.to_owners(self.active)

    @torch.no_grad()
    def _give_values(self) -> None:
        """Owners without rows get the parameters of those with rows, which the step may have written by hand."""
        present: set[int] = set()
        for replica in self.active:
            present.update(map(id, replica.parameters))
        pairs: list[tuple[Tensor, Tensor]] = []
        unwritten: list[Tensor] = []
        columns = zip(self.step.owner_parameters, self.active[0].parameters, self._versions, strict=True)
        for owner, source, version in columns:
            # Replicas of one device share storage, and a copy onto itself would count as a write.
            if id(owner) not in present and owner.data_ptr() != source.data_ptr():
                pairs.append((owner, source))
                if version_counter(source) == version:
                    unwritten.append(owner)
        # What the owner then passes on is news to the graphs of this step only where it was written.
        with preserve_version_counter(tuple(unwritten)):
            for target, value in pairs:
                target.copy_(value)

    def _commit(self) -> None:
        """What the first replica wrote into the groups of optimizers counts."""
        if self.views:
            self.views[0].commit()

    def _settle(self, marks: Sequence[Any] | None) -> None:
        """After something happened to the owners: the replicas get it.

        Args:
            marks: Of the owners' gradients before; ``None`` where their versions do not tell. (A gradient scaler's
                operator writes them without a trace, as of torch 2.13.)
        """
        parameters = self.replicas.state.parameters
        with unshifted():
            # Now, as the rest of the step computes with the new parameters.
            parameters.optimizer_stepped()
            parameters.synchronize()
            if marks is None or self.precision.scaler is not None:
                self.gradients.follow_all(self.active)
            else:
                self.gradients.follow(self.active, marks)
        self._note_versions()
        for view in self.views:
            view.refresh()

    def _note_versions(self) -> None:
        """All have the same values now; what the step writes from here on has other versions."""
        self._versions = list(map(version_counter, self.active[0].parameters))

    def _shared_objects(self) -> list[Any]:
        """Optimizers, schedulers and the scaler of this fit, and the optimizers that the module holds beside them."""
        strategy = self.strategy
        found = [*strategy.optimizers, *lightning_optimizers_of(strategy)]
        found += [config.scheduler for config in strategy.lr_scheduler_configs]
        if self.precision.scaler is not None:
            found.append(self.precision.scaler)
        # Those that configure_optimizers did not return step as well, if the module holds them.
        return [*found, *held_optimizers(self.root)]


def _names_of(replicas: ReplicaSet) -> list[str]:
    return [name for name, _ in replicas.root.module.named_parameters()]


def _numbered(owners: Sequence[Any]) -> dict[int, int]:
    """By id, the places of optimizers and of schedulers among their kind, where there are several."""
    # An optimizer and Lightning's wrapper of it are one.
    distinct = list({id(one): one for one in map(unwrapped_optimizer, owners)}.values())
    optimizers = [one for one in distinct if isinstance(one, Optimizer)]
    schedulers = [one for one in distinct if not isinstance(one, Optimizer | torch.amp.GradScaler)]
    numbers: dict[int, int] = {}
    for kind in (optimizers, schedulers):
        if len(kind) > 1:
            numbers.update((id(one), place) for place, one in enumerate(kind))
    return numbers
