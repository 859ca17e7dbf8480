"""What a run is made of, from setup to teardown: a :class:`Session` of replicas, or
:class:`lightning_dpx.lightning.run.OneDevice`.

strategy --hooks of Lightning's--> session.training    batch -> loss, and after Lightning's backward the gradients
                                   session.evaluation  batch -> outputs
                                     |
                                     +-- slices, replicas, step, metrics, rules, memory: one object for each concern
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from lightning_dpx.errors import ReplicationError, some_of
from lightning_dpx.lightning.batch_writes.batch_writes import BatchWrites, unlike_one_batch
from lightning_dpx.lightning.evaluation import EvaluationFlow, loader_index
from lightning_dpx.lightning.gradient_hooks import GradientHooks
from lightning_dpx.lightning.lightning_api import TrainerFn, pl, rank_zero_warn
from lightning_dpx.lightning.lightning_compat import set_trainer
from lightning_dpx.lightning.memory.step_memory import NoStepMemory
from lightning_dpx.lightning.metrics.made_metrics import MetricsAppear
from lightning_dpx.lightning.metrics.metric_watch import MetricWatch
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.lightning.micro_batch_steps import MicroBatchSteps
from lightning_dpx.lightning.optimizer_settings import OptimizerSettings
from lightning_dpx.lightning.options import StrategyOptions
from lightning_dpx.lightning.owners import (
    begin_optimizers,
    bring_home,
    load_states,
    memory_of_dropped,
    move_optimizers,
    optimize_owners,
)
from lightning_dpx.lightning.rehearsal.verification import Verification
from lightning_dpx.lightning.run import Run
from lightning_dpx.lightning.slices import Slices
from lightning_dpx.lightning.thread_choice import ThreadChoice
from lightning_dpx.lightning.training_step import TrainingFlow
from lightning_dpx.lightning.transfers import Transfer
from lightning_dpx.lightning.whole_batches import WholeBatches
from lightning_dpx.python_objects.compiled import untraced
from lightning_dpx.reducers import Waits
from lightning_dpx.replicas import BatchSlice, ReplicaSet, StepTimes
from lightning_dpx.step import TrainingStep

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy


_MISSING = object()


class Session(Run):
    """A run on several replicas, or on one whose steps are planned, shifted or summed with other processes'.

    Args:
        strategy: Lightning's face of the run.
        replicas: The replicas of the user's module.
        metrics: The metric objects that they share.
        step: Merges losses and sums gradients.

    Attributes:
        module: The user's own module.
        has_processes: Whether gradients are summed with those of other processes.
        metric_watch: Looks for metrics that they do not share yet.
        whole_batches: Which stages get their batches whole.
        batch_writes: What steps write into their batches.
        gradient_hooks: What hooks of the user's find in gradients.
        memory: What is done about memory round a step.
        micro_batches: Runs the micro-batches of training steps, where slices are cut into such.
        slices: Cuts batches.
        threads: Whether replicas of one host run in threads.
        training: The flow of a training step.
        evaluation: The flow of the other steps.
    """

    def __init__(
        self, strategy: "DPXStrategy", replicas: ReplicaSet, metrics: ReplicaMetrics, step: TrainingStep
    ) -> None:
        super().__init__(strategy)
        self.replicas = replicas
        self.metrics: ReplicaMetrics = metrics
        self.metric_watch: MetricWatch = MetricWatch()
        self.step = step
        self.module: pl.LightningModule = replicas.root.module  # type: ignore[assignment]
        self.has_processes: bool = strategy.num_processes > 1
        self.whole_batches: WholeBatches = WholeBatches(len(replicas.devices))
        self.batch_writes: BatchWrites = BatchWrites()
        self.gradient_hooks: GradientHooks = GradientHooks()
        self.settings: OptimizerSettings = OptimizerSettings(strategy)
        self.memory: NoStepMemory = NoStepMemory()
        self.micro_batches: MicroBatchSteps | None = None
        self.slices: Slices = Slices(self)
        self.threads: ThreadChoice = ThreadChoice(self)
        self.training: TrainingFlow = TrainingFlow(self)
        self.evaluation: EvaluationFlow = EvaluationFlow(self)
        self._batch_in_place: Any = _MISSING

    def for_shadow(self, replicas: ReplicaSet, metrics: ReplicaMetrics, step: TrainingStep) -> "Session":
        """A session of a rehearsal: of its own replicas, with what the real one has found out and put on."""
        shadow = Session(self.strategy, replicas, metrics, step)
        shadow.memory = self.memory
        # One watch for both, as only that of a session is taken away in the end.
        shadow.metric_watch.made = self.metric_watch.made
        return shadow

    @property
    def options(self) -> StrategyOptions:
        """What the strategy was asked for."""
        return self.strategy.options

    @property
    def trainer(self) -> Any:
        """The trainer of the user's module."""
        return self.module.trainer

    @property
    def verification(self) -> Verification:
        """What finds out how results are merged."""
        return self.strategy.verification

    @property
    def modules(self) -> list[Module]:
        """The modules of all replicas, the user's own first."""
        return [replica.module for replica in self.replicas.replicas]

    @property
    def loss_is_sum(self) -> bool:
        """Whether the losses of slices add up to that of the batch."""
        return self.step.rules.loss_reduction == "sum"

    # ---- before and after a step ----

    def can_repeat(self, name: str) -> bool:
        """Whether a step that has run on slices can run again, on the whole batch."""
        # Other processes have run it, and would not run it again with this one; by hand optimizers have stepped.
        return not self.has_processes and (name != "training_step" or self.module.automatic_optimization)

    def show_batch(self, batch: Any) -> Any:
        """The batch as hooks of the user's get it: as the loader gave it, each replica moves its own slice."""
        self._batch_in_place = _MISSING
        if self.replicas.partition.always_merged and self._stays(batch):
            # The step gets the object that hooks get, as on one device: there is nothing to watch.
            self.batch_writes.forget()
            self._batch_in_place = batch
            return batch
        if self.batch_writes.is_for(self.module):
            return self.batch_writes.show(batch)
        return batch

    def _stays(self, batch: Any) -> bool:
        """Whether the one replica that takes every batch gets this object."""
        # The index of the loader matters to hooks only, and where there is one nothing stays.
        return Transfer(self.trainer, self.module, 0).leaves(batch, self.replicas.root.device)

    def is_in_place(self, batch: Any) -> bool:
        """Whether the one replica that takes every batch gets ``batch`` itself, which hooks have got, too."""
        return batch is self._batch_in_place

    def batch_for(self, batch_slice: BatchSlice, dataloader_idx: int = 0) -> Any:
        """The batch that the step of a replica gets, on its device."""
        # The object is on its device already, and no hook would make another of it.
        if self.is_in_place(batch_slice.batch):
            return batch_slice.batch
        return self.to_replica(batch_slice, Transfer(self.trainer, self.module, dataloader_idx))

    def to_replica(self, batch_slice: BatchSlice, transfer: Transfer) -> Any:
        """The slice where its replica lives; what the step writes into it is noticed where hooks look."""
        batch = transfer.to_replica(batch_slice)
        if self.batch_writes.is_watched:
            self.batch_writes.note(batch_slice, batch, is_as_loaded=transfer.is_plain)
        return batch

    def end_batch(self, name: str, args: tuple[Any, ...], *, backward_follows: bool = False) -> None:
        """A step has run: hooks find in the batch what it wrote there.

        Args:
            name: Of the step.
            args: Of the step.
            backward_follows: Whether activations are there until its end, when :meth:`move_batch` is called.
        """
        self.verification.refuse_unchecked()
        if not self.batch_writes.is_watched:
            return
        # Several training loaders give one combined batch; only evaluation tells its loaders apart.
        rules = self.verification.rules(name, 0 if name == "training_step" else loader_index(args))
        problem = self.batch_writes.finish(rules, self.strategy.root_device, self.replicas.output_dim)
        if problem is not None:
            self.whole_batches.give_whole(name, *unlike_one_batch(problem))
        # No hook gets the batch until then, and all of its rows would be there beside the activations.
        if not backward_follows:
            self.move_batch()

    def move_batch(self) -> None:
        """Hooks find the batch on the device of the module."""
        if self.batch_writes.is_watched:
            self.batch_writes.move_to(self.strategy.root_device)

    def before_evaluation_batch(self) -> None:
        """Several processes may be told to stop between two batches."""
        self.strategy.before_evaluation_batch()

    def announce_replicas(self, what: str) -> None:
        """Says once what the replicas do."""
        strategy = self.strategy
        number = len(strategy.parallel_devices or [])
        strategy.announce(f"dpx: {number} replicas on {strategy.root_device} {what}.")

    # ---- a module whose parts have changed ----

    def follow_structure(self, name: str) -> bool:
        """What was pruned, parametrized, added or exchanged on the module since the last step: replicas anew.

        Args:
            name: Of the step that comes.

        Returns:
            Whether there are replicas; if the module cannot be copied any more, the run goes on with one device.
        """
        replicas = self.replicas
        if self.shifts:
            self._give_whole_for_hooks()
            return True
        if not replicas.structure.has_changed:
            return self._follow_metrics(name)
        self.strategy.announce("dpx: the module has other parts than before; its replicas are made anew.")
        # Evaluation, too: what its step did with the old parts says nothing of the new ones.
        self.verification.reopen_all()
        return self._make_replicas_anew()

    def _follow_metrics(self, name: str) -> bool:
        """Metrics that a hook or a step has made since the replicas were made: replicas anew, which share them."""
        if len(self.replicas.replicas) == 1 or self.whole_batches.reason_for(name) is not None:
            return True
        new = self.metric_watch.new_ones(self.metrics, self.replicas.root.modules)
        if not new:
            return True
        if self.metric_watch.come_every_time:
            self.whole_batches.give_whole(
                name,
                f"The module has other metrics in every batch ({some_of(new)}), of which replicas have copies.",
                "For all devices to take part, make metrics before the run, and reset() them.",
            )
            return True
        self.strategy.announce("dpx: the module has other metrics than before; its replicas are made anew.")
        self.verification.reopen_all()
        return self._make_replicas_anew()

    def follow_made_metrics(self, name: str, made: MetricsAppear) -> None:
        """A step on slices has made metrics: it runs again, whole, and the next look has replicas share them."""
        self.metric_watch.note_repeat()
        reason = f"{made.reason} They had begun it: what it draws, and counts outside of the module, they did as well."
        self.whole_batches.give_next_whole(name, reason, made.advice)

    def cut_slices(self, micro_batches: Sequence[int], *, training: bool = True) -> bool:
        """From now on steps in this mode have their slices cut into so many micro-batches, one number for each device.

        Returns:
            Whether there are replicas; see :meth:`follow_structure`.
        """
        self.replicas.cut_slices(list(micro_batches), training=training)
        if not self._make_replicas_anew():
            return False
        self.micro_batches = MicroBatchSteps(self) if self.replicas.partition.cuts_slices(training=True) else None
        return True

    def _make_replicas_anew(self) -> bool:
        replicas = self.replicas
        step = self.step
        optimizers = self.strategy.optimizers
        homes = dict(zip(step.owner_parameters, replicas.root.parameters, strict=True))
        self.strategy.planning.remove(replicas)
        metrics = ReplicaMetrics(replicas.root.module, number=self.options.number_rule)
        # Rules are kept by metric object. The module may have other metrics now, so what was
        # learned goes by way of their paths.
        metrics.take_rules(self.metrics.rules_by_path())
        replicas.share(metrics.named.values())
        # What hooks wrote into copies of gradients goes to the owners that there are now.
        self.gradient_hooks.before_backward()
        manual = self.training.manual
        if manual is not None:
            manual.gradients.take_from_hooks()
        step.sums.memory_of_first = memory_of_dropped(optimizers, homes, replicas.root.module.parameters())
        try:
            with torch.inference_mode(False):  # also in an evaluation: they are written to after it
                step.remake_replicas()
        except ReplicationError as error:
            device = self.strategy.root_device
            rank_zero_warn(f"dpx: everything runs on {device} from here on, the other devices idle: {error}")
            move_optimizers(optimizers, homes)
            # The closure of the optimizer that runs this step still follows the owners.
            replicas.state.parameters.set_owners(())
            replicas.close()
            self.strategy.session = self.strategy.one_device
            return False
        # First home to the parameters of the user's module, which alone have outlasted
        # the old owners.
        move_optimizers(optimizers, homes)
        give_trainer(replicas, self.trainer)
        self.verification.reopen("training_step")
        self.metrics = metrics
        metrics.dim = replicas.output_dim
        self.strategy.planning.follow_given(replicas)
        if step.has_other_owners:
            mine = replicas.root.parameters
            move_optimizers(optimizers, dict(zip(mine, step.owner_parameters, strict=True)))
        self.gradient_hooks.follow_replicas()
        if manual is not None:
            manual.follow_replicas()
        return True

    def batch_of_one_device(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The step's arguments with the batch on the root device, once replicas were given up."""
        index = args[2] if len(args) > 2 else 0
        return self.strategy.batch_to_device(args[0], None, index), *args[1:]

    def _give_whole_for_hooks(self) -> None:
        """Replicas with shifted parts are not made anew, so what a new hook does to gradients the first one does."""
        name = self.replicas.structure.name_with_other_hooks
        if name is not None:
            self.replicas.python_state.hooks.accept_those_of_parameters()
            reason = f"Parameter {name} got or lost a hook, which replicas with shifted parts cannot follow."
            self.whole_batches.give_whole("training_step", reason, "Register hooks before fit.")

    # ---- optimizers ----

    def plan_ahead(self) -> None:
        """Plans a fit from the example batch, if there is one."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.memory.plan_ahead()

    def begin_optimizers(self) -> None:
        """The user's optimizers are made: they change the owners' copies, where that is possible."""
        begin_optimizers(self)

    def optimize_owners(self) -> None:
        """Optimizers change the owners' copies, also in groups that they got later."""
        optimize_owners(self)

    def load_optimizer_states(self, lightnings: Callable[[Any], None], checkpoint: Mapping[str, Any]) -> None:
        """As Lightning does where all is on one device; otherwise the state of each parameter goes to its owner.

        Args:
            lightnings: What Lightning would do.
            checkpoint: As it was saved.
        """
        # Lightning moves all states to the root device after loading, away
        # from parameters elsewhere.
        if self.shifts or self.step.has_other_owners:
            load_states(self.strategy.optimizers, checkpoint)
        else:
            lightnings(checkpoint)

    def batch_to_device(self, lightnings: Callable[..., Any], batch: Any, device: Any, dataloader_idx: int) -> Any:
        """The batch stays as the loader gave it; each replica moves its own slice.

        Args:
            lightnings: What Lightning would do, where a device is named.
            batch: From the loader.
            device: Where to; ``None`` for where it is used.
            dataloader_idx: Which loader gave it.
        """
        # Lightning's loops name no device. A caller that names one wants the batch moved there.
        if device is None:
            return self.show_batch(batch)
        return lightnings(batch, device, dataloader_idx)

    def step_optimizer(
        self, lightnings: Callable[..., Any], optimizer: Any, closure: Any, model: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Steps on the owners; the replicas follow before their next forward.

        Args:
            lightnings: Runs the closure and steps the optimizer.
            optimizer: The user's.
            closure: Forward and backward of a step, if automatic.
            model: The user's module.
            kwargs: What the optimizer gets beside.
        """
        # A hook may have added a parameter group since the last step, and it holds parameters of
        # the user's module.
        if self.step.has_other_owners:
            optimize_owners(self)
        # By hand the closure is every replica's own, and they meet for it: see manual/closures.py.
        if self.module.automatic_optimization:
            # Where the optimizer's step is compiled, its compiler would follow how slices are made and run.
            closure = untraced(self.gradient_hooks.closure(optimizer, closure, self.replicas, self.step))
        if self.gradient_hooks.look_at_owners:
            with self.gradient_hooks.round_step(self.strategy.dpx_precision.wrapped):
                result = lightnings(optimizer, closure, model, **kwargs)
        else:
            result = lightnings(optimizer, closure, model, **kwargs)
        manual = self.training.manual
        # The step that the closure has just run may have ended the session. In a shared step by
        # hand ManualOptimization has the replicas follow, at every call of an optimizer.
        if self.strategy.session is self and (manual is None or not manual.is_shared):
            self.replicas.state.parameters.optimizer_stepped()
        self.memory.end_update()
        return result

    # ---- replicas, looked at from outside of steps ----

    def check_replicas(self) -> None:
        """Compares the parameters of all replicas, to the bit.

        Raises:
            ReplicationError: they differ; names the parameters and replicas.
        """
        differing = self.replicas.state.parameters.differing()
        if differing:
            names = ", ".join(f"{name} on replica {replica}" for name, replica in differing)
            raise ReplicationError(f"Parameters differ from those of replica 0: {names}.")

    def watch(self) -> StepTimes:
        """The times of the next step of every replica, once it has run."""
        # Timed steps do not take the way of one device, even where replicas are
        # merged: see _is_merged.
        self.replicas.times = StepTimes(self.replicas.devices)
        return self.replicas.times

    def watch_processes(self) -> Waits | None:
        """How long processes wait for each other in the next step, once it has run; ``None`` without others."""
        processes = self.step.sums.processes
        if processes is None:
            return None
        return processes.watch()

    def stop_watching(self) -> None:
        """The following steps are not timed."""
        self.replicas.times = None
        if self.step.sums.processes is not None:
            self.step.sums.processes.stop_watching()

    def mark_changed(self) -> None:
        """Parameters may have been written without a trace: the replicas get them again."""
        self.replicas.mark_changed()
        self.metric_watch.note_hooks()

    def release_cores(self) -> None:
        """The workers of replicas leave the processor's cores to the caller."""
        self.replicas.release_cores()

    # ---- the end ----

    def end_workers(self) -> None:
        """Threads end; what runs replicas after this starts them again."""
        self.replicas.close()

    def tell_rest(self) -> None:
        """A run ends: tells what its last steps have done for the first time, as no step follows that would."""
        if self.trainer.interrupted or self.strategy.options.verify == "off":
            return
        # What a step leaves is noted where the next one begins, on the same parts.
        if not self.shifts and not self.replicas.structure.has_changed:
            self.replicas.python_state.share(by_several=False)
        self.verification.tell_rest()

    def close(self) -> None:
        """Ends the workers and takes everything of a run off the module."""
        self.metric_watch.made.end()
        try:
            bring_home(self)
        finally:
            self.step.close()
            self.replicas.close()
            # Hooks of plans would stay on the user's module after the run.
            if self.strategy.plans_memory:
                self.strategy.planning.remove(self.replicas)
            self.gradient_hooks.end()


def give_trainer(replicas: ReplicaSet, trainer: Any) -> None:
    """Replicas have the trainer of the user's module, which LightningModule drops from its copies."""
    for replica in replicas.replicas[1:]:
        set_trainer(replica.module, trainer)
