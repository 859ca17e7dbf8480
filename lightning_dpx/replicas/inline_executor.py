"""Replicas one after the other in the calling thread; in threads, still one at a time, once they meet within a step."""

import contextvars
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_dpx.devices import chosen_streams
from lightning_dpx.errors import CollectiveError
from lightning_dpx.replicas.abandonment import RunningTask, StepAbandoned
from lightning_dpx.replicas.caller_context import CallerContext, attempt_in
from lightning_dpx.replicas.collectives import WAIT_SECONDS, Rendezvous
from lightning_dpx.replicas.context import NO_MEETING, RendezvousSlot
from lightning_dpx.replicas.executor import Executor, Task, TaskResult, give_up, too_late, values_of


class _Turns:
    """One run of an :class:`InlineExecutor`."""

    def __init__(self, tasks: Sequence[Task], deadline: float | None) -> None:
        self._tasks = tasks
        self._deadline = deadline
        self.results = [TaskResult() for _ in tasks]
        self.meeting = Rendezvous(
            len(tasks),
            in_turns=True,
            start_others=self._start_others,
            deadline=deadline,
            # Where turns are handed over the last task has a ``before``; the first one never has.
            on_turn=tasks[-1].before,
        )
        self.abandoned = False
        # For tasks that a meeting has started in threads.
        self._context = CallerContext.capture()
        self._variables = contextvars.copy_context()
        self._begun = [False] * len(tasks)
        self._threads: dict[int, tuple[threading.Thread, RunningTask]] = {}

    def begin(self, index: int) -> bool:
        """Whether the calling thread runs this task; a meeting may have started it, and those after it, elsewhere."""
        if self._begun[index]:
            return False
        self._begun[index] = True
        return True

    def end(self, index: int, result: TaskResult) -> bool:
        """The task has ended; whether the next one has its turn, which it has not after an error."""
        self.results[index] = result
        self.meeting.end(index)
        # After an error no task begins any more. In threads the others have begun already: whoever
        # waits in a meeting is told there.
        return result.error is None or bool(self._threads)

    def wait(self) -> None:
        """Waits for all tasks; those in threads are abandoned after Ctrl-C or the deadline."""
        errors = [result.error for result in self.results if result.error is not None]
        if not self._threads and not errors:  # as in nearly every step
            return
        interrupted = any(isinstance(error, KeyboardInterrupt) for error in errors)
        # Ctrl-C must end a fit within two seconds, so nobody is waited for.
        late = {} if interrupted or not self._threads else self._join()
        if interrupted or late:
            self.abandon()
        for index, error in late.items():
            self.results[index] = TaskResult(error=error, is_late=True)

    def _join(self) -> dict[int, CollectiveError]:
        """Waits for the threads; those that do not end before the deadline, each with the same error."""
        end = math.inf if self._deadline is None else time.monotonic() + self._deadline
        while running := {index: task for index, (_, task) in self._threads.items() if not task.is_over}:
            left = end - time.monotonic()
            if left <= 0:
                # One error for all that are late, which shows where every thread is.
                threads = [thread for thread, _ in self._threads.values()]
                return dict.fromkeys(
                    running, too_late([self._tasks[index] for index in running], self._deadline, threads)
                )
            # Ctrl-C is only heard between two waits, so none is long.
            next(iter(running.values())).wait(min(left, WAIT_SECONDS))
        for thread, _ in self._threads.values():
            thread.join()
        return {}

    def abandon(self) -> None:
        """Tasks that still run are given up."""
        self.abandoned = True
        self.meeting.abandon()
        give_up(self._tasks, {index: task for index, (_, task) in self._threads.items()})
        # A thread that goes on is in an operator, and may never come back from there.
        for thread, task in self._threads.values():
            if task.is_over:
                thread.join()

    def forget(self) -> None:
        """Lets go of what the tasks returned; the meeting and this object hold each other."""
        self.results = []
        del self.meeting

    def _start_others(self) -> None:
        # Asked now, as hardly any step comes here: the task that waits has the streams of its caller.
        streams = chosen_streams([task.device for task in self._tasks])
        self._context = replace(self._context, streams=streams)
        for index, begun in enumerate(self._begun):
            if not begun:
                self._begun[index] = True
                # A daemon, or after Ctrl-C the process would live until the step has ended.
                running = RunningTask()
                thread = threading.Thread(target=self._perform, args=(index, running), name="dpx-turn", daemon=True)
                self._threads[index] = thread, running
                thread.start()

    def _perform(self, index: int, running: RunningTask) -> None:
        try:
            self.meeting.begin(index)
            running.begin()
            # A copy for each: threads that wait in the meeting are all inside of theirs at once,
            # and Python enters a context only once at a time.
            self.results[index] = self._variables.copy().run(attempt_in, self._context, self._tasks[index])
        except StepAbandoned:
            # It was stopped before its first line; the run has an error without it.
            return
        finally:
            self.meeting.end(index)
            running.end()


class InlineExecutor(Executor):
    """One task after the other in the calling thread: one random generator, one order, no waiting.

    Only a task that waits for the others in a meeting has them started in threads, and even then one runs at a time.

    Args:
        deadline: Seconds that a task may wait for the others; no limit unless given.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline

    def run(self, tasks: Sequence[Task], rendezvous_slot: RendezvousSlot | None = None) -> list[Any]:
        """See :meth:`Executor.run`; in one frame, as each one here stands in the traceback of every user's error."""
        slot = rendezvous_slot or RendezvousSlot()
        turns = _Turns(tasks, self._deadline)
        slot.meeting = turns.meeting
        try:
            for index, task in enumerate(tasks):
                # A task that a meeting has started elsewhere has started all after it there, too.
                if not turns.begin(index) or not turns.end(index, task.attempt()):
                    break
            turns.wait()
        except BaseException:
            turns.abandon()
            raise
        finally:
            # What is left of an abandoned run must find its own meeting, which refuses it.
            slot.abandoned = turns.abandoned
            if not turns.abandoned:
                slot.meeting = NO_MEETING  # it holds what the tasks returned
        results = turns.results
        # What goes on of an abandoned run still needs the meeting, to be told that it is over.
        if not turns.abandoned:
            turns.forget()
        return values_of(tasks, results)

    def close(self) -> None:
        """Does nothing: there are no threads to end."""
