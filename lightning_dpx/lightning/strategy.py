"""``Trainer(strategy="dpx")``: one process, one Trainer, K replicas."""

import os
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn import Module

from lightning_dpx.errors import BudgetError, CollectiveError, ConfigurationError, ReplicationError
from lightning_dpx.lightning.adoption import Adoption, asking_connector
from lightning_dpx.lightning.checkpoint_io import AtomicCheckpointIO
from lightning_dpx.lightning.launcher import InThisProcess
from lightning_dpx.lightning.leftovers import begin_unshifted, leave, take_over
from lightning_dpx.lightning.lightning_compat import (
    WrappingCheckpointIO,
    accelerator_connector,
    initialize_strategy_again,
    layer_sync_of,
    module_of,
    take_signals,
    trainer_of,
)
from lightning_dpx.lightning.make_session import make_session
from lightning_dpx.lightning.manual.acts_once import OPEN_VIEWS, current_view
from lightning_dpx.lightning.memory.out_of_memory import OnOOM, OutOfMemory
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.options import CommunicationDtype, StrategyOptions, Workload
from lightning_dpx.lightning.owners import begin_optimizers, optimize_owners
from lightning_dpx.lightning.precision import DPXPrecision
from lightning_dpx.lightning.processes.connect import agree, complete_slurm, connect, share
from lightning_dpx.lightning.processes.rank_zero import forget_steps, make_step_aware
from lightning_dpx.lightning.processes.stop import CoordinatedStop, NoStop
from lightning_dpx.lightning.ranks import Ranks
from lightning_dpx.lightning.rehearsal.rehearsal import Rehearsals, Verify
from lightning_dpx.lightning.session import OneDevice, Session
from lightning_dpx.memory import MemoryPlan, Planner, Profile
from lightning_dpx.reducers import (
    REDUCERS,
    GradientReducer,
    declare_failed,
    describe_loss,
    is_loss_of_a_process,
    stop_roll_call,
)
from lightning_dpx.replicas import BufferMode, Execution, ReplicaSet, Slicer, StepTimes
from lightning_dpx.shifting import BetweenSteps
from lightning_dpx.step import LossReduction


class DPXStrategy(ParallelStrategy):
    """Trains one LightningModule on all devices of a machine from one process.

    The result is that of one device: replicas only share the work. With one device everything runs as in Lightning's
    single-device strategy.

    Args:
        reducer: How gradients are summed: "auto", "nccl", "collective", "hierarchical", "colocate", "naive", or a
            GradientReducer. With "colocate" parameters have owners on all devices, where their gradients and the
            optimizer's state live; gradients of your module's own parameters are None where another device owns them.
        workload: "even", "auto" (in proportion to measured speed), or one positive number per device.
        batch_dim: The batch dim of all inputs, or {input path: dim}; -1 gives an input whole to every replica, and
            0 says that a list has one item per row.
        execution: "inline" runs replicas one after the other, "threads" each in its own thread. "auto" uses one
            thread per physical device; replicas on one device (CPU) take their slices as one.
        buffers: After a step, the module's buffers are those of the first replica ("broadcast") or the mean ("mean").
        loss_reduction: Whether the training loss is a "mean" or a "sum" over its batch. "auto" is whichever of both
            gives the whole batch's loss in the rehearsal (see verify); a mean where none is possible. Where the loss is
            a mean over something else than rows, such as tokens, give the module a method loss_weight(batch) that
            returns how much a slice weighs, as the number of its tokens; it gets a slice as the loader gave it.
        communication_dtype: What gradients travel in between devices, "float16" or "bfloat16"; sums stay in their own.
        gradient_buckets: Between devices the gradients travel in this many buckets, each as soon as backward has filled
            it on all replicas; 0 sends all after backward.
        shifts: {from: to}: parts of the replica on one device run, with what they keep for backward, on another one;
            several replicas may share a target. "auto" traces the first batch and shifts what does not fit.
        shift_activations: Which parts: submodules by name or pattern ("encoder.layers.[0-3]").
        memory_budget: What training may take on each device, also on one that parts are shifted to: bytes, "8GiB", a
            fraction of the device (0 to 1), or "auto" for what is free; or {device: one of these}. The first batch is
            profiled, and what must be is computed again in backward.
        planner: Who decides that: "auto", "optimal", "milp", "search", "threshold", or a Planner.
        plan: Instead of a budget, a MemoryPlan to follow, or the path of a saved one.
        plan_cache: Where plans are kept for the next run of the same module, code, shapes, budget and versions, which
            then plans nothing: True for the user's own folder (lightning_dpx/plans in $XDG_CACHE_HOME or ~/.cache), or
            the path of another; False keeps and finds none.
        example_batch: With a budget, a batch as the training loader would give it, of the largest shape if they differ.
            The plan is made from it at setup, before data are loaded, and kept until a batch is larger. With
            shifts="auto" the first batch decides.
        on_oom: When a step runs out of memory, "raise" the error, with notes that say what would help, or "replan":
            recompute more and repeat the step with the same random numbers, at most three times.
        process_group_backend: Of torch.distributed, where several processes were started (torchrun, SLURM); gloo, and
            NCCL beside it for CUDA devices, unless given.
        timeout: Seconds that processes, and replicas in threads, wait for each other.
        check_replicas_every_n_steps: How often the replicas' parameters are compared with those of your module, to the
            bit, to notice writes that leave no trace; 0 never does. See also check_replicas().
        batch_slicer: How a batch is cut: a Slicer, or a function (batch, sizes) -> one batch for each of the sizes,
            which sum to the rows of the batch's first input. Unless given, a method slice_batch(self, batch, sizes) of
            the module does it, if there is one (and num_rows(self, batch) counts); or else batch_dim and
            register_slicer() decide. What cannot be cut goes whole to the first replica.
        verify: Before the first step of a stage on several replicas, it is rehearsed on a few rows: once as one device,
            once in slices of unequal size. Losses, gradients, outputs, logged values and Python
            state are compared, and how outputs and logged values are merged is decided by what reproduces those of one
            device. What differs is a warning ("warn"), an error ("raise"), or has the stage run on the first replica as
            one device ("first"). "off" rehearses nothing. The rehearsal runs your step on shadow modules and puts back
            all that it changes in them, the trainer and random generators; what a step does outside (prints, files,
            requests) happens again. Steps by hand run with copies of their optimizers, and are compared by the new
            weights.
        accelerator: Lightning's accelerator.
        parallel_devices: The devices, one per replica; usually given by Trainer(devices=...).
        cluster_environment: Lightning's cluster environment.
        checkpoint_io: Lightning's checkpoint reader and writer.
        precision_plugin: Lightning's precision plugin; usually given by Trainer(precision=...).

    Raises:
        ConfigurationError: an argument has a value that is not allowed.
    """

    strategy_name = "dpx"

    def __init__(
        self,
        reducer: str | GradientReducer = "auto",
        workload: Workload = "even",
        batch_dim: int | dict[str, int] = 0,
        execution: Execution = "auto",
        buffers: BufferMode = "broadcast",
        loss_reduction: LossReduction = "auto",
        communication_dtype: CommunicationDtype | None = None,
        gradient_buckets: int = 8,
        shifts: dict[str, str] | Literal["auto"] | None = None,
        shift_activations: list[str] | None = None,
        memory_budget: dict[str, int | float | str] | int | float | str | None = None,
        planner: str | Planner = "auto",
        plan: MemoryPlan | str | None = None,
        plan_cache: bool | str | os.PathLike[str] = True,
        example_batch: Any = None,
        on_oom: OnOOM = "raise",
        process_group_backend: str | None = None,
        timeout: float = 300.0,
        check_replicas_every_n_steps: int = 100,
        batch_slicer: Slicer | Callable[[Any, list[int]], list[Any]] | None = None,
        verify: Verify = "warn",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.options = StrategyOptions(
            reducer=reducer,
            workload=workload,
            batch_dim=batch_dim,
            batch_slicer=batch_slicer,
            execution=execution,
            buffers=buffers,
            loss_reduction=loss_reduction,
            communication_dtype=communication_dtype,
            gradient_buckets=gradient_buckets,
            shifts=shifts,
            shift_activations=shift_activations,
            memory_budget=memory_budget,
            example_batch=example_batch,
            on_oom=on_oom,
            process_group_backend=process_group_backend,
            timeout=timeout,
            check_replicas_every_n_steps=check_replicas_every_n_steps,
            verify=verify,
        )
        self.planning = MemoryPlanning(memory_budget, planner, plan, plan_cache)
        self.out_of_memory = OutOfMemory(on_oom)
        self.rehearsals = Rehearsals(self, verify, loss_reduction)
        self.stopping: CoordinatedStop | NoStop = NoStop()
        self.hooks_mode: BetweenSteps | None = None  # what hooks run in, where parts are shifted
        self.one_device = OneDevice(self)
        self.session: Session | OneDevice = self.one_device
        self.ranks = Ranks(self)
        self.num_nodes = 1  # Lightning sets it
        self._trainer: weakref.ref[pl.Trainer] | None = None
        self._module_in_use: Module | None = None  # from setup to teardown, which Lightning may skip
        self._announced: set[str] = set()
        names = ("_own_accelerator", "_precision_plugin", "_checkpoint_io", "cluster_environment", "parallel_devices")
        self._adoption = Adoption(*names)
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)

    # ---- what was asked for ----

    @property
    def reducer(self) -> str | GradientReducer:
        """As given."""
        return self.options.reducer

    @property
    def workload(self) -> Workload:
        """As given."""
        return self.options.workload

    @property
    def batch_dim(self) -> int | dict[str, int]:
        """As given."""
        return self.options.batch_dim

    @property
    def batch_slicer(self) -> Slicer | Callable[[Any, list[int]], list[Any]] | None:
        """As given."""
        return self.options.batch_slicer

    @property
    def memory_budget(self) -> dict[str, int | float | str] | int | float | str | None:
        """As given, a text as bytes."""
        budget: dict[str, int | float | str] | int | float | str | None = self.planning.budgets.given
        return budget

    @property
    def planner(self) -> Planner:
        """Who plans."""
        return self.planning.planner

    @property
    def shifts_activations(self) -> bool:
        """Whether parts of the replicas run, or may run, on other devices."""
        return self.options.shifts_activations

    @property
    def plans_memory(self) -> bool:
        """Whether steps are planned, or may be."""
        return self.planning.wanted or self.out_of_memory.repeats_steps

    # ---- what belongs to the Trainer ----

    @property
    def _accelerator(self) -> Accelerator | None:
        """Lightning's own attribute; a new Trainer looks at it first of all.

        Raises:
            ConfigurationError: another Trainer is running with this strategy.
        """
        connector = asking_connector()
        if connector is not None:
            self._belong_to(connector)
        return self._own_accelerator

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._own_accelerator = accelerator

    def _belong_to(self, connector: Any) -> None:
        if self.is_running:
            raise ConfigurationError(
                "This strategy object belongs to a Trainer that is running; give every Trainer a strategy of its own, "
                "or make the second one when the first has ended."
            )
        self._adoption.begin(self, connector)

    def _return_to_trainer(self, model: "pl.LightningModule") -> None:
        """A Trainer that runs again after another one took its strategy object takes it back."""
        trainer = trainer_of(model)
        connector = None if trainer is None else accelerator_connector(trainer)
        if connector is not None and not self._adoption.is_by(connector):
            self._belong_to(connector)
            initialize_strategy_again(connector)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that was given, or whole files; one that wraps another, and was given none, wraps whole files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # does nothing where it has one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    # ---- what Lightning asks about the process ----

    @property
    def root_device(self) -> torch.device:
        """Where the user's module and the optimizer live: the first device."""
        if not self.parallel_devices:
            raise ConfigurationError("DPXStrategy has no devices; give Trainer(devices=...) at least one.")
        return self.parallel_devices[0]

    @property
    def replica_modules(self) -> list[Module]:
        """The modules of all replicas during a run, the user's own first; empty with one device."""
        replicas = self._replicas
        return [] if replicas is None else [replica.module for replica in replicas.replicas]

    @property
    def memory_plans(self) -> dict[torch.device, tuple[MemoryPlan, Profile | None]]:
        """By device, the plan that is followed, and the step that it was made from if it was made here."""
        return {device: (plan, self.planning.profiles.get(device)) for device, plan in self.planning.plans.items()}

    def planned_activations(self, device: torch.device) -> tuple[int, int]:
        """Bytes of activations that the memory plan predicts on ``device`` at their peak, and its budget for all."""
        return self.planning.forecast(device)

    def check_replicas(self) -> None:
        """Compares the parameters of all replicas with those of your module, to the bit.

        Raises:
            ReplicationError: they differ; names the parameters and replicas.
        """
        differing = [] if self._replicas is None else self._replicas.state.differing()
        if differing:
            names = ", ".join(f"{name} on replica {replica}" for name, replica in differing)
            raise ReplicationError(f"Parameters differ from those of replica 0: {names}.")

    def watch_replicas(self) -> StepTimes | None:
        """Times the next step of every replica; ``None`` with one device."""
        if self._replicas is None:
            return None
        self._replicas.times = StepTimes(self._replicas.devices)
        return self._replicas.times

    def stop_watching(self) -> None:
        """The following steps are not timed."""
        if self._replicas is not None:
            self._replicas.times = None

    @property
    def _replicas(self) -> ReplicaSet | None:
        return self.session.replicas if isinstance(self.session, Session) else None

    def set_world_ranks(self) -> None:
        """Where no launcher says otherwise, there is one process per node."""
        if isinstance(self.cluster_environment, SLURMEnvironment):
            self.cluster_environment = complete_slurm(self.cluster_environment, self.num_nodes)
        if self.cluster_environment is not None:
            self.cluster_environment.set_world_size(self.num_nodes)
            self.cluster_environment.set_global_rank(self.node_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Counts processes: replicas share one loader."""
        return {"num_replicas": self.num_processes, "rank": self.process_rank}

    @property
    def precision_plugin(self) -> Precision:
        """Always a DPXPrecision round the plugin that was chosen."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            if not isinstance(precision_plugin, DPXPrecision):
                precision_plugin = DPXPrecision(precision_plugin)
            precision_plugin.attach(self._after_backward)
        self._precision_plugin = precision_plugin

    @property
    def dpx_precision(self) -> DPXPrecision:
        """The precision plugin as what the setter has made of it."""
        assert isinstance(self._precision_plugin, DPXPrecision), "the setter wraps every plugin"
        return self._precision_plugin

    @property
    def lightning_module(self) -> "pl.LightningModule | None":
        """The user's module; inside a manual step of several replicas, that of the replica."""
        if not OPEN_VIEWS:
            return module_of(self)
        view = current_view()
        return module_of(self) if view is None else view.module

    @property
    def synchronizes_batch_norm(self) -> bool:
        """Whether ``Trainer(sync_batchnorm=True)`` was given."""
        return layer_sync_of(self) is not None

    # ---- a replica inside a step, the process outside ----

    @property
    def num_processes(self) -> int:
        """Processes that train together, each with its own replicas."""
        return self.ranks.num_processes

    @property
    def process_rank(self) -> int:
        """This process among them."""
        return self.ranks.process_rank

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning must deal the samples to several processes; replicas of one share its loader."""
        return self.ranks.num_processes > 1

    @property
    def global_rank(self) -> int:
        """The replica's among all, or the process's."""
        return self.ranks.global_rank

    @property
    def local_rank(self) -> int:
        """The replica's in this process, or the process's on this machine."""
        return self.ranks.local_rank

    @property
    def world_size(self) -> int:
        """The replicas that take part in the step, or the processes."""
        return self.ranks.world_size

    def barrier(self, name: str | None = None) -> None:
        """Waits for the others."""
        self.ranks.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of the one with rank ``src``."""
        return self.ranks.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean (sum, min, max) over all."""
        return self.ranks.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """(K, ...) from (...) of each of K."""
        return self.ranks.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) say yes."""
        return self.ranks.reduce_boolean_decision(decision, all)

    # ---- set-up and tear-down ----

    def _configure_launcher(self) -> None:
        self._launcher = InThisProcess(self._between_steps, self._end_launch)

    def _between_steps(self) -> AbstractContextManager[Any]:
        """What hooks run in."""
        if not self.shifts_activations:
            return nullcontext()
        self.hooks_mode = BetweenSteps()  # a run within a run has its own
        return self.hooks_mode

    def _end_launch(self) -> None:
        """A run has failed: Lightning may leave out the teardown, so threads and patches of the process end here."""
        if self._replicas is not None:
            self._replicas.close()
        forget_steps(self)

    def connect(self, model: "pl.LightningModule") -> None:
        """A run begins; what an earlier one has left, here or on the module, is cleared away first."""
        self.give_up_replicas()
        self._return_to_trainer(model)
        take_over(model, self)
        super().connect(model)

    @property
    def is_running(self) -> bool:
        """Whether a Trainer is in the middle of a run with this strategy."""
        trainer = None if self._trainer is None else self._trainer()
        return trainer is not None and trainer.state.status == TrainerStatus.RUNNING

    def setup_environment(self) -> None:
        """Sets up the root device and joins the other processes, if there are any."""
        super().setup_environment()
        if self.num_processes > 1:
            assert self.cluster_environment is not None, "it said that there are others"
            options = self.options
            timeout = float(options.timeout)
            connect(self.cluster_environment, options.process_group_backend, self.root_device, timeout)
        if isinstance(self.precision_plugin, DPXPrecision):
            self.precision_plugin.place(self.root_device)
        make_step_aware(self, self.process_rank)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Lightning's, with its handlers of signals exchanged where there are several processes; then plans memory."""
        self._trainer = weakref.ref(trainer)
        if self.num_processes > 1:
            self.stopping = CoordinatedStop(trainer)
            take_signals(trainer, self.stopping)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and isinstance(self.session, Session):
            self.session.memory.plan_ahead()

    def model_to_device(self) -> None:
        """Moves the user's module to the first device."""
        assert self.model is not None, "connect() sets the model first"
        begin_unshifted(self.model, self.shifts_activations, self.plans_memory)
        self.model.to(self.root_device)

    def _setup_model(self, model: Module) -> Module:
        """Makes the replicas, after the module reached its device and before the optimizers exist."""
        module = self.lightning_module
        assert module is not None, "connect() sets the module first"
        self._module_in_use = module
        self.session = make_session(self, module)
        return model

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """The user's optimizers, each over the copies of its parameters that the owners hold."""
        super().setup_optimizers(trainer)
        if isinstance(self.session, Session):
            begin_optimizers(self.session)

    def optimize_owners(self) -> None:
        """Optimizers change the owners' copies, also in groups that they got later."""
        if isinstance(self.session, Session):
            optimize_owners(self.session)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of every parameter to where its owner is."""
        has_other_owners = isinstance(self.session, Session) and self.session.step.has_other_owners
        if not self.shifts_activations and not has_other_owners:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def end_session(self) -> None:
        """From here on the run is that of one device."""
        self.session = self.one_device

    def give_up_replicas(self) -> None:
        """Ends the workers and takes everything of a run off the module; does nothing where that has been done."""
        if isinstance(self.session, Session):
            self.session.close()
        if self._module_in_use is not None:
            leave(self._module_in_use, "cpu")  # where all of it goes now; the source of a shift may be full
        self._module_in_use = None
        self.end_session()
        self.one_device.training.accumulates = False
        self.stopping = NoStop()
        self.planning.forget()

    def teardown(self) -> None:
        """Ends the workers and gives up the replicas."""
        self.give_up_replicas()
        forget_steps(self)
        stop_roll_call()
        Strategy.teardown(self)

    def on_exception(self, exception: BaseException) -> None:
        """Adds what would help against OOM, and which process is lost or was told to stop; after SIGTERM the run fails.

        Lightning up to 2.6 would exit with 0 then.
        """
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM
            if self.stopping.reason:
                exception.add_note(self.stopping.reason)
        if isinstance(exception, torch.OutOfMemoryError) and not isinstance(exception, BudgetError):
            exception.add_note(self.planning.advice())
        if self.ranks.is_connected and is_loss_of_a_process(exception):  # in a collective that is not ours
            exception.add_note(describe_loss("the run"))
        elif self.ranks.is_connected and not isinstance(exception, CollectiveError):
            declare_failed(exception)
        super().on_exception(exception)

    # ---- steps ----

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """With several replicas the batch stays as the loader gave it; each replica moves its own slice."""
        if device is None and isinstance(self.session, Session):
            return self.session.show_batch(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged result of the replicas' training steps.

        Where the module has a method ``training_step_end(outputs)``, the replicas' outputs are merged in sample order
        and it computes the loss from those of the whole batch; gradients flow back through every replica.
        """
        return self.session.training.run(args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged result of the replicas' validation steps, in sample order."""
        return self.session.evaluation.run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged result of the replicas' test steps, in sample order."""
        return self.session.evaluation.run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The merged predictions, in sample order."""
        return self.session.evaluation.run("predict_step", args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's; in a manual step of several replicas, of every replica's part of the loss."""
        if (view := current_view()) is not None:
            loss: Tensor = view.backward(closure_loss, optimizer, *args, **kwargs)
            return loss
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _after_backward(self) -> None:
        """Called by the precision plugin after its own backward."""
        self.session.training.after_backward()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients stay on the replicas while they accumulate."""
        training = self.session.training
        training.accumulates = True
        try:
            yield
        finally:
            training.accumulates = False

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Steps on the owners; the replicas follow before their next forward."""
        session = self.session
        if not isinstance(session, Session):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        optimize_owners(session)
        if session.module.automatic_optimization:
            closure = session.gradient_hooks.closure(optimizer, closure, session.replicas, session.step)
        with session.gradient_hooks.round_step(self.dpx_precision.wrapped):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        manual = session.training.manual
        # The step that the optimizer's closure has just run may have ended the session.
        if self.session is session and (manual is None or not manual.is_shared):
            session.replicas.state.optimizer_stepped()
        return result

    # ---- moments after which parameters may have been written without a trace ----

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """At the start of an epoch, several processes must have as many batches as each other.

        Raises:
            ReplicationError: they have not, and some would wait for the others in vain.
        """
        if batch_idx == 0 and self.ranks.is_connected and self.lightning_module is not None:
            agree({"the number of batches": self.lightning_module.trainer.num_training_batches})

    def _mark_changed(self) -> None:
        if self._replicas is not None:
            self._replicas.state.mark_changed()

    def _leave_training(self) -> None:
        self._mark_changed()
        if self.ranks.is_connected and (module := self.lightning_module) is not None:
            share("sharing buffers", list(module.buffers()))
        if self._replicas is not None:
            self._replicas.release_cores()

    def _enter_evaluation(self) -> None:
        self._leave_training()
        self.stopping.begin_evaluation()

    def before_evaluation_batch(self) -> None:
        """Several processes may be told to stop between two batches."""
        self.stopping.before_batch()

    def _end_run(self) -> None:
        self.stopping.end()

    def on_train_end(self) -> None:
        """Shares what training left; a signal that came too late for its last step ends the run."""
        self._leave_training()
        self._end_run()

    def on_validation_end(self) -> None:
        """Callbacks may have written parameters, and signals may have come."""
        self._mark_changed()
        self.stopping.meet_after_validation()

    on_train_start = _mark_changed
    on_validation_start = on_test_start = on_predict_start = _enter_evaluation
    on_test_end = on_predict_end = _end_run

    def announce(self, text: str) -> None:
        """Says something once."""
        if text not in self._announced:
            self._announced.add(text)
            rank_zero_info(text)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds "dpx" and one alias per registered reducer; doing it twice changes nothing."""
        for name, options in {"dpx": {}, **{f"dpx_{reducer}": {"reducer": reducer} for reducer in REDUCERS}}.items():
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=f"one process, replicas; {options}", **options)
