"""What a run is made of, from setup to teardown: a :class:`Session` of replicas, or :class:`OneDevice`.

strategy --hooks of Lightning's--> session.training    batch -> loss, and after Lightning's backward the gradients
                                   session.evaluation  batch -> outputs
                                     |
                                     +-- slices, replicas, step, metrics, rules, memory: one object for each concern
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn import Module

from lightning_dpx.errors import ReplicationError
from lightning_dpx.lightning.batch_writes import BatchWrites, unlike_one_batch
from lightning_dpx.lightning.evaluation import EvaluationFlow, loader_index
from lightning_dpx.lightning.gradient_hooks import GradientHooks
from lightning_dpx.lightning.lightning_compat import set_trainer
from lightning_dpx.lightning.memory.step_memory import NoStepMemory
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.lightning.owners import move_optimizers
from lightning_dpx.lightning.slices import Slices
from lightning_dpx.lightning.thread_choice import ThreadChoice
from lightning_dpx.lightning.training_step import TrainingFlow
from lightning_dpx.lightning.transfers import Transfer
from lightning_dpx.lightning.whole_batches import WholeBatches
from lightning_dpx.memory import planned
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from lightning_dpx.shifting import applied_shift
from lightning_dpx.step import TrainingStep

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy

_PRECISION_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


class Run:
    """What all runs have: the user's module, and what its steps run in.

    Args:
        strategy: Lightning's face of the run.
    """

    def __init__(self, strategy: "DPXStrategy") -> None:
        self.strategy = strategy
        self.options = strategy.options
        self.shifts = strategy.options.shifts_activations

    @property
    def has_contexts(self) -> bool:
        """Whether anything is shifted or planned, so that :meth:`context` is more than nothing."""
        return self.shifts or bool(self.strategy.planning.plans)

    def context(self, module: Module) -> AbstractContextManager[None]:
        """Whatever runs a replica's own step runs in here: shifted, and with the memory plan."""
        if not self.has_contexts:
            return nullcontext()
        shift = applied_shift(module) if self.shifts else None
        return planned(module) if shift is None else _both(shift.active(), planned(module))

    def alone(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step of the user's module as on one device, and its end hook.

        Args:
            name: Of the step.
            args: The batch, on its device, and the indices.
            kwargs: What it gets beside.
        """
        strategy = self.strategy
        module = strategy.lightning_module
        if self.has_contexts:
            with self.context(module):  # type: ignore[arg-type]  # connect() sets the module first
                return self.finished(name, self.lightnings_step(name, args, kwargs))
        with getattr(strategy.precision_plugin, _PRECISION_CONTEXTS[name])():
            outputs = getattr(module, name)(*args, **kwargs)
        return self.finished(name, outputs)

    def lightnings_step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step in the precision's context, without its end hook."""
        with getattr(self.strategy.precision_plugin, _PRECISION_CONTEXTS[name])():
            return getattr(self.strategy.lightning_module, name)(*args, **kwargs)

    def end_hook(self, name: str) -> Callable[[Any], Any] | None:
        """The user's hook that sees the merged outputs of a step, such as ``training_step_end``, if there is one."""
        module = self.strategy.lightning_module
        if getattr(type(module), f"{name}_end", None) is None:  # asked of the class: a miss costs a module much more
            return None
        hook: Callable[[Any], Any] = getattr(module, f"{name}_end")
        return hook

    def finished(self, name: str, outputs: Any) -> Any:
        """What the end hook makes of the outputs of a step."""
        finish = self.end_hook(name)
        if finish is None or outputs is None:
            return outputs
        precision = self.strategy.precision_plugin
        with precision.train_step_context() if name == "training_step" else precision.val_step_context():
            return finish(outputs)


class OneDevice(Run):
    """A run on one device, or none at all: steps are Lightning's own. It stands wherever there are no replicas.

    Args:
        strategy: Lightning's face of the run.
    """

    def __init__(self, strategy: "DPXStrategy") -> None:
        super().__init__(strategy)
        self.training = _TrainingAlone(self)
        self.evaluation = _EvaluationAlone(self)

    @property
    def loss_is_sum(self) -> bool:
        """Losses of slices are never merged here."""
        return False


class _TrainingAlone:
    """Stands for a :class:`TrainingFlow`."""

    def __init__(self, run: OneDevice) -> None:
        self._run = run
        self.accumulates = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run.alone("training_step", args, kwargs)

    def after_backward(self) -> None:
        """Nothing is summed."""


class _EvaluationAlone:
    """Stands for an :class:`EvaluationFlow`."""

    def __init__(self, run: OneDevice) -> None:
        self._run = run

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._run.strategy.before_evaluation_batch()
        return self._run.alone(name, args, kwargs)


class Session(Run):
    """A run on several replicas, or on one whose steps are planned, shifted or summed with other processes'.

    Args:
        strategy: Lightning's face of the run.
        replicas: The replicas of the user's module.
        metrics: The metric objects that they share.
        step: Merges losses and sums gradients.

    Attributes:
        module: The user's own module.
        rehearsals: What finds out how results are merged.
        whole_batches: Which stages get their batches whole.
        batch_writes: What steps write into their batches.
        gradient_hooks: What hooks of the user's find in gradients.
        memory: What is done about memory round a step.
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
        self.metrics = metrics
        self.step = step
        self.module: pl.LightningModule = replicas.root.module  # type: ignore[assignment]
        self.trainer: Any = self.module.trainer
        self.has_processes = strategy.num_processes > 1
        self.rehearsals = strategy.rehearsals
        self.whole_batches = WholeBatches()
        self.batch_writes = BatchWrites()
        self.gradient_hooks = GradientHooks()
        self.memory = NoStepMemory()
        self.slices = Slices(self)
        self.threads = ThreadChoice(self)
        self.training = TrainingFlow(self)
        self.evaluation = EvaluationFlow(self)

    def for_shadow(self, replicas: ReplicaSet, metrics: ReplicaMetrics, step: TrainingStep) -> "Session":
        """A session of a rehearsal: of its own replicas, with what the real one has found out and put on."""
        shadow = Session(self.strategy, replicas, metrics, step)
        shadow.whole_batches = self.whole_batches
        shadow.memory = self.memory
        return shadow

    @property
    def loss_is_sum(self) -> bool:
        """Whether the losses of slices add up to that of the batch."""
        return self.step.rules.loss_reduction == "sum"

    # ---- before and after a step ----

    def show_batch(self, batch: Any) -> Any:
        """The batch as hooks of the user's get it: as the loader gave it, each replica moves its own slice."""
        return self.batch_writes.show(batch) if self.batch_writes.is_for(self.module) else batch

    def given(self, batch_slice: BatchSlice, dataloader_idx: int = 0) -> Any:
        """What the step of a replica gets."""
        return self.moved(batch_slice, Transfer(self.trainer, self.module, dataloader_idx))

    def moved(self, batch_slice: BatchSlice, transfer: Transfer) -> Any:
        """The slice where its replica lives; what the step writes into it is noticed where hooks look."""
        batch = transfer.to_replica(batch_slice)
        if self.batch_writes.is_watched:
            self.batch_writes.note(batch_slice, batch, is_as_loaded=transfer.is_plain)
        return batch

    def end_batch(self, name: str, args: tuple[Any, ...]) -> None:
        """Hooks find in the batch what the step wrote there."""
        if not self.batch_writes.is_watched:
            return
        rules = self.rehearsals.rules(name, 0 if name == "training_step" else loader_index(args))
        problem = self.batch_writes.finish(rules, self.strategy.root_device, self.replicas.output_dim)
        if problem is not None:
            self.whole_batches.give_whole(name, *unlike_one_batch(problem))

    def before_evaluation_batch(self) -> None:
        """Several processes may be told to stop between two batches."""
        self.strategy.before_evaluation_batch()

    def announce_replicas(self, what: str) -> None:
        """Says once what the replicas do."""
        strategy = self.strategy
        number = len(strategy.parallel_devices or [])
        strategy.announce(f"dpx: {number} replicas on {strategy.root_device} {what}.")

    # ---- a module whose parts have changed ----

    def follow_structure(self) -> bool:
        """What was pruned, parametrized, added or exchanged on the module since the last step: replicas anew.

        Returns:
            Whether there are replicas; if the module cannot be copied any more, the run goes on with one device.
        """
        replicas = self.replicas
        if self.shifts:
            self._give_whole_for_hooks()
            return True
        if not replicas.is_outdated:
            return True
        self.strategy.announce("dpx: the module has other parts than before; its replicas are made anew.")
        step = self.step
        optimizers = self.strategy.optimizers
        homes = dict(zip(step.owner_parameters, replicas.root.parameters, strict=True))
        self.strategy.planning.remove(replicas)
        metrics = ReplicaMetrics(replicas.root.module, number=self.options.number_rule)
        metrics.take_rules(self.metrics.rules_by_path())
        replicas.shared = tuple(metrics.named.values())
        try:
            step.remake_replicas()
        except ReplicationError as error:
            device = self.strategy.root_device
            rank_zero_warn(f"dpx: everything runs on {device} from here on, the other devices idle: {error}")
            move_optimizers(optimizers, homes)
            replicas.close()
            self.strategy.end_session()
            return False
        move_optimizers(optimizers, homes)
        give_trainer(replicas, self.trainer)
        self.rehearsals.reopen("training_step")
        self.metrics = metrics
        metrics.dim = replicas.output_dim
        self.strategy.planning.follow_given([replica.module for replica in replicas.replicas], replicas.devices)
        if step.has_other_owners:
            mine = replicas.root.parameters
            move_optimizers(optimizers, dict(zip(mine, step.owner_parameters, strict=True)))
        return True

    def batch_of_one_device(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Where replicas were given up, the batch is still where the loader left it."""
        index = args[2] if len(args) > 2 else 0
        return self.strategy.batch_to_device(args[0], None, index), *args[1:]

    def _give_whole_for_hooks(self) -> None:
        """Replicas with shifted parts are not made anew, so what a new hook does to gradients the first one does."""
        name = self.replicas.name_with_other_hooks
        if name is not None:
            self.replicas.python_state.note_hooks_of_parameters()
            reason = f"Parameter {name} got or lost a hook, which replicas with shifted parts cannot follow."
            self.whole_batches.give_whole("training_step", reason, "Register hooks before fit.")

    # ---- the end ----

    def close(self) -> None:
        """Ends the workers and takes everything of a run off the module."""
        self.step.close()
        self.replicas.close()
        if self.strategy.plans_memory:
            self.strategy.planning.remove(self.replicas)
        self.gradient_hooks.end()


def give_trainer(replicas: ReplicaSet, trainer: Any) -> None:
    """Replicas have the trainer of the user's module, which LightningModule drops from its copies."""
    for replica in replicas.replicas[1:]:
        set_trainer(replica.module, trainer)


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Any:
    with first, second:
        yield
