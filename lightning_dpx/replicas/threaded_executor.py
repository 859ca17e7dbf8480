"""Replicas side by side, in persistent daemon threads that take over the caller's context for every task."""

import contextvars
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_dpx.errors import CollectiveError
from lightning_dpx.replicas.abandonment import RunningTask, StepAbandoned
from lightning_dpx.replicas.caller_context import CallerContext, attempt_in
from lightning_dpx.replicas.collectives import WAIT_SECONDS, Rendezvous
from lightning_dpx.replicas.context import NO_MEETING, RendezvousSlot
from lightning_dpx.replicas.executor import Executor, Task, TaskResult, give_up, too_late, values_of


class ThreadedExecutor(Executor):
    """One persistent daemon thread per lane; tasks of one lane run in order.

    After Ctrl-C, or beyond the deadline, all lanes are given up and what still runs in them is stopped; the next run
    has new ones.

    Args:
        lane_of: The lane (thread) of every replica: the physical device, or the replica itself where concurrency on
            one device was asked for.
        intra_op_threads: CPU threads of torch for each lane's own operators; ``None`` leaves torch's choice.
        deadline: Seconds that one run may take; no limit unless given.
    """

    def __init__(
        self, lane_of: Sequence[int], intra_op_threads: int | None = None, deadline: float | None = None
    ) -> None:
        self._lane_of = tuple(lane_of)
        self._deadline = deadline
        self._inboxes: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._threads_per_lane = intra_op_threads
        self._process = os.getpid()
        # It must not refer to the executor itself, which would then never be collected.
        weakref.finalize(self, _end, self._inboxes)  # where close() is never called, no threads stay

    @property
    def on_host(self) -> bool:
        """Whether the lanes share out the cores of the host."""
        return self._threads_per_lane is not None

    def start(self) -> None:
        """Starts the threads; the first run does it by itself.

        A thread's choice of intra-op threads also becomes the default of every later thread, so the caller's own
        number is set again once all lanes have chosen.
        """
        ready: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._process = os.getpid()
        callers_threads = torch.get_num_threads()
        for lane in range(max(self._lane_of) + 1):
            inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve, args=(inbox, ready, self._threads_per_lane), name=f"dpx-lane-{lane}", daemon=True
            )
            thread.start()
            self._inboxes.append(inbox)
            self._threads.append(thread)
        # Only once all have chosen: each choice is that of every later thread, ours included.
        for _ in self._threads:
            ready.get()
        torch.set_num_threads(callers_threads)

    def run(self, tasks: Sequence[Task], rendezvous_slot: RendezvousSlot | None = None) -> list[Any]:
        """See :meth:`Executor.run`."""
        slot = rendezvous_slot or RendezvousSlot()
        try:
            results = self._results(tasks, slot)
        finally:
            if not slot.abandoned:
                slot.meeting = NO_MEETING  # it holds what the tasks returned
        return values_of(tasks, results)

    def _results(self, tasks: Sequence[Task], rendezvous_slot: RendezvousSlot) -> list[TaskResult]:
        # A child that was forked in a step trains with threads of its own.
        if self._process != os.getpid():  # a fork takes no threads along
            self._threads.clear()
            self._inboxes.clear()
        if not self._threads:
            self.start()
        lanes = [self._lane_of[task.replica] for task in tasks]
        # Of two tasks in one lane the second begins when the first has ended: it cannot be met.
        oversubscribed = ""
        if len(set(lanes)) < len(lanes):
            oversubscribed = "several replicas take turns in the thread of one device"
        rendezvous_slot.meeting = meeting = Rendezvous(len(tasks), refusal=oversubscribed, deadline=self._deadline)
        context = CallerContext.capture([task.device for task in tasks])
        results = [TaskResult() for _ in tasks]
        running = {index: RunningTask() for index in range(len(tasks))}
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()

        # A function that makes them, as each keeps the index and the task of its own round.
        def job(index: int, task: Task, variables: contextvars.Context) -> Callable[[], None]:
            def perform() -> None:
                running[index].begin()
                try:
                    results[index] = variables.run(attempt_in, context, task)
                finally:
                    # Also after an error: who waits in the meeting for this task is told so.
                    meeting.end(index)
                    running[index].end()
                    finished.put(index)

            return perform

        try:
            for index, task in enumerate(tasks):
                self._inboxes[self._lane_of[task.replica]].put(job(index, task, contextvars.copy_context()))
            late = self._await(tasks, finished)
        # It comes to the calling thread alone; the lanes would go on in the user's module.
        except BaseException:  # Ctrl-C
            self._abandon(tasks, running, rendezvous_slot)
            raise
        if late:
            self._abandon(tasks, running, rendezvous_slot)
        for index, error in late.items():
            results[index] = TaskResult(error=error, is_late=True)
        return results

    def _await(self, tasks: Sequence[Task], finished: "queue.SimpleQueue[int]") -> dict[int, CollectiveError]:
        """Waits for the tasks; those that do not end before the deadline, each with the same error."""
        end = math.inf if self._deadline is None else time.monotonic() + self._deadline
        waiting = dict(enumerate(tasks))
        while waiting:
            left = end - time.monotonic()
            try:
                del waiting[finished.get(timeout=max(0.0, min(left, WAIT_SECONDS)))]
            except queue.Empty:
                if left <= 0:
                    return dict.fromkeys(waiting, too_late(list(waiting.values()), self._deadline, self._threads))
        return {}

    def _abandon(
        self, tasks: Sequence[Task], running: "dict[int, RunningTask]", rendezvous_slot: RendezvousSlot
    ) -> None:
        """This run is given up: its lanes end, those in the middle of a task as soon as they can."""
        rendezvous_slot.abandoned = True
        rendezvous_slot.meeting.abandon()
        _end(self._inboxes)
        threads = self._threads
        # The next run makes new lanes with new inboxes; the old ones get no more jobs.
        self._threads = []
        give_up(tasks, running)
        busy = {self._lane_of[tasks[index].replica] for index, task in running.items() if task.goes_on}
        for lane, thread in enumerate(threads):
            if lane not in busy:
                thread.join()

    def close(self) -> None:
        # Joined, so that no thread of a run that ended well is alive when the interpreter ends.
        _end(self._inboxes)
        for thread in self._threads:
            thread.join()
        self._threads = []


def _end(inboxes: "list[queue.SimpleQueue[Callable[[], None] | None]]") -> None:
    for inbox in inboxes:
        inbox.put(None)
    inboxes.clear()


def _serve(
    inbox: "queue.SimpleQueue[Callable[[], None] | None]",
    ready: "queue.SimpleQueue[None]",
    intra_op_threads: int | None,
) -> None:
    # Lanes of the host share out its cores. With 4 lanes and torch's own 4 threads for each, a step
    # took 37 ms and 6,300 context switches instead of 19 ms.
    if intra_op_threads is not None:
        torch.get_num_threads()  # initializes this thread; left to the first operator, that would undo the next line
        torch.set_num_threads(intra_op_threads)
    ready.put(None)
    try:
        while (job := inbox.get()) is not None:
            job()
            del job  # while the lane waits, it must not hold what a step allocated
    except StepAbandoned:  # this run is given up, and its lanes with it
        return
