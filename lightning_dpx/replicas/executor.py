"""Where replicas run: an :class:`Executor` runs one task for each, in the calling thread or in threads of its own.

A task that fails never leaves the others behind: all are awaited, then the first error (lowest replica) is raised as
the original object, with a note that says where it happened.
"""

import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from lightning_dpx.devices import device_context
from lightning_dpx.errors import CollectiveError, describe_error
from lightning_dpx.replicas.abandonment import RunningTask, stop_tasks
from lightning_dpx.replicas.context import RendezvousSlot
from lightning_dpx.replicas.error_notes import note_replica


def _nothing() -> None:
    """Cuts no ties, for a task that has none."""


@dataclass(slots=True, eq=False)  # not frozen: K are made in every stage of a step, and that would cost them 3 us each
class Task:
    """One call for one replica.

    Attributes:
        replica: Whose.
        device: Where.
        stage: What it is a part of, for messages.
        call: The task itself.
        before: Called first, where another task had its turn just before.
        cut_ties: Called where the task goes on although its caller has stopped waiting for it and it was stopped.
    """

    replica: int
    device: torch.device
    stage: str
    call: Callable[..., Any]
    cut_ties: Callable[[], None] = _nothing
    before: Callable[[], None] | None = None

    def attempt(self) -> "TaskResult":
        """What the call returns or raises, on the task's device."""
        try:
            with device_context(self.device):
                return TaskResult(value=self.call())
        except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt must reach the caller too
            return TaskResult(error=error)


@dataclass(slots=True)
class TaskResult:
    """What a task returned or raised."""

    value: Any = None
    error: BaseException | None = None
    is_late: bool = False  # it was given up beyond the deadline, so it is what others have waited for


class Executor(ABC):
    """Runs one task per active replica and returns their values in task order."""

    @abstractmethod
    def run(self, tasks: Sequence[Task], rendezvous_slot: RendezvousSlot | None = None) -> list[Any]:
        """The values of ``tasks``; all have ended when this returns or raises.

        Args:
            tasks: One per participant; their order gives the ranks.
            rendezvous_slot: Gets the meeting of this run; and keeps it, if the run is abandoned.

        Raises:
            BaseException: the error of the first failed task, the same object, with notes. A failure comes before the
                complaints of those that waited for the one that failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the workers; another run starts them again."""


def values_of(tasks: Sequence[Task], results: list[TaskResult]) -> list[Any]:
    """What the tasks returned.

    Raises:
        BaseException: the error of the first failed one.
    """
    # The usual run, without a list of errors: this is a part of every stage of a step.
    for result in results:
        if result.error is not None:
            break
    else:
        return [result.value for result in results]
    try:
        raise _first_error(tasks, results)
    finally:
        del results, result  # the traceback of an error holds this frame, and through it all that replicas made


def _first_error(tasks: Sequence[Task], results: Sequence[TaskResult]) -> BaseException:
    """The lowest replica's error, with notes; errors of those that only waited come last."""
    failed: list[tuple[bool, Task, BaseException]] = []
    for task, result in zip(tasks, results, strict=True):
        if result.error is not None:
            # Those that meet may give up just before a late one is given up, which alone knows where it is.
            only_waited = isinstance(result.error, CollectiveError) and not result.is_late
            failed.append((only_waited, task, result.error))
    # The sort is stable: causes before those that waited for them, each in the order of replicas.
    failed.sort(key=itemgetter(0))
    _, first, error = failed[0]
    note_replica(error, first.replica, first.device, first.stage)
    for _, task, other in failed[1:]:
        if other is not error:  # one that was raised where they met
            error.add_note(f"Replica {task.replica} on {task.device} failed too: {describe_error(other)}")
    return error


def too_late(tasks: Sequence[Task], deadline: float | None, threads: Sequence[threading.Thread]) -> CollectiveError:
    """These tasks did not end in time; with the stacks of all threads."""
    who = ", ".join(f"replica {task.replica} on {task.device}" for task in tasks)
    error = CollectiveError(f"The {tasks[0].stage} of {who} did not end within {deadline:g} s.")
    # Where each thread is tells what it waits for, as no message could.
    frames = sys._current_frames()
    seen = [(thread.name, frames.get(thread.ident or 0)) for thread in threads]
    error.add_note("\n".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in seen if frame))
    return error


def give_up(tasks: Sequence[Task], running: "dict[int, RunningTask]") -> None:
    """Stops the tasks that run, and cuts the ties of those that go on all the same."""
    stop_tasks(list(running.values()))
    # Python cannot end what is inside of an operator: a backward in C++, say, goes on to the gradients of the
    # user's parameters, which may belong to another fit by then.
    for index, task in running.items():
        if task.goes_on:
            tasks[index].cut_ties()
