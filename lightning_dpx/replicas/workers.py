"""Where replicas run: in the calling thread, or in persistent daemon threads with the caller's context.

Grad mode, inference mode, autocast, saved-tensor hooks and context variables are thread-local, so a worker re-enters
those of its caller for every task. A task that fails never leaves the others behind: all are awaited, then the first
error (lowest replica) is raised as the original object, with a note that says where it happened.
"""

import contextvars
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.devices import autocast_types, device_context
from lightning_dpx.errors import CollectiveError
from lightning_dpx.replicas.collectives import Meeting
from lightning_dpx.replicas.context import Venue
from lightning_dpx.replicas.error_notes import note_place


@dataclass(frozen=True, slots=True)
class Task:
    """One call for one replica."""

    replica: int
    device: torch.device
    stage: str
    call: Callable[[], Any]


@dataclass(slots=True)
class Outcome:
    """What a task returned or raised."""

    value: Any = None
    error: BaseException | None = None


class Executor(ABC):
    """Runs one task per active replica and returns their values in task order."""

    def run(self, tasks: Sequence[Task], venue: Venue | None = None) -> list[Any]:
        """The values of ``tasks``; all have ended when this returns or raises.

        Args:
            tasks: One per participant; their order gives the ranks.
            venue: Gets the meeting of this run.

        Raises:
            BaseException: the error of the first failed task, the same object, with notes. A failure comes before the
                complaints of those that waited for the one that failed.
        """
        venue = venue or Venue()
        try:
            outcomes = self._outcomes(tasks, venue)
        finally:
            venue.meeting = None  # it holds what the tasks returned
        if all(outcome.error is None for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        try:
            raise _first_error(tasks, outcomes)
        finally:
            del outcomes  # the traceback of an error holds this frame, and through it all that the replicas made

    @abstractmethod
    def _outcomes(self, tasks: Sequence[Task], venue: Venue) -> list[Outcome]:
        """Runs all tasks and catches whatever they raise."""

    @abstractmethod
    def close(self) -> None:
        """Ends the workers; the executor cannot run again."""


class InlineExecutor(Executor):
    """One task after the other in the calling thread: one random generator, one order, no waiting.

    Only a task that waits for the others in a meeting has them started in threads, and even then one runs at a time.

    Args:
        deadline: Seconds that a task may wait for the others; no limit unless given.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline

    def _outcomes(self, tasks: Sequence[Task], venue: Venue) -> list[Outcome]:
        outcomes = [Outcome() for _ in tasks]
        context, begun, threads = CallerContext.capture(), [False] * len(tasks), []
        variables = [contextvars.copy_context() for _ in tasks]

        def perform(index: int) -> None:
            meeting.begin(index)
            try:
                outcomes[index] = variables[index].run(_attempt_in, context, tasks[index])
            finally:
                meeting.end(index)

        def start_others() -> None:
            for index in range(len(tasks)):
                if not begun[index]:
                    begun[index] = True
                    threads.append(threading.Thread(target=perform, args=(index,), name="dpx-turn", daemon=True))
                    threads[-1].start()

        venue.meeting = meeting = Meeting(len(tasks), in_turns=True, start_others=start_others, deadline=self._deadline)
        for index, task in enumerate(tasks):
            if begun[index]:
                break
            begun[index] = True
            outcomes[index] = _attempt(task)
            meeting.end(index)
            if outcomes[index].error is not None and not threads:
                break
        interrupted = any(isinstance(one.error, KeyboardInterrupt) for one in outcomes)
        for thread in threads:
            thread.join(1.0 if interrupted else None)
        return outcomes

    def close(self) -> None:
        """Nothing to end."""


class ThreadedExecutor(Executor):
    """One persistent daemon thread per lane; tasks of one lane run in order.

    A lane that is left behind in the middle of a task, by Ctrl-C or by the deadline, is never waited for again.

    Args:
        lane_of: The lane (thread) of every replica: the physical device, or the replica itself where concurrency on
            one device was asked for.
        intra_op_threads: CPU threads of torch for each lane's own operators; ``None`` leaves torch's choice.
        deadline: Seconds that one run may take; no limit unless given.
    """

    def __init__(
        self, lane_of: Sequence[int], intra_op_threads: int | None = None, deadline: float | None = None
    ) -> None:
        self._lane_of, self._deadline = tuple(lane_of), deadline
        self._inboxes: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._threads_per_lane, self._process = intra_op_threads, os.getpid()
        self._abandoned = False
        weakref.finalize(self, _end, self._inboxes)  # whoever forgets to close it leaves no threads behind

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
        for _ in self._threads:
            ready.get()
        torch.set_num_threads(callers_threads)

    def _outcomes(self, tasks: Sequence[Task], venue: Venue) -> list[Outcome]:
        if self._process != os.getpid():  # a fork takes no threads along
            self._threads.clear()
            self._inboxes.clear()
        if not self._threads:
            self.start()
        lanes = [self._lane_of[task.replica] for task in tasks]
        crowded = "" if len(set(lanes)) == len(lanes) else "several replicas take turns in the thread of one device"
        venue.meeting = meeting = Meeting(len(tasks), refusal=crowded, deadline=self._deadline)
        context, outcomes = CallerContext.capture(), [Outcome() for _ in tasks]
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()

        def job(index: int, task: Task, variables: contextvars.Context) -> Callable[[], None]:
            def perform() -> None:
                try:
                    outcomes[index] = variables.run(_attempt_in, context, task)
                finally:
                    meeting.end(index)
                    finished.put(index)

            return perform

        for index, task in enumerate(tasks):
            self._inboxes[self._lane_of[task.replica]].put(job(index, task, contextvars.copy_context()))
        try:
            self._await(tasks, finished)
        except BaseException:  # Ctrl-C: whatever still runs, nobody waits for it any more
            self._abandoned = True
            meeting.abandon()
            raise
        return outcomes

    def _await(self, tasks: Sequence[Task], finished: "queue.SimpleQueue[int]") -> None:
        end = None if self._deadline is None else time.monotonic() + self._deadline
        waiting = dict(enumerate(tasks))
        while waiting:
            try:
                del waiting[finished.get(timeout=None if end is None else max(0.0, end - time.monotonic()))]
            except queue.Empty:
                who = ", ".join(f"replica {task.replica} on {task.device}" for task in waiting.values())
                stage = next(iter(waiting.values())).stage
                error = CollectiveError(f"The {stage} of {who} did not end within {self._deadline:g} s.")
                error.add_note(self._stacks())
                raise error from None

    def _stacks(self) -> str:
        frames = sys._current_frames()
        seen = [(thread.name, frames.get(thread.ident or 0)) for thread in self._threads]
        return "\n".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in seen if frame)

    def close(self) -> None:
        _end(self._inboxes)
        for thread in self._threads:
            if not self._abandoned:
                thread.join()
        self._threads = []


def _first_error(tasks: Sequence[Task], outcomes: Sequence[Outcome]) -> BaseException:
    """That of the lowest replica, with notes; one that only waited for a failed one comes after it."""
    failed = [(task, one.error) for task, one in zip(tasks, outcomes, strict=True) if one.error is not None]
    failed.sort(key=lambda item: isinstance(item[1], CollectiveError))
    first, error = failed[0]
    note_place(error, first.replica, first.device, first.stage)
    for task, other in failed[1:]:
        if other is not error:  # one that was raised where they met
            error.add_note(f"Replica {task.replica} on {task.device} failed too: {type(other).__name__}: {other}")
    return error


def _end(inboxes: "list[queue.SimpleQueue[Callable[[], None] | None]]") -> None:
    for inbox in inboxes:
        inbox.put(None)
    inboxes.clear()


def _serve(
    inbox: "queue.SimpleQueue[Callable[[], None] | None]",
    ready: "queue.SimpleQueue[None]",
    intra_op_threads: int | None,
) -> None:
    if intra_op_threads is not None:
        torch.get_num_threads()  # initialises this thread; left to the first operator, that would undo the next line
        torch.set_num_threads(intra_op_threads)
    ready.put(None)
    while (job := inbox.get()) is not None:
        job()
        del job  # while the lane waits, it must not hold what a step allocated


def _attempt(task: Task) -> Outcome:
    try:
        with device_context(task.device):
            return Outcome(value=task.call())
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt must reach the caller too
        return Outcome(error=error)


def _attempt_in(context: "CallerContext", task: Task) -> Outcome:
    with context.entered():
        return _attempt(task)


@dataclass(frozen=True, slots=True)
class CallerContext:
    """The thread-local state of torch in the calling thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    saved_tensor_hooks: Any

    @classmethod
    def capture(cls) -> "CallerContext":
        """The state as it is now, in this thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind)) for kind in autocast_types() if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            saved_tensor_hooks=torch._C._autograd._top_saved_tensors_default_hooks(True),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same state in the current thread, for a while."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            if self.saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
            yield
