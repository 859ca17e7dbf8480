"""``Trainer(strategy="dpx")``: one process, one Trainer, K replicas.

What may be asked for, and what may be seen of a run; ``hooks.py`` has what Lightning calls.
"""

import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn import Module

from lightning_dpx.lightning.adoption import Adoption
from lightning_dpx.lightning.compiled_whole import CompiledWhole
from lightning_dpx.lightning.hooks import HookedStrategy
from lightning_dpx.lightning.lifecycle import Lifecycle
from lightning_dpx.lightning.lightning_api import MODULE, Accelerator, CheckpointIO, ClusterEnvironment, Precision
from lightning_dpx.lightning.memory.out_of_memory import OnOOM, OutOfMemoryRecovery
from lightning_dpx.lightning.memory.planning import MemoryPlanning
from lightning_dpx.lightning.options import CommunicationDtype, StrategyOptions, Verify, Workload
from lightning_dpx.lightning.processes.stop import CoordinatedStop, NoStop
from lightning_dpx.lightning.ranks import Ranks
from lightning_dpx.lightning.rehearsal.verification import Verification
from lightning_dpx.lightning.run import OneDevice
from lightning_dpx.lightning.session import Session
from lightning_dpx.memory import MemoryPlan, Planner, Profile
from lightning_dpx.reducers import REDUCERS, GradientReducer
from lightning_dpx.replicas import BufferMode, Execution, Slicer, StepTimes
from lightning_dpx.shifting import BetweenSteps
from lightning_dpx.step import LossReduction

# What a Trainer sets; see adoption.py.
_OF_TRAINERS = ("_own_accelerator", "_precision_plugin", "_checkpoint_io", "cluster_environment", "parallel_devices")


class DPXStrategy(HookedStrategy):
    """Trains one LightningModule on all devices of a machine from one process.

    The result is that of one device: replicas only share the work. One device runs as in Lightning's own strategy.

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
            once in slices of unequal size. Losses, gradients, outputs, logged values and Python state are compared, and
            how outputs and logged values are merged is decided by what reproduces those of one device. What differs is
            a warning ("warn"), an error ("raise", also where it cannot be found out), or has the stage run on the first
            replica as one device ("first", also where a batch norm would see slices). "off" rehearses nothing. It runs
            your step on shadow modules and puts back all that it changes in them, the trainer and random generators;
            what a step does outside (prints, files, requests) happens again. Steps by hand run with copies of their
            optimizers, and are compared by the new weights.
        micro_batches: M, or a list of one M for each device: a device's slice of a batch is cut into M micro-batches of
            nearly equal rows, of which each runs forward and backward before the next one begins, so that only its
            activations are held. Outside the step nothing changes: it is one step on one batch. Evaluation and
            prediction are cut likewise. Where the loss needs the outputs of all rows (training_step_end), every
            micro-batch runs forward twice: without a graph, and again for its backward. A training step by hand is cut
            on one device only.
            "auto" has memory_budget choose M together with the plan, so that a training step is fastest; without a
            budget M is 1. The step stays in one piece where that takes as long, where the rehearsal finds that
            micro-batches are not what one device gives (batch norm), or verify="off" leaves that open, and where torch
            shall use deterministic algorithms, as M depends on times that are measured. Evaluation has an M of its
            own: it is cut where it would not fit. Dropout draws by micro-batch; 1 keeps the bits of a step without one.
        communication_hook: How gradients travel between processes: "bf16", "fp16", "powersgd", a PowerSGDState, or a
            hook of torch.distributed.algorithms.ddp_comm_hooks with its state, (state, hook). They are compressed.
        accelerator: Lightning's accelerator.
        parallel_devices: The devices, one per replica; usually given by Trainer(devices=...).
        cluster_environment: Lightning's cluster environment.
        checkpoint_io: Lightning's checkpoint reader and writer.
        precision_plugin: Lightning's precision plugin; usually given by Trainer(precision=...).

    Raises:
        ConfigurationError: an argument has a value that is not allowed.

    Examples:
        >>> trainer = Trainer(strategy=dpx.DPXStrategy(memory_budget="1GiB"), accelerator="cpu", devices=2)
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
        micro_batches: int | list[int] | Literal["auto"] = "auto",
        communication_hook: Any = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        # The base constructor sets precision_plugin, whose setter reads the options.
        self.options: StrategyOptions = StrategyOptions(
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
            micro_batches=micro_batches,
            communication_hook=communication_hook,
        )
        self.planning: MemoryPlanning = MemoryPlanning(memory_budget, planner, plan, plan_cache)
        self.out_of_memory: OutOfMemoryRecovery = OutOfMemoryRecovery(on_oom)
        self.verification: Verification = Verification(self, verify, loss_reduction)
        self.ranks: Ranks = Ranks(self)
        self.lifecycle: Lifecycle = Lifecycle(self)
        self.compiled_whole: CompiledWhole = CompiledWhole()
        self.stopping: CoordinatedStop | NoStop = NoStop()
        self.hooks_mode: BetweenSteps | None = None  # what hooks run in, where parts are shifted
        # A session at all times, so that no caller has to ask whether there is one.
        self.one_device: OneDevice = OneDevice(self)
        self.session: Session | OneDevice = self.one_device
        self.module_in_use: Module | None = None  # from setup to teardown, which Lightning may skip
        self._announced: set[str] = set()
        self.adoption: Adoption = Adoption(self, *_OF_TRAINERS)
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)

    def __repr__(self) -> str:
        return f"<DPXStrategy for a Trainer of {MODULE}; in a loop of your own, use lightning_dpx.ReplicaGroup>"

    @property
    def memory_budget(self) -> dict[str, int | float | str] | int | float | str | None:
        """The budget as given, a text as bytes."""
        budget: dict[str, int | float | str] | int | float | str | None = self.planning.rooms.given
        return budget

    @property
    def planner(self) -> Planner:
        """Who plans."""
        return self.planning.planner

    @property
    def plans_memory(self) -> bool:
        """Whether steps are planned, or may be."""
        return self.planning.has_budget_or_plan or self.out_of_memory.repeats_steps

    # ---- what is known of a run ----

    @property
    def is_running(self) -> bool:
        """Whether a Trainer is in the middle of a run with this strategy."""
        return self.adoption.is_running

    @property
    def replica_modules(self) -> list[Module]:
        """The modules of all replicas during a run, the user's own first; empty with one device."""
        return self.session.modules

    @property
    def memory_plans(self) -> dict[torch.device, tuple[MemoryPlan, Profile | None]]:
        """By device, the plan that is followed, and the step that it was made from if it was made here."""
        return self.planning.devices.plans_and_profiles()

    def planned_activations(self, device: torch.device) -> tuple[int, int]:
        """Bytes of activations that the memory plan predicts on ``device`` at their peak, and its budget for all."""
        return self.planning.devices.activations(device)

    def check_replicas(self) -> None:
        """Compares the parameters of all replicas with those of your module, to the bit.

        Raises:
            ReplicationError: they differ; names the parameters and replicas.
        """
        self.session.check_replicas()

    def watch_replicas(self) -> StepTimes | None:
        """Times the next step of every replica; ``None`` with one device."""
        return self.session.watch()

    def stop_watching(self) -> None:
        """The following steps are not timed."""
        self.session.stop_watching()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds "dpx" and one alias per registered reducer; doing it twice changes nothing."""
        for name, options in {"dpx": {}, **{f"dpx_{reducer}": {"reducer": reducer} for reducer in REDUCERS}}.items():
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=f"one process, replicas; {options}", **options)
