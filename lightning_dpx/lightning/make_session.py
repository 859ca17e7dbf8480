"""A run begins: the user's module becomes replicas, after it reached its device and before the optimizers exist."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_dpx import shifting
from lightning_dpx.devices import spare_devices
from lightning_dpx.errors import ConfigurationError, ReplicationError, some_of
from lightning_dpx.lightning.changed_structure import give_trainer
from lightning_dpx.lightning.lightning_api import pl, rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.lightning_compat import trainer_of
from lightning_dpx.lightning.memory.auto_shift import note_shifts
from lightning_dpx.lightning.memory.planned_step_memory import PlannedStepMemory
from lightning_dpx.lightning.metrics.metrics import ReplicaMetrics
from lightning_dpx.lightning.micro_batch_steps import MicroBatchSteps
from lightning_dpx.lightning.new_replicas import new_replicas, replicas_by_hand
from lightning_dpx.lightning.processes.connect import agree, fingerprint, gather_objects, start_equal
from lightning_dpx.lightning.processes.rank_zero import make_step_aware
from lightning_dpx.lightning.processes.stop import CoordinatedStop
from lightning_dpx.lightning.rehearsal.shift_rehearsal import rehearse_shifts
from lightning_dpx.lightning.run import OneDevice
from lightning_dpx.lightning.session import Session
from lightning_dpx.python_objects.compiled import compiled_names
from lightning_dpx.reducers import ProcessReducer, choose_reducer, make_communication_hook
from lightning_dpx.replicas import ReplicaSet, synchronize_batch_norm
from lightning_dpx.step import TrainingStep

if TYPE_CHECKING:
    from lightning_dpx.lightning.strategy import DPXStrategy


def make_session(strategy: "DPXStrategy", module: pl.LightningModule) -> Session | OneDevice:
    """The run of ``module`` on the devices of ``strategy``, in the order in which one thing needs the other.

    Raises:
        ConfigurationError: shifts name devices that are not there.
        ReplicationError: the processes do not train the same.
    """
    options = strategy.options
    planning = strategy.planning
    # Before the module is copied, so that every replica has the synchronized layers.
    if strategy.synchronizes_batch_norm:
        synchronize_batch_norm(module)
    metrics = ReplicaMetrics(module, number=options.number_rule)
    replicas = _replicas_where_possible(strategy, module, metrics)
    give_trainer(replicas, trainer_of(module))
    _shift(strategy, replicas)
    # With shifts="auto" the first batch decides where to. Any device without a replica may be
    # chosen, so each gets a budget.
    automatic = [*spare_devices(list(replicas.devices)), torch.device("cpu")]
    elsewhere = automatic if options.chooses_shifts else list(options.device_shifts.values())
    planning.rooms.budgets.place(replicas.devices, elsewhere)
    planning.follow_given(replicas)
    several = strategy.num_processes > 1
    if several:
        _meet_processes(strategy, module, replicas.partition.num_active)
    # Lightning's own steps do for one device, unless something is to happen round them.
    needs_session = several or options.chooses_shifts or strategy.plans_memory or replicas.partition.has_micro_batches
    if len(replicas.devices) == 1 and not needs_session:
        return OneDevice(strategy)
    metrics.dim = replicas.output_dim
    step = TrainingStep(
        replicas,
        options.reducer,
        strategy.verification.rules("training_step", 0),
        options.wire_dtype,
        options.gradient_buckets,
        _process_reducer(strategy),
    )
    session = Session(strategy, replicas, metrics, step)
    # Later on a budget may choose micro-batches, or another number of them: see Session.cut_slices.
    if replicas.partition.has_micro_batches:
        session.micro_batches = MicroBatchSteps(session)
    if strategy.plans_memory or options.chooses_shifts:
        session.memory = PlannedStepMemory(session, planning, strategy.out_of_memory, strategy.hooks_mode)
    # Dynamo is not thread-safe, so compiled code never runs in several threads at once: see
    # _execution_of in replicas/replica_set.py.
    if len(set(replicas.devices)) > 1 and (compiled := compiled_names(module)):
        session.announce_replicas(f"run one after the other, as there is compiled code: {some_of(compiled)}")
    if not several and not strategy.plans_memory:  # a plan is for slices of one size
        session.threads.consider()
    _announce_reducer(strategy, replicas.devices)
    return session


def _replicas_where_possible(
    strategy: "DPXStrategy", module: pl.LightningModule, metrics: ReplicaMetrics
) -> ReplicaSet:
    """One replica per device; only the first where the module cannot be copied, which is announced."""
    devices = strategy.parallel_devices or []
    try:
        # By hand micro-batches are replicas of their own, which meet in the calls of optimizers.
        if not module.automatic_optimization:
            return replicas_by_hand(strategy, module, devices, metrics)
        return new_replicas(strategy, module, devices, metrics)
    except ReplicationError as error:
        # A run on one device needs no copy, so it can still be had.
        what = "the other devices idle" if len(devices) > 1 else "and its batches are not cut"
        rank_zero_warn(f"dpx: everything runs on {devices[0]}, {what}: {error}")
        # Micro-batches run on copies, too, and a workload has a number for each device
        # that was given.
        return new_replicas(strategy, module, devices[:1], metrics, workload="even", micro_batches=1)


def _shift(strategy: "DPXStrategy", replicas: ReplicaSet) -> None:
    """Moves the chosen parts of every replica.

    Raises:
        ConfigurationError: no replica lives where parts are shifted from, or one lives where they are shifted to.
    """
    shifts = strategy.options.device_shifts
    parts = strategy.options.shifted_parts
    devices = replicas.devices
    for source, target in shifts.items():
        if source not in devices:
            raise ConfigurationError(f"shifts names {source}, but the replicas live on {', '.join(map(str, devices))}.")
        if target in devices:
            raise ConfigurationError(
                f"shifts[{str(source)!r}]={str(target)!r}: a replica lives on {target}; shift to a device without."
            )
    if shifts:
        rehearse_shifts(replicas, shifts, parts, strategy.precision_plugin)
    for replica in replicas.replicas:
        if replica.device in shifts:
            shift = shifting.apply_shift(replica.module, parts, {replica.device: shifts[replica.device]})
            chosen = ", ".join(shift.chosen)
            rank_zero_info(f"dpx: of the replica on {replica.device}, {chosen} runs on {shift.target}.")
    note_shifts(replicas.replicas, strategy.hooks_mode)


def _meet_processes(strategy: "DPXStrategy", module: pl.LightningModule, num_replicas: int) -> None:
    """Agrees on what is trained, counts the replicas of all, and starts from rank 0's values."""
    options = strategy.options
    # An object of the user's cannot be compared between processes, its class can.
    reducer = options.reducer if isinstance(options.reducer, str) else type(options.reducer).__name__
    mine = fingerprint(
        module,
        loss_reduction=options.loss_reduction,
        communication_dtype=str(options.wire_dtype),
        gradient_buckets=options.gradient_buckets,
        reducer=reducer,
        precision=str(strategy.precision_plugin.precision),
        accumulate_grad_batches=module.trainer.accumulate_grad_batches,
        **{"whether memory_budget was given": strategy.planning.rooms.is_given},
        **{"whether example_batch was given": options.example_batch is not None},
    )
    agree(mine)
    # Nodes may have different numbers of devices, so ranks of replicas cannot be computed from
    # those of processes.
    counts = gather_objects("counting the replicas", num_replicas)
    rank = strategy.process_rank
    first = sum(counts[:rank])
    strategy.ranks.count_replicas(first, sum(counts))
    make_step_aware(strategy, rank, first)
    # Shapes and dtypes have been compared by now, so every broadcast fits on all processes.
    start_equal(module)


def _process_reducer(strategy: "DPXStrategy") -> ProcessReducer | None:
    """What averages gradients over several processes, where there are several."""
    options = strategy.options
    stopping = strategy.stopping
    # begin_run() makes one where there are several processes. Its request to stop travels with the
    # gradients, at no cost of its own.
    if not isinstance(stopping, CoordinatedStop):
        return None
    hook = None if options.communication_hook is None else make_communication_hook(options.communication_hook)
    return ProcessReducer(options.gradient_buckets, options.wire_dtype, stopping.requested_here, stopping.apply, hook)


def _announce_reducer(strategy: "DPXStrategy", devices: Sequence[torch.device]) -> None:
    if strategy.options.reducer == "auto" and len(set(devices)) > 1:
        names = ", ".join(map(str, devices))
        rank_zero_info(f"dpx: gradients of {names} are summed by reducer='{choose_reducer(devices)}'.")
