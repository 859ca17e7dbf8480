"""What a run is made of, from setup to teardown: a :class:`Session` of replicas, or
:class:`lightning_dpx.lightning.run.OneDevice`.

strategy --hooks of Lightning's--> session.training    batch -> loss, and after Lightning's backward the gradients
                                   session.evaluation  batch -> outputs
                                     |
                                     +-- slices, replicas, step, metrics, settings, memory: one object for each concern
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from lightning_dpx.errors import ReplicationError, some_of
from lightning_dpx.lightning.changed_structure import follow_structure, remake_replicas
from lightning_dpx.lightning.evaluation import EvaluationFlow
from lightning_dpx.lightning.gradient_hooks import GradientHooks
from lightning_dpx.lightning.lightning_api import TrainerFn, pl
from lightning_dpx.lightning.memory.step_memory import NoStepMemory, StepMemory
from lightning_dpx.lightning.metrics.metric_watch import MetricWatch
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.lightning.micro_batch_steps import MicroBatchSteps
from lightning_dpx.lightning.optimizer_settings import OptimizerSettings
from lightning_dpx.lightning.options import StrategyOptions
from lightning_dpx.lightning.owners import (
    begin_optimizers,
    bring_home,
    load_states,
    optimize_owners,
)
from lightning_dpx.lightning.rehearsal.verification import Verification
from lightning_dpx.lightning.run import Run
from lightning_dpx.lightning.slices import Slices
from lightning_dpx.lightning.step_batches import StepBatches
from lightning_dpx.lightning.thread_choice import ThreadChoice
from lightning_dpx.lightning.training_step import TrainingFlow
from lightning_dpx.lightning.whole_batches import WholeBatches
from lightning_dpx.python_objects.compiled import untraced
from lightning_dpx.reducers import Waits
from lightning_dpx.replicas import ReplicaSet, StepTimes
from lightning_dpx.step import TrainingStep

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy


class Session(Run):
    """A run on several replicas, or on one whose steps are planned, shifted or summed with other processes'.

    Args:
        strategy: Lightning's face of the run.
        replicas: The replicas of the user's module.
        metrics: The metric objects that they share.
        step: Merges losses and sums gradients.

    Attributes:
        module: The user's own module.
        spans_processes: Whether the run does; the sums of a rehearsal are of this process alone.
        metric_watch: Looks for metrics that they do not share yet.
        whole_batches: Which stages get their batches whole.
        batches: The way of a batch through a step.
        gradient_hooks: What hooks of the user's find in gradients.
        settings: What slices change of optimizers and schedulers, which they share.
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
        self.spans_processes: bool = strategy.num_processes > 1
        self.whole_batches: WholeBatches = WholeBatches(len(replicas.devices))
        self.batches: StepBatches = StepBatches(self)
        self.gradient_hooks: GradientHooks = GradientHooks()
        self.settings: OptimizerSettings = OptimizerSettings(strategy)
        self.memory: StepMemory = NoStepMemory()
        self.micro_batches: MicroBatchSteps | None = None
        self.slices: Slices = Slices(self)
        self.threads: ThreadChoice = ThreadChoice(self)
        self.training: TrainingFlow = TrainingFlow(self)
        self.evaluation: EvaluationFlow = EvaluationFlow(self)

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
        return self.step.adds_losses

    # ---- before and after a step ----

    def can_repeat(self, name: str) -> bool:
        """Whether a step that has run on slices can run again, on the whole batch."""
        # Other processes have run it, and would not run it again with this one; by hand optimizers have stepped.
        return not self.spans_processes and (name != "training_step" or self.module.automatic_optimization)

    def before_evaluation_batch(self) -> None:
        """Several processes may be told to stop between two batches."""
        self.strategy.before_evaluation_batch()

    def announce_replicas(self, what: str) -> None:
        """Says once what the replicas do."""
        strategy = self.strategy
        devices = strategy.parallel_devices or []
        # Several replicas may share a device.
        where = ", ".join(dict.fromkeys(map(str, devices)))
        strategy.announce(f"dpx: {len(devices)} replicas on {where} {what}.")

    # ---- a module whose parts have changed ----

    def follow_structure(self, name: str) -> bool:
        """What was pruned, parametrized, added or exchanged on the module since the last step: replicas anew.

        Args:
            name: Of the step that comes.

        Returns:
            Whether there are replicas; if the module cannot be copied any more, the run goes on with one device.
        """
        return follow_structure(self, name)

    def cut_slices(self, micro_batches: Sequence[int], *, training: bool = True) -> bool:
        """From now on steps in this mode have their slices cut into so many micro-batches, one number for each device.

        Returns:
            Whether there are replicas; see :meth:`follow_structure`.
        """
        self.replicas.cut_slices(list(micro_batches), training=training)
        if not remake_replicas(self):
            return False
        self.micro_batches = MicroBatchSteps(self) if self.replicas.partition.cuts_slices(training=True) else None
        return True

    def batch_of_one_device(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The step's arguments with the batch on the root device, once replicas were given up."""
        index = args[2] if len(args) > 2 else 0
        return self.strategy.batch_to_device(args[0], None, index), *args[1:]

    def plan_ahead(self) -> None:
        """Plans a fit from the example batch, if there is one."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.memory.plan_ahead()

    # ---- optimizers ----

    def begin_optimizers(self) -> None:
        """The user's optimizers are made: they change the owners' copies, where that is possible."""
        begin_optimizers(self)

    def optimize_owners(self) -> None:
        """Optimizers change the owners' copies, also in groups that they got later."""
        optimize_owners(self)

    def load_optimizer_states(self, default: Callable[[Any], None], checkpoint: Mapping[str, Any]) -> None:
        """As Lightning does where all is on one device; otherwise the state of each parameter goes to its owner.

        Args:
            default: What Lightning would do.
            checkpoint: As it was saved.
        """
        # Lightning moves all states to the root device after loading, away
        # from parameters elsewhere.
        if self.shifts or self.step.has_other_owners:
            load_states(self.strategy.optimizers, checkpoint)
        else:
            default(checkpoint)

    def batch_to_device(self, default: Callable[..., Any], batch: Any, device: Any, dataloader_idx: int) -> Any:
        """The batch stays as the loader gave it; each replica moves its own slice.

        Args:
            default: What Lightning would do, where a device is named.
            batch: From the loader.
            device: Where to; ``None`` for where it is used.
            dataloader_idx: Which loader gave it.
        """
        # Lightning's loops name no device. A caller that names one wants the batch moved there.
        if device is None:
            return self.batches.show(batch)
        return default(batch, device, dataloader_idx)

    def step_optimizer(
        self, default: Callable[..., Any], optimizer: Any, closure: Any, model: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Steps on the owners; the replicas follow before their next forward.

        Args:
            default: Runs the closure and steps the optimizer.
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
                result = default(optimizer, closure, model, **kwargs)
        else:
            result = default(optimizer, closure, model, **kwargs)
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
            names = some_of([f"{name} on replica {replica}" for name, replica in differing])
            raise ReplicationError(
                f"Parameters differ from those of replica 0: {names}, as where something has written them through "
                ".data on a replica. Write those of your own module, which the others follow."
            )

    def watch(self) -> StepTimes:
        """The times of the next step of every replica, once it has run."""
        # Timed steps do not take the way of one device, even where replicas
        # have one slice between them: see TrainingFlow.
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
