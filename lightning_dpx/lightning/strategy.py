"""``Trainer(strategy="dpx")``: one process, one Trainer, K replicas."""

import os
import signal
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.nn import Module

from lightning_dpx import shifting
from lightning_dpx.devices import spare_devices
from lightning_dpx.errors import BudgetError, CollectiveError, ConfigurationError, ReplicationError
from lightning_dpx.lightning.adoption import Adoption, asking_connector
from lightning_dpx.lightning.arguments import CommunicationDtype, Workload, check_arguments, parse_shifts
from lightning_dpx.lightning.batch_writes import BatchWrites
from lightning_dpx.lightning.checkpoint_io import AtomicCheckpointIO
from lightning_dpx.lightning.launcher import InThisProcess
from lightning_dpx.lightning.leftovers import begin_unshifted, leave, take_over
from lightning_dpx.lightning.loose_tensors import LooseTensors
from lightning_dpx.lightning.manual.acts_once import held_optimizers
from lightning_dpx.lightning.memory.out_of_memory import OnOOM, OutOfMemory
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.metrics.metrics import KINDS, ReplicaMetrics
from lightning_dpx.lightning.owners import move_optimizers
from lightning_dpx.lightning.precision import DPXPrecision
from lightning_dpx.lightning.processes.connect import (
    agree,
    complete_slurm,
    connect,
    fingerprint,
    gather_objects,
    share,
    start_equal,
)
from lightning_dpx.lightning.processes.rank_zero import forget_steps, make_step_aware
from lightning_dpx.lightning.processes.stop import CoordinatedStop
from lightning_dpx.lightning.rehearsal.rehearsal import Rehearsals, Verify
from lightning_dpx.lightning.rehearsal.shift_rehearsal import rehearse_shifts
from lightning_dpx.lightning.steps import StepsOfReplicas
from lightning_dpx.memory import MemoryPlan, Planner, Profile
from lightning_dpx.reducers import (
    REDUCERS,
    GradientReducer,
    ProcessReducer,
    choose_reducer,
    declare_failed,
    describe_loss,
    is_loss_of_a_process,
    stop_roll_call,
)
from lightning_dpx.replicas import (
    BufferMode,
    Execution,
    ReplicaSet,
    Slicer,
    StepTimes,
    synchronize_batch_norm,
)
from lightning_dpx.step import LossReduction, TrainingStep
from lightning_dpx.torch_compat import OptimizedModule


class DPXStrategy(StepsOfReplicas):
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
        check_arguments(
            reducer=reducer,
            workload=workload,
            batch_dim=batch_dim,
            batch_slicer=batch_slicer,
            execution=execution,
            buffers=buffers,
            loss_reduction=loss_reduction,
            communication_dtype=communication_dtype,
            gradient_buckets=gradient_buckets,
            on_oom=on_oom,
            process_group_backend=process_group_backend,
            timeout=timeout,
            check_replicas_every_n_steps=check_replicas_every_n_steps,
            verify=verify,
        )
        asked = parse_shifts(shifts, shift_activations)
        self._shifts_open = self._auto_shifts = asked is None
        self._shifts, self._shifted_parts = asked or ({}, [])
        planning = MemoryPlanning(memory_budget, planner, plan, plan_cache)
        if example_batch is not None and memory_budget is None:
            raise ConfigurationError("example_batch is what a plan is made from; give memory_budget with it.")
        self._example_batch = example_batch
        self._check_every = check_replicas_every_n_steps
        self._process_group_backend, self._timeout = process_group_backend, float(timeout)
        self.num_nodes = 1  # Lightning sets it
        self._trainer: weakref.ref[pl.Trainer] | None = None
        self._module_in_use: Module | None = None  # from setup to teardown, which Lightning may skip
        self._wire = None if communication_dtype is None else getattr(torch, communication_dtype)
        self._gradient_buckets = gradient_buckets
        self._reducer, self._workload, self._batch_dim = reducer, workload, batch_dim
        self._batch_slicer = batch_slicer
        self._execution, self._buffers, self._loss_reduction = execution, buffers, loss_reduction
        self._rehearsals = Rehearsals(self, verify, loss_reduction)
        self._adoption: Adoption | None = None
        out_of_memory = OutOfMemory(on_oom)
        base = accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        super().__init__(planning, out_of_memory, *base)
        names = ("_own_accelerator", "_precision_plugin", "_checkpoint_io", "cluster_environment", "parallel_devices")
        self._adoption = Adoption(*names)

    # ---- what was asked for ----

    @property
    def reducer(self) -> str | GradientReducer:
        """As given."""
        return self._reducer

    @property
    def workload(self) -> Workload:
        """As given."""
        return self._workload

    @property
    def batch_dim(self) -> int | dict[str, int]:
        """As given."""
        return self._batch_dim

    @property
    def batch_slicer(self) -> Slicer | Callable[[Any, list[int]], list[Any]] | None:
        """As given."""
        return self._batch_slicer

    @property
    def memory_budget(self) -> dict[str, int | float | str] | int | float | str | None:
        """As given, a text as bytes."""
        budget: dict[str, int | float | str] | int | float | str | None = self._planning.budgets.given
        return budget

    @property
    def planner(self) -> Planner:
        """Who plans."""
        return self._planning.planner

    # ---- what belongs to the Trainer ----

    @property
    def _accelerator(self) -> Accelerator | None:
        """Lightning's own attribute; a new Trainer looks at it first of all.

        Raises:
            ConfigurationError: another Trainer is running with this strategy.
        """
        connector = asking_connector()
        if connector is not None and self._adoption is not None:
            self._belong_to(connector)
        return self._own_accelerator

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._own_accelerator = accelerator

    def _belong_to(self, connector: Any) -> None:
        assert self._adoption is not None, "made with the strategy"
        if self.is_running:
            raise ConfigurationError(
                "This strategy object belongs to a Trainer that is running; give every Trainer a strategy of its own, "
                "or make the second one when the first has ended."
            )
        self._adoption.begin(self, connector)

    def _return_to_trainer(self, model: "pl.LightningModule") -> None:
        """A Trainer that runs again after another one took its strategy object takes it back."""
        trainer = getattr(model, "_trainer", None)
        connector = None if trainer is None else trainer._accelerator_connector
        if connector is not None and self._adoption is not None and not self._adoption.is_by(connector):
            self._belong_to(connector)
            connector._lazy_init_strategy()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that was given, or whole files; one that wraps another, and was given none, wraps whole files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
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
        return [] if self._replicas is None else [replica.module for replica in self._replicas.replicas]

    @property
    def memory_plans(self) -> dict[torch.device, tuple[MemoryPlan, Profile | None]]:
        """By device, the plan that is followed, and the step that it was made from if it was made here."""
        return {device: (plan, self._planning.profiles.get(device)) for device, plan in self._planning.plans.items()}

    def planned_activations(self, device: torch.device) -> tuple[int, int]:
        """Bytes of activations that the memory plan predicts on ``device`` at their peak, and its budget for all."""
        return self._planning.forecast(device)

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
            precision_plugin.attach(self._backward_of_replicas)
        self._precision_plugin = precision_plugin

    # ---- set-up and tear-down ----

    def _configure_launcher(self) -> None:
        self._launcher = InThisProcess(self._between_steps, self._end_workers)

    def _between_steps(self) -> AbstractContextManager[Any]:
        """What hooks run in."""
        if not self.shifts_activations:
            return nullcontext()
        self._hooks_mode = shifting.BetweenSteps()  # a run within a run has its own
        return self._hooks_mode

    def _end_workers(self) -> None:
        if self._replicas is not None:
            self._replicas.close()

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
            connect(self.cluster_environment, self._process_group_backend, self.root_device, self._timeout)
        if isinstance(self.precision_plugin, DPXPrecision):
            self.precision_plugin.place(self.root_device)
        make_step_aware(self, self.process_rank)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Lightning's, with its handlers of signals exchanged where there are several processes; then plans memory."""
        self._trainer = weakref.ref(trainer)
        if self.num_processes > 1:
            self._stopping = trainer._signal_connector = CoordinatedStop(trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._plan_ahead()

    def model_to_device(self) -> None:
        """Moves the user's module to the first device."""
        assert self.model is not None, "connect() sets the model first"
        begin_unshifted(self.model, self.shifts_activations, self._plans_memory)
        self.model.to(self.root_device)

    def _setup_model(self, model: Module) -> Module:
        """Makes the replicas, after the module reached its device and before the optimizers exist."""
        module, devices = self.lightning_module, self.parallel_devices or []
        assert module is not None, "connect() sets the module first"
        self._module_in_use = module
        if self._layer_sync is not None:
            synchronize_batch_norm(module)
        metrics = self._find_metrics(module)
        replicas = self._make_replicas(module, devices, metrics)
        devices = list(replicas.devices)
        self._take_trainer(replicas)
        self._shift(replicas)
        elsewhere = [*spare_devices(devices), torch.device("cpu")] if self._auto_shifts else self._shifts.values()
        self._planning.budgets.place(replicas.devices, list(elsewhere))
        self._planning.follow_given([replica.module for replica in replicas.replicas], replicas.devices)
        if self.num_processes > 1:
            self._meet_processes(module, replicas.num_active)
        if len(devices) > 1 or self.num_processes > 1 or self._auto_shifts or self._plans_memory:
            self._replicas, self._metrics = replicas, metrics
            metrics.dim = replicas.output_dim
            several = None
            if self._stopping is not None:
                told, heed = self._stopping.told_here, self._stopping.heed
                several = ProcessReducer(self._gradient_buckets, self._wire, told, heed)
            self._step = TrainingStep(
                replicas, self._reducer, self._loss_reduction, self._wire, self._gradient_buckets, several
            )
            self._step.rules = self._rehearsals.rules("training_step", 0)
            if several is None and not self._plans_memory:  # a plan is for slices of one size
                self._consider_threads(module, replicas)
            self._announce_reducer(replicas.devices)
        return model

    def _find_metrics(self, module: Module) -> ReplicaMetrics:
        return ReplicaMetrics(module, number="sum" if self._loss_reduction == "sum" else "mean")

    def _make_replicas(
        self, module: "pl.LightningModule", devices: Sequence[torch.device], metrics: ReplicaMetrics
    ) -> ReplicaSet:
        """One replica per device; only the first where the module cannot be copied, which is announced."""
        try:
            return self._new_replicas(module, devices, metrics)
        except ReplicationError as error:
            rank_zero_warn(f"dpx: everything runs on {devices[0]}, the other devices idle: {error}")
            return self._new_replicas(module, devices[:1], metrics, workload="even")

    def _new_replicas(
        self,
        module: "pl.LightningModule",
        devices: Sequence[torch.device],
        metrics: ReplicaMetrics,
        kind: type[ReplicaSet] = ReplicaSet,
        **changes: Any,
    ) -> ReplicaSet:
        """Replicas of ``module`` as this strategy wants them; a rehearsal wants some of it otherwise."""
        keep: list[object] = [self, module._trainer, *(module.trainer.loggers if module._trainer else [])]
        options: dict[str, Any] = {
            "workload": self._workload,
            "batch_dim": self._batch_dim,
            "batch_slicer": self._batch_slicer,
            "execution": self._execution,
            "buffers": self._buffers,
            "merge": True,
            "keep": [item for item in keep if item is not None],
            "private": self._private_attributes,
            "shared": list(metrics.named.values()),
            "skip": KINDS,
            "deadline": self._timeout,
            "check_every": self._check_every,
            "beyond": self._reach_other_processes if self.num_processes > 1 else None,
        }
        return kind(module, devices, **{**options, **changes})

    @property
    def _private_attributes(self) -> frozenset[str]:
        """What every LightningModule has, and is none of the user's."""
        return frozenset(vars(pl.LightningModule()))

    @property
    def _loss_is_sum(self) -> bool:
        return self._step is not None and self._step.rules.loss_reduction == "sum"

    def _take_trainer(self, replicas: ReplicaSet) -> None:
        for replica in replicas.replicas[1:]:
            copied: Any = replica.module
            copied._trainer = self.lightning_module._trainer  # type: ignore[union-attr]  # dropped from copies

    def _follow_structure(self) -> None:
        """What was pruned, parametrized, added or exchanged on the user's module since the last step: replicas anew."""
        replicas, step = self._replicas, self._step
        if replicas is not None and self.shifts_activations:
            self._give_whole_for_hooks(replicas)
            return
        if replicas is None or step is None or not replicas.is_outdated:
            return
        announcement = "dpx: the module has other parts than before; its replicas are made anew."
        if announcement not in self._announced:
            self._announced.add(announcement)
            rank_zero_info(announcement)
        homes = dict(zip(step.owner_parameters, replicas.root.parameters, strict=True))
        self._planning.remove(replicas)
        metrics = self._find_metrics(replicas.root.module)
        metrics.take_rules(self._metrics.rules_by_path() if self._metrics is not None else {})
        replicas.shared = tuple(metrics.named.values())
        try:
            step.remake_replicas()
        except ReplicationError as error:
            rank_zero_warn(f"dpx: everything runs on {self.root_device} from here on, the other devices idle: {error}")
            move_optimizers(self.optimizers, homes)
            replicas.close()
            self._replicas, self._step, self._metrics, self._undecided = None, None, None, False
            return
        move_optimizers(self.optimizers, homes)
        self._take_trainer(replicas)
        self._rehearsals.reopen("training_step")
        self._metrics, metrics.dim = metrics, replicas.output_dim
        self._planning.follow_given([replica.module for replica in replicas.replicas], replicas.devices)
        if step.has_other_owners:
            mine = replicas.root.parameters
            move_optimizers(self.optimizers, dict(zip(mine, step.owner_parameters, strict=True)))

    def _give_whole_for_hooks(self, replicas: ReplicaSet) -> None:
        """Replicas with shifted parts are not made anew, so what a new hook does to gradients the first one does."""
        name = replicas.name_with_other_hooks
        if name is not None:
            replicas.python_state.note_hooks_of_parameters()
            reason = f"Parameter {name} got or lost a hook, which replicas with shifted parts cannot follow."
            self._whole_batches.give_whole("training_step", reason, "Register hooks before fit.")

    def _shift(self, replicas: ReplicaSet) -> None:
        """Moves the chosen parts of every replica, before the optimizers exist."""
        devices = replicas.devices
        for source, target in self._shifts.items():
            if source not in devices:
                raise ConfigurationError(
                    f"shifts names {source}, but the replicas live on {', '.join(map(str, devices))}."
                )
            if target in devices:
                raise ConfigurationError(
                    f"shifts[{str(source)!r}]={str(target)!r}: a replica lives on {target}; shift to a device without."
                )
        if self._shifts:
            rehearse_shifts(replicas, self._shifts, self._shifted_parts, self.precision_plugin)
        for replica in replicas.replicas:
            if replica.device in self._shifts:
                shifts = {replica.device: self._shifts[replica.device]}
                shift = shifting.apply_shift(replica.module, self._shifted_parts, shifts)
                parts = ", ".join(shift.chosen)
                rank_zero_info(f"dpx: of the replica on {replica.device}, {parts} runs on {shift.target}.")
        self._note_shifts(replicas)

    def _meet_processes(self, module: "pl.LightningModule", num_replicas: int) -> None:
        """Agrees on what is trained, counts the replicas of all, and starts from rank 0's values."""
        reducer = self._reducer if isinstance(self._reducer, str) else type(self._reducer).__name__
        mine = fingerprint(
            module,
            loss_reduction=self._loss_reduction,
            communication_dtype=str(self._wire),
            gradient_buckets=self._gradient_buckets,
            reducer=reducer,
            precision=str(self.precision_plugin.precision),
            accumulate_grad_batches=module.trainer.accumulate_grad_batches,
            **{"whether memory_budget was given": self._planning.asked},
            **{"whether example_batch was given": self._example_batch is not None},
        )
        agree(mine)
        counts = gather_objects("counting the replicas", num_replicas)
        self._replica_offset, self._all_replicas = sum(counts[: self.process_rank]), sum(counts)
        make_step_aware(self, self.process_rank, self._replica_offset)
        start_equal(module)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """At the start of an epoch, several processes must have as many batches as each other.

        Raises:
            ReplicationError: they have not, and some would wait for the others in vain.
        """
        if batch_idx == 0 and self._is_connected and self.lightning_module is not None:
            agree({"the number of batches": self.lightning_module.trainer.num_training_batches})

    def _announce_reducer(self, devices: Sequence[torch.device]) -> None:
        if self._reducer == "auto" and len(set(devices)) > 1:
            names = ", ".join(map(str, devices))
            rank_zero_info(f"dpx: gradients of {names} are summed by reducer='{choose_reducer(devices)}'.")

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """The user's optimizers, each over the copies of its parameters that the owners hold."""
        super().setup_optimizers(trainer)
        if self._step is None or self._replicas is None:
            return
        assert self.lightning_module is not None, "connect() sets the module first"
        reason = self._why_all_on_first(trainer) if self._step.has_other_owners else None
        if reason is not None:
            name = choose_reducer(self._replicas.devices)
            rank_zero_warn(f"dpx: gradients are summed by reducer={name!r}, all on {self.root_device}: {reason}")
            self._step.exchange_reducer("auto")
        self._gradient_hooks.begin(self.lightning_module, self._replicas, self._step)
        if self._step.has_other_owners:
            self.optimize_owners()

    def _why_all_on_first(self, trainer: "pl.Trainer") -> str | None:
        """Why parameters cannot have owners on several devices here; ``None`` where they can."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning):
                return f"{type(callback).__name__} looks for the optimizer's parameters in the module."
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            return "LBFGS keeps all parameters in one vector, which cannot be spread over devices."
        return None

    def optimize_owners(self) -> None:
        """Optimizers change the owners' copies, also in groups that they got later."""
        assert self._step is not None, "only called with replicas"
        assert self._replicas is not None, "only called with replicas"
        if not self._step.has_other_owners:
            return
        mine = self._replicas.root.parameters
        owned = {id(one): other for one, other in zip(mine, self._step.owner_parameters, strict=True)}
        for optimizer in [*self.optimizers, *held_optimizers(self._replicas.root.module)]:
            for group in optimizer.param_groups:
                if any(owned.get(id(parameter), parameter) is not parameter for parameter in group["params"]):
                    group["params"] = [owned.get(id(parameter), parameter) for parameter in group["params"]]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of every parameter to where its owner is."""
        if not self.shifts_activations and (self._step is None or not self._step.has_other_owners):
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _consider_threads(self, module: "pl.LightningModule", replicas: ReplicaSet) -> None:
        """Whether the first step is worth a trial."""
        metrics = bool(self._metrics)
        whole = self._finisher("training_step") is not None
        compiled = [name for name, child in module.named_modules() if isinstance(child, OptimizedModule)]
        if metrics or whole or not module.automatic_optimization:
            if replicas.always_merged:
                what = "it has metric objects" if metrics else "its loss sees the whole batch"
                what = what if module.automatic_optimization else "it optimizes by hand"
                self._announce(f"take their slices as one: {what}")
        elif compiled:
            self._announce(f"take their slices as one: {', '.join(compiled)} is compiled")
        else:
            self._undecided = replicas.may_choose_threads

    def on_exception(self, exception: BaseException) -> None:
        """Adds what would help against OOM, and which process is lost or was told to stop; after SIGTERM the run fails.

        Lightning up to 2.6 would exit with 0 then.
        """
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM
            if self._stopping is not None and self._stopping.reason:
                exception.add_note(self._stopping.reason)
        if isinstance(exception, torch.OutOfMemoryError) and not isinstance(exception, BudgetError):
            exception.add_note(self._planning.advice())
        if self._is_connected and is_loss_of_a_process(exception):  # in a collective that is not ours
            exception.add_note(describe_loss("the run"))
        elif self._is_connected and not isinstance(exception, CollectiveError):
            declare_failed(exception)
        super().on_exception(exception)

    def give_up_replicas(self) -> None:
        """Ends the workers and takes everything of a run off the module; does nothing where that has been done."""
        if self._step is not None:
            self._step.close()
        if self._replicas is not None:
            self._replicas.close()
            if self._plans_memory:
                self._planning.remove(self._replicas)
        if self._module_in_use is not None:
            leave(self._module_in_use, "cpu")  # where all of it goes now; the source of a shift may be full
        self._module_in_use = None
        self._replicas, self._step, self._metrics, self._undecided = None, None, None, False
        self._accumulating, self._stopping = False, None
        self._manual = None
        self._gradient_hooks.end()
        self._batch_writes = BatchWrites()
        self._repeatable, self._tightening = None, self._planning.advice  # they hold replicas and a batch
        self._shifts_open = self._auto_shifts
        self._planning.forget()
        self._whole_batches.forget()
        self._loose_tensors = LooseTensors()

    def teardown(self) -> None:
        """Ends the workers and gives up the replicas."""
        self.give_up_replicas()
        forget_steps(self)
        stop_roll_call()
        Strategy.teardown(self)

    # ---- moments after which parameters may have been written without a trace ----

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Steps on the owners; the replicas follow before their next forward."""
        if self._step is None or self._replicas is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self.optimize_owners()
        if self._replicas.root.module.automatic_optimization:
            closure = self._gradient_hooks.closure(optimizer, closure, self._replicas, self._step)
        assert isinstance(self.precision_plugin, DPXPrecision), "the setter wraps every plugin"
        with self._gradient_hooks.round_step(self.precision_plugin.wrapped):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        given_up = self._replicas is None  # by the step that the optimizer's closure has just run
        if not given_up and (self._manual is None or not self._manual.is_shared):
            self._replicas.state.optimizer_stepped()
        return result

    def _mark_changed(self) -> None:
        if self._replicas is not None:
            self._replicas.state.mark_changed()

    def _leave_training(self) -> None:
        self._mark_changed()
        if self._is_connected and (module := self.lightning_module) is not None:
            share("sharing buffers", list(module.buffers()))
        if self._replicas is not None:
            self._replicas.release_cores()

    def _enter_evaluation(self) -> None:
        self._leave_training()
        if self._stopping is not None:
            self._stopping.begin_evaluation()

    def _end_run(self) -> None:
        if self._stopping is not None:
            self._stopping.end()

    def on_train_end(self) -> None:
        """Shares what training left; a signal that came too late for its last step ends the run."""
        self._leave_training()
        self._end_run()

    def on_validation_end(self) -> None:
        """Callbacks may have written parameters, and signals may have come."""
        self._mark_changed()
        if self._stopping is not None:
            self._stopping.meet_after_validation()

    on_train_start = _mark_changed
    on_validation_start = on_test_start = on_predict_start = _enter_evaluation
    on_test_end = on_predict_end = _end_run

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds "dpx" and one alias per registered reducer; doing it twice changes nothing."""
        for name, options in {"dpx": {}, **{f"dpx_{reducer}": {"reducer": reducer} for reducer in REDUCERS}}.items():
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=f"one process, replicas; {options}", **options)
