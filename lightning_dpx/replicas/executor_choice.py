"""Where the tasks of replicas run: one after the other in the calling thread, or each device in a thread of its own."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal

import torch

from lightning_dpx.devices import distinct_devices, is_host, num_usable_cpus
from lightning_dpx.replicas.compiled_versions import versions_for
from lightning_dpx.replicas.context import NO_MEETING, InterProcess, RendezvousSlot
from lightning_dpx.replicas.executor import Executor
from lightning_dpx.replicas.inline_executor import InlineExecutor
from lightning_dpx.replicas.threaded_executor import ThreadedExecutor

Execution = Literal["auto", "inline", "threads"]


class Lanes:
    """Chooses the executor that runs the tasks of replicas, and holds their rendezvous.

    Args:
        execution: See :class:`lightning_dpx.replicas.replica_set.ReplicaSet`.
        devices: K devices.
        device_of: By replica, the place of its device.
        deadline: Seconds that a task may take; any number unless given.
        beyond: The way to the replicas of other processes, if there are any.
        is_compiled: Whether anything that the tasks run is compiled.

    Attributes:
        slot: Where the tasks of a run meet.
        in_threads: Whether there is more than one lane.
        in_line_on_host: Whether all runs in the calling thread, and no device works on by itself.
        versions: What is to be entered for a run.
        shared_accelerators: Those that several lanes have, each of which has one random generator for all of them.
    """

    def __init__(
        self,
        execution: Execution,
        devices: Sequence[torch.device],
        *,
        device_of: Sequence[int],
        deadline: float | None,
        beyond: InterProcess | None,
        is_compiled: bool = False,
    ) -> None:
        self._execution = execution
        self._devices = tuple(devices)
        self._deadline = deadline
        # Beside the executor of the run: a stage that draws random numbers takes turns, others do
        # not.
        self._turns = InlineExecutor(deadline)
        self._callers_threads: int | None = None
        # To ask torch for its settings takes seconds, so it is done where there is need.
        self.versions: AbstractContextManager[None] = versions_for(devices) if is_compiled else nullcontext()
        shared = ", ".join(map(str, _taken_twice(devices)))
        self.slot: RendezvousSlot = RendezvousSlot(oversubscribed=shared, beyond=beyond)
        self._use(make_executor(execution, devices, deadline, device_of), execution)

    def _use(self, executor: Executor, execution: Execution) -> None:
        self._executor = executor
        self.in_threads: bool = isinstance(executor, ThreadedExecutor)
        # Left to "auto", the replicas of one device have one lane.
        have_own_lanes = self.in_threads and execution == "threads"
        self.shared_accelerators: tuple[torch.device, ...] = _taken_twice(self._devices) if have_own_lanes else ()
        self.in_line_on_host: bool = not self.in_threads and all(map(is_host, self._devices))

    def deal(self, device_of: Sequence[int]) -> None:
        """Makes the executor anew, as there are other replicas than before.

        Args:
            device_of: By replica, the place of its device.
        """
        self._executor.close()
        self._use(make_executor(self._execution, self._devices, self._deadline, device_of), self._execution)

    def choose(self, *, threads: bool) -> None:
        """A thread for every replica from now on, or none."""
        self._executor.close()
        execution: Execution = "threads" if threads else "inline"
        self._use(make_executor(execution, self._devices, self._deadline), execution)

    def open_slot(self) -> RendezvousSlot:
        """The slot in which the next run meets; never that of a run that was abandoned."""
        if self.slot.abandoned:
            self.slot = replace(self.slot, meeting=NO_MEETING, abandoned=False)
        return self.slot

    def expect_micro_batches(self, devices: Sequence[torch.device]) -> None:
        """The next run has micro-batches, several on a device, and is watched for whether they meet.

        Args:
            devices: That of every task.
        """
        self.slot.oversubscribed = ", ".join(map(str, _taken_twice(devices)))
        self.slot.was_used = False

    def executor(self, *, in_turns: bool) -> Executor:
        """What runs the tasks of a stage. The caller calls it, since a traceback shows every frame above a step.

        Args:
            in_turns: Run them one after the other, even where there are threads.
        """
        if in_turns:
            return self._turns
        return self._executor

    def claim_cores(self) -> None:
        """Before a step: beside replicas in threads the caller's own pool is one thread; idle ones would spin."""
        on_host = isinstance(self._executor, ThreadedExecutor) and self._executor.on_host
        if on_host and self._callers_threads is None:
            self._callers_threads = torch.get_num_threads()
            torch.set_num_threads(1)

    def release_cores(self) -> None:
        """Outside training the caller has its threads back."""
        if self._callers_threads is not None:
            torch.set_num_threads(self._callers_threads)
            self._callers_threads = None

    def close(self) -> None:
        """Ends the threads; whatever runs after this starts them again."""
        self.release_cores()
        if isinstance(self._executor, ThreadedExecutor) and self._executor.on_host:
            # A call that a lane made again had its forward's threads, and what a thread sets is for all later ones.
            torch.set_num_threads(torch.get_num_threads())
        self._executor.close()


def _taken_twice(devices: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """Accelerators that are among ``devices`` more than once."""
    # Autograd has one thread for each accelerator; on the host each backward has its caller's.
    accelerators = [device for device in devices if not is_host(device)]
    found = []
    for device in distinct_devices(accelerators):
        if accelerators.count(device) > 1:
            found.append(device)
    return tuple(found)


def make_executor(
    execution: Execution,
    devices: Sequence[torch.device],
    deadline: float | None = None,
    device_of: Sequence[int] = (),
) -> Executor:
    """Threads where they can help: one lane per physical device, or one per given device where asked for.

    Args:
        execution: See :class:`Lanes`.
        devices: K devices.
        deadline: See :class:`Lanes`.
        device_of: The place among the devices of every replica, whose micro-batches take turns in one lane; every
            device has one replica unless given.
    """
    physical = distinct_devices(devices)
    # On one device threads gain nothing for certain (see thread_probe), so they must be asked for.
    if execution == "inline" or len(devices) == 1 or (execution == "auto" and len(physical) == 1):
        return InlineExecutor(deadline)
    places = device_of or range(len(devices))
    if execution == "auto":
        return ThreadedExecutor([physical.index(devices[place]) for place in places], deadline=deadline)
    # Replicas on the host share out its cores; left alone, each would use a thread for every core.
    on_host = sum(is_host(device) for device in devices)
    threads = max(1, num_usable_cpus() // on_host) if on_host else None
    return ThreadedExecutor(list(places), threads, deadline)
