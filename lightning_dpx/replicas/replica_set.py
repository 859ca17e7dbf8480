"""The replicas of one module together with what drives them: slices, workers and state."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from lightning_dpx.arguments import check_choice
from lightning_dpx.backward_threads import finish_backward_at_exit, forget_failed_backward
from lightning_dpx.devices import (
    canonical_device,
    distinct_devices,
    free_garbage,
    keeps_workspaces,
    seed_apart,
    take_workspaces,
)
from lightning_dpx.errors import ConfigurationError, some_of
from lightning_dpx.python_objects.compiled import compiled_names
from lightning_dpx.python_objects.preserve import preserve_rng_state
from lightning_dpx.replicas.abandonment import keep_gradients_out
from lightning_dpx.replicas.balance import WorkloadBalancer
from lightning_dpx.replicas.batch_slice import BatchSlice
from lightning_dpx.replicas.buffer_sync import BufferMode
from lightning_dpx.replicas.caller_context import default_device
from lightning_dpx.replicas.context import InterProcess, ReplicaRank
from lightning_dpx.replicas.copying.copied_tensors import copied_tensors
from lightning_dpx.replicas.error_notes import annotate, note_replica
from lightning_dpx.replicas.executor import Task
from lightning_dpx.replicas.executor_choice import Execution, Lanes
from lightning_dpx.replicas.failed_steps import end_failed_step
from lightning_dpx.replicas.joint_backward import Roots, joint_backward
from lightning_dpx.replicas.micro_batch_sizes import MicroBatches
from lightning_dpx.replicas.module_structure import FixedStructure, ModuleStructure
from lightning_dpx.replicas.python_state import PythonState
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replica_task import ReplicaTask, Watch
from lightning_dpx.replicas.replicate import make_shadow_module, replicate, why_no_micro_batches
from lightning_dpx.replicas.row_partition import RowPartition
from lightning_dpx.replicas.slicing import BatchDim, BatchSlicer, CountedBatch, user_slicer
from lightning_dpx.replicas.stage_order import StageOrder
from lightning_dpx.replicas.stage_traits import StageTraits
from lightning_dpx.replicas.state import StateSync
from lightning_dpx.replicas.timing import StepTimes
from lightning_dpx.torch_compat import len_torch_function_stack, run_backward

# One object for the tasks of all steps, as it holds nothing.
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRules:
    """How replicas are copied from the user's module, and stay like it.

    The attributes are arguments of :class:`ReplicaSet`.
    """

    keep: tuple[object, ...]
    shared: tuple[nn.Module, ...]
    private: frozenset[str]
    skip: tuple[type, ...]
    buffers: BufferMode
    check_every: int

    @property
    def by_reference(self) -> tuple[object, ...]:
        """All that replicas have in common."""
        return (*self.keep, *self.shared)


class ReplicaSet:
    """K persistent replicas of ``module`` and the workers that run them.

    Args:
        module: The user's module, already on the first device; it is replica 0.
        devices: K devices.
        workload: ``"even"``, ``"auto"`` (measured; even where all devices are one) or K positive shares.
        batch_dim: See :func:`lightning_dpx.replicas.slicing.slice_batch`.
        batch_slicer: See :func:`lightning_dpx.replicas.slicing.user_slicer`.
        execution: ``"inline"`` runs the replicas one after the other in the calling thread, ``"threads"`` each in a
            thread of its own, ``"auto"`` uses one thread per physical device and none where there is only one. Where
            anything in the module is compiled it is ``"inline"``.
        buffers: What replica 0's buffers become after a step.
        join_slices: Under ``execution="auto"``, let replicas on one physical device take their consecutive slices as
            one, until :meth:`choose` says otherwise.
        keep: Objects that the replicas share by reference.
        existing: Per replica, parameters by name that it takes instead of copies.
        shared: Submodules that all replicas share, and that stay where they are.
        private: See :class:`PythonState`.
        skip: See :class:`PythonState`.
        check_every: Every so many steps, replicas are compared with replica 0; never if 0.
        beyond: The way to the replicas of other processes, if there are any.
        micro_batches: M, or M of each device: as many replicas take turns there, each with a part of the device's
            slice; they share the parameters of the first of them.
        deadline: Seconds after which replicas in threads that have not ended a stage are an error; none unless given.

    Attributes:
        devices: The K devices; a replica's place is the number of its device among them.
        replicas: K of them, or with micro-batches the sum of M over the devices; the first holds the user's module.
        primaries: The first replica of each place, which has the parameters of all there.
        partition: How many rows each replica gets.
        slicer: Cuts batches into as many rows.
        state: Takes parameters from their owners and buffers from the first replica to the others, and back.
        python_state: The same for Python objects that replicas share.
        structure: Whether the user's module still has the submodules and parameters that were copied.
        order: Which replicas of a stage run one after the other, as it was seen to need.
        times: What each replica takes in the step that is watched; ``None`` otherwise.

    Raises:
        ConfigurationError: an argument has a value that is not allowed.
        ReplicationError: the module cannot be copied faithfully.
    """

    def __init__(  # noqa: PLR0913  all keyword-only, one for each concern of a set of replicas
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        workload: str | Sequence[float] = "even",
        batch_dim: BatchDim = 0,
        batch_slicer: Any = None,
        execution: Execution = "auto",
        buffers: BufferMode = "broadcast",
        join_slices: bool = False,
        keep: Iterable[object] = (),
        existing: Sequence[Mapping[str, nn.Parameter]] = (),
        shared: Sequence[nn.Module] = (),
        private: frozenset[str] = frozenset(),
        skip: tuple[type, ...] = (),
        deadline: float | None = None,
        check_every: int = 0,
        beyond: InterProcess | None = None,
        micro_batches: MicroBatches = 1,
    ) -> None:
        check_choice("execution", execution, get_args(Execution))
        check_choice("buffers", buffers, get_args(BufferMode))
        if not devices:
            raise ConfigurationError("devices is empty; give at least one device.")
        self.devices: tuple[torch.device, ...] = tuple(canonical_device(device) for device in devices)
        self.partition: RowPartition = RowPartition(
            self.devices,
            workload=workload,
            # Who asks for turns or for threads wants every replica to run.
            joins_slices=join_slices and execution == "auto",
            micro_batches=micro_batches,
        )
        self._rules = CopyRules(
            keep=tuple(keep),
            shared=tuple(shared),
            private=private,
            skip=skip,
            buffers=buffers,
            check_every=check_every,
        )
        self._copy(module, existing)
        # After manual_seed all accelerators have one seed, and would drop out the same units.
        seed_apart(self.devices)
        # Autograd's threads may still let go of a graph when the interpreter ends, and a run that
        # ended well would then end with SIGABRT (pytorch/pytorch#190489).
        for device in distinct_devices(self.devices):
            finish_backward_at_exit(device)
        self.slicer: BatchSlicer = user_slicer(batch_slicer, module, batch_dim)
        compiled = compiled_names(module)
        self._lanes = Lanes(
            _execution_of(compiled, execution),
            self.devices,
            device_of=self.partition.device_of,
            deadline=deadline,
            beyond=beyond,
            is_compiled=bool(compiled),
        )
        self.order: StageOrder = StageOrder(module, self._lanes, self.partition)
        self.times: StepTimes | None = None  # of the step that is watched

    @property
    def output_dim(self) -> int:
        """The batch dim to look for first in results: that of the inputs, where some have another than 0."""
        batch_dim = self.slicer.batch_dim
        dims = [batch_dim] if isinstance(batch_dim, int) else list(batch_dim.values())
        return next((dim for dim in dims if dim > 0), 0)

    @property
    def traits(self) -> StageTraits:
        """What the stages of a step were seen to do."""
        return self.order.traits

    @property
    def root(self) -> Replica:
        """Replica 0: the user's own module."""
        return self.replicas[0]

    def _copy(self, module: nn.Module, existing: Sequence[Mapping[str, nn.Parameter]] = ()) -> None:
        rules = self._rules
        numbers = self.partition.micro_batches
        # A class that copies itself by its constructor draws the numbers that the run would draw next.
        with preserve_rng_state(self.devices):
            replicas = replicate(module, self.devices, rules.keep, existing, rules.skip, rules.shared, numbers)
        self.replicas = replicas
        # The first replica of each device has the parameters; the others there, which run its
        # further micro-batches, have the very same objects.
        firsts: dict[int, Replica] = {}
        for place, replica in zip(self.partition.device_of, replicas, strict=True):
            firsts.setdefault(place, replica)
        self.primaries: tuple[Replica, ...] = tuple(firsts[place] for place in range(len(self.devices)))
        self.state: StateSync = StateSync(replicas, rules.buffers, rules.check_every, self.primaries)
        self.python_state: PythonState = PythonState(replicas, rules.private, rules.skip, rules.by_reference)
        # With one replica nothing has to follow what the module becomes.
        self.structure: ModuleStructure | FixedStructure = (
            ModuleStructure(self.root) if len(replicas) > 1 else FixedStructure()
        )

    def cut_slices(self, micro_batches: MicroBatches, *, training: bool) -> None:
        """From the next :meth:`remake` on, steps in this mode have their slices cut into so many micro-batches."""
        self.partition.cut_slices(micro_batches, training=training)
        self._lanes.deal(self.partition.device_of)

    def remake(self) -> None:
        """Copies the user's module again, as it is now; what is measured and known of its steps stays.

        Raises:
            ReplicationError: the module cannot be copied faithfully.
        """
        self.root.refresh()
        self._copy(self.root.module)

    def share(self, modules: Iterable[nn.Module]) -> None:
        """From the next :meth:`remake` on, these submodules are the same objects in all replicas.

        Args:
            modules: Parts of the user's module; others than these are copied.
        """
        self._rules = replace(self._rules, shared=tuple(modules))

    def make_shadow_module(self, replica: Replica | None = None, keep: Iterable[object] = ()) -> nn.Module:
        """A copy of a replica, the first unless given, that shares its parameters and leaves its other state alone.

        Args:
            replica: Which one.
            keep: Objects that the copy shares with it, too.
        """
        return make_shadow_module(replica or self.root, [*self._rules.keep, *keep])

    def why_no_micro_batches(self) -> str:
        """What keeps micro-batches from sharing the parameters of their device; empty if nothing does."""
        with preserve_rng_state(self.devices):
            why = why_no_micro_batches(self.root, self._rules.keep)
        # A module often refers to itself, and its copy, with all buffers, would stay beside the step.
        free_garbage()
        return why

    def copied_tensors(self) -> list[torch.Tensor]:
        """Tensors of the user's module, beside parameters and buffers, of which every other replica has a copy."""
        return copied_tensors(self.root.module, self._rules.by_reference)

    def mark_changed(self) -> None:
        """Parameters of the user's module may have been written without a trace: the others get them again."""
        self.state.parameters.mark_changed()
        for replica in self.replicas:
            replica.hidden.mark_changed()

    @property
    def cuts_batches(self) -> bool:
        """Whether a step, in the mode that the module is in, may run on several replicas."""
        return self.partition.cuts_batches(training=self.root.module.training)

    @property
    def cuts_slices(self) -> bool:
        """Whether a step, in the mode that the module is in, has its slices cut into micro-batches."""
        return self.partition.cuts_slices(training=self.root.module.training)

    @property
    def has_met(self) -> bool:
        """Whether micro-batches, in the mode that the module is in, have waited for each other, and still will."""
        return self.root.module.training in self.traits.met and self.cuts_slices

    def choose(self, *, threads: bool) -> None:
        """From now on training steps run every replica in a thread of its own, or take their slices as one."""
        # The executor is closed for it, and its threads end: only where the choice is another one.
        if threads != self.partition.trains_apart:
            self._lanes.choose(threads=threads)
        self.partition.joins_slices_in_training = self.partition.joins_slices and not threads

    def sizes(self, num_rows: int) -> tuple[int, ...]:
        """Rows per replica, and so per micro-batch, of a batch of ``num_rows`` in the mode that the module is in."""
        return self.partition.sizes(num_rows, training=self.root.module.training)

    def sizes_of(self, counted: CountedBatch) -> tuple[int, ...]:
        """Rows per replica of this batch, in the mode that the module is in."""
        # Six long rows may need the memory of fifty short ones. Only the number of micro-batches
        # follows from that; nothing else asks for shapes in every step.
        shapes = counted.row_shapes() if self.partition.has_micro_batches else ()
        return self.partition.sizes(counted.num_rows, training=self.root.module.training, row_shapes=shapes)

    def slices(self, batch: Any) -> list[BatchSlice]:
        """The parts of ``batch``, one per active replica, in sample order.

        Raises:
            UncuttableBatch: the batch cannot be cut for certain.
        """
        counted = self.slicer.read(batch)
        # No rows make no slices, and nothing would run at all; one device runs its step on them.
        if counted.num_rows == 0:
            return [self.whole_slice(batch, 0)]
        sizes = self.sizes_of(counted)
        # Who gets all rows needs no slice, so that what could not be cut does not matter.
        one_gets_all = sum(size > 0 for size in sizes) == 1
        parts = [batch] * len(sizes) if one_gets_all else counted.cut(sizes)
        self._begin_timing(sizes)
        slices = []
        for replica, size, part in zip(self.replicas, sizes, parts, strict=True):
            if size:
                slices.append(BatchSlice(replica, size, part))
        return slices

    def whole_slice(self, batch: Any, num_rows: int) -> BatchSlice:
        """All of ``batch`` for the first replica; the others idle."""
        self._begin_timing((num_rows, *(0,) * (len(self.replicas) - 1)))
        return BatchSlice(self.root, num_rows, batch)

    def _begin_timing(self, sizes: tuple[int, ...]) -> None:
        """A step with these rows per replica begins."""
        balancer = self.partition.balancer
        if balancer is None and self.times is None:
            return
        rows = self.partition.by_device(sizes)
        if balancer is not None and self.root.module.training:
            balancer.begin(rows)
        if self.times is not None:
            self.times.begin(rows)

    def run(self, stage: str, slices: Sequence[BatchSlice], call: Callable[[BatchSlice], Any]) -> list[Any]:
        """``call(slice)`` for every slice, each in its replica's context and lane; values in slice order.

        Raises:
            BaseException: the first replica's error, the original object with a note.
        """
        lanes = self._lanes
        order = self.order
        in_turns = order.takes_turns(stage)
        if in_turns:
            # The turns run in the calling thread, which had given its cores to the lanes.
            lanes.release_cores()
        # In line, replicas draw and write in the order of one device: there is nothing to learn.
        before = self.traits.draws.now(lanes.shared_accelerators) if lanes.in_threads else None
        watch = order.watch(stage, self._rules.by_reference) if in_turns and len(slices) > 1 else None
        # First of all: the ranks of the tasks keep the slot, so it must be that of this run.
        slot = lanes.open_slot()
        tasks = self._tasks(stage, slices, call, one_by_one=in_turns or not lanes.in_threads)
        if self.partition.has_micro_batches:
            lanes.expect_micro_batches([batch_slice.replica.device for batch_slice in slices])
        try:
            with watch or _NOTHING, lanes.versions:
                values = lanes.executor(in_turns=in_turns).run(tasks, slot)
        except BaseException as error:
            # Autograd's threads may still be at work for this step, and write into the module.
            interrupted = slot.abandoned or isinstance(error, KeyboardInterrupt)
            end_failed_step([replica.module for replica in self.replicas], self.devices, interrupted=interrupted)
            raise
        if self.partition.has_micro_batches and slot.was_used:
            order.note_meeting(stage)
        if before is not None and len(tasks) > 1:
            order.note_draws(stage, in_turns=in_turns, drew=self.traits.draws.has_drawn(before))
            order.note_writes(stage, watch, in_turns=in_turns, wrote_shared=self.python_state.wrote_shared())
        return values

    def take_workspaces(self) -> None:
        """Has libraries take what they keep for each thread that runs a replica, so that it is among what is there."""
        tasks: list[Task] = []
        for replica in self.replicas:
            # Shifted parts compute where their parameters are, in the same thread.
            places = distinct_devices([replica.device, *(parameter.device for parameter in replica.parameters)])
            for device in filter(keeps_workspaces, places):
                tasks.append(Task(replica.index, replica.device, "planning", partial(take_workspaces, device)))
        # Stages that take turns run in the calling thread, which takes its own where it profiles.
        if tasks:
            self._lanes.executor(in_turns=False).run(tasks)

    def _tasks(
        self, stage: str, slices: Sequence[BatchSlice], call: Callable[[BatchSlice], Any], *, one_by_one: bool
    ) -> list[Task]:
        # In threads no replica comes after another, so nothing is handed over.
        hand_over = self.python_state.hand_over if one_by_one else None
        # It looks at what forwards return; a backward has none of its own.
        searched = torch.is_anomaly_enabled() and stage != "backward"
        balancer = self.partition.balancer if self.root.module.training else None
        # What one device makes without naming a device is where the module is, so with a replica it is there, too.
        follows_default = len_torch_function_stack() > 0 and default_device() == self.root.device
        tasks: list[Task] = []
        for rank, batch_slice in enumerate(slices):
            replica = batch_slice.replica
            # Nearly every step: one empty tuple for all instead of a list for each task.
            watches: Sequence[Watch] = ()
            if balancer is not None or self.times is not None:
                watches = self._watches(replica, stage, balancer)
            task = ReplicaTask(
                replica.index,
                replica.device,
                stage,
                call,
                # What outlasts even its end by force must find no parameter to leave a gradient in.
                partial(keep_gradients_out, replica.parameters),
                rank=ReplicaRank(rank, len(slices), self._lanes.slot),
                batch_slice=batch_slice,
                before=hand_over if rank > 0 else None,
                watches=watches,
                searched=searched,
            )
            if follows_default and replica.device != self.root.device:
                task.default_device = replica.device
            tasks.append(task)
        return tasks

    def _watches(self, replica: Replica, stage: str, balancer: WorkloadBalancer | None) -> list[Watch]:
        device = self.partition.device_of[replica.index]
        of_balancer = balancer.watch(device) if balancer is not None else None
        of_times = self.times.watch(device, stage) if self.times is not None else None
        return [watch for watch in (of_balancer, of_times) if watch is not None]

    def backward(self, slices: Sequence[BatchSlice], roots: Sequence[Roots]) -> None:
        """Every replica's own backward, from the tensors that its forward returned, with their gradients.

        Raises:
            BaseException: the first replica's error, the original object with a note.
        """
        if self._walk_as_one(slices):
            try:
                joint_backward(roots, lambda place, error: self._blame(slices[place].replica, error))
            except BaseException:
                # Autograd's queue of this thread would hold the step's graph until it runs again.
                forget_failed_backward()
                raise
            return
        of_replica: dict[int, Roots] = {}
        for batch_slice, roots_of_slice in zip(slices, roots, strict=True):
            of_replica[batch_slice.replica.index] = roots_of_slice

        def walk(batch_slice: BatchSlice) -> None:
            tensors, gradients = of_replica[batch_slice.replica.index]
            if not tensors:
                return
            try:
                run_backward(tensors, gradients)
            except BaseException:
                # Here too, and not once for all: every thread has such a queue.
                forget_failed_backward()
                raise

        self.run("backward", slices, walk)
        self.traits.has_walked_back = True

    def _walk_as_one(self, slices: Sequence[BatchSlice]) -> bool:
        """Whether one joint backward may serve all replicas."""
        # In line on the host, once a backward met no other, and while they are not watched apart.
        if len(slices) == 1 or not self.traits.has_walked_back:
            return False
        # Gradients of a collective meet in the backward once more. In a joint one nobody can wait.
        if not self._lanes.in_line_on_host or self._lanes.slot.was_used:
            return False
        # Stopwatches and anomaly mode tell replicas apart, which one walk does not.
        return self.partition.balancer is None and self.times is None and not torch.is_anomaly_enabled()

    def _blame(self, replica: Replica, error: BaseException) -> None:
        annotate(error, replica.module, replica.device, replica.first_nan)
        note_replica(error, replica.index, replica.device, "backward")

    def claim_cores(self) -> None:
        """Before a step; see :meth:`Lanes.claim_cores`. Replicas that take turns need the caller's threads."""
        if self._lanes.in_threads and not self.traits.has_drawn:
            self._lanes.claim_cores()

    def release_cores(self) -> None:
        """Outside training the caller has its threads back."""
        self._lanes.release_cores()

    def close(self) -> None:
        """Ends the workers; whatever runs after this starts them again."""
        self._lanes.close()


def _execution_of(compiled: Sequence[str], asked: Execution) -> Execution:
    """What was asked for, or in line where code is compiled."""
    # A look through the code of all classes, which rehearsals, in line as a rule, would take many times.
    if asked == "inline":
        return asked
    # Threads that enter compiled code at once make each other's guards fail, as "Dynamo is not thread safe"
    # (pytorch/pytorch#118260): it was compiled anew each time, until torch gave it up.
    if asked == "threads" and compiled:
        warnings.warn(
            "execution='threads' runs replicas in line here, as compiled code is not made for several threads at a "
            f"time: {some_of(compiled)}.",
            stacklevel=4,
        )
    if compiled:
        return "inline"
    return asked
