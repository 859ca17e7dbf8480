"""Tasks that their caller stops waiting for, after Ctrl-C or a deadline, and how they are kept from doing harm.

Such a task would go on in the user's module: log, write buffers, add gradients to those of the next fit. So it is
given a moment to end by itself; then :class:`StepAbandoned` is raised in its thread, which ends it before its next
line of Python; and what outlasts that too, an operator or a backward in C++, finds no parameter to leave a gradient in.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_dpx.torch_compat import current_graph_task_id

GRACE_SECONDS = 0.2  # for a step that is about to end; an exception in the middle of it is the rougher way
BOUND_SECONDS = 0.8  # for all of it: Ctrl-C must end a fit within two seconds
_AGAIN_SECONDS = 0.05  # a finalizer that runs at that moment swallows the exception, so it is raised again
# The signal that a thread has an exception to raise is of the whole interpreter, and stays until that thread raises it.
# Until then Python 3.11 does not get beyond the beginning of a function that is traced or profiled, in any thread.
_SIGNAL_STOPS_TRACING = sys.version_info < (3, 12)
_MOMENT = range(100)  # turns of a loop, in each of which Python looks for what is to be raised


class StepAbandoned(BaseException):
    """Raised in the thread of a task that is abandoned; user code that catches ``Exception`` does not stop it."""


class RunningTask:
    """Knows which thread a task runs in, so that it can be stopped there and nowhere else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._stopped = False
        self._over = threading.Event()

    def begin(self) -> None:
        """The calling thread begins the task.

        Raises:
            StepAbandoned: it was stopped before it began.
        """
        with self._lock:
            if self._stopped:
                raise StepAbandoned
            self._thread = threading.get_ident()

    def end(self) -> None:
        """The task is over."""
        with self._lock:
            self._thread = None
        self._over.set()

    def stop(self) -> None:
        """The task does not begin, or ends before its next line of Python."""
        with self._lock:
            self._stopped = True
            if self._thread is None:
                return
            # Python's own way to end a thread: the exception comes before its next line of Python.
            # With the lock held, or the thread might be in its next task by then.
            thread = ctypes.c_ulong(self._thread)
            caller = ctypes.c_ulong(threading.get_ident())
            raised = ctypes.py_object(StepAbandoned)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, raised)
            # From here on no function may be called before the signal is gone. An exception of the calling thread's own
            # takes it away; the other thread gives it anew as soon as it is to run, so it still ends there.
            if _SIGNAL_STOPS_TRACING:
                try:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(caller, raised)
                    for _ in _MOMENT:
                        pass
                except StepAbandoned:
                    return
                except BaseException:
                    # Ctrl-C came before it, and it is not to be raised later.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(caller, None)
                    raise

    @property
    def goes_on(self) -> bool:
        """Whether a thread is in the task."""
        return self._thread is not None and not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the task has ended."""
        return self._over.is_set()

    def wait(self, seconds: float) -> None:
        """Waits until the task is over, but no longer than ``seconds``."""
        self._over.wait(max(0.0, seconds))


def stop_tasks(running: Sequence[RunningTask]) -> None:
    """Waits for the tasks a moment, then stops them; comes back when all are over, or after ``BOUND_SECONDS``.

    A second Ctrl-C ends the waiting, not the stopping.
    """
    begun = time.monotonic()
    try:
        # A step that is about to end does so in this time, and nothing is torn apart.
        for task in running:
            if task.goes_on:
                task.wait(begun + GRACE_SECONDS - time.monotonic())
        for task in running:
            task.stop()
        while (late := [task for task in running if task.goes_on]) and time.monotonic() < begun + BOUND_SECONDS:
            late[0].wait(_AGAIN_SECONDS)
            for task in late:
                task.stop()
    except KeyboardInterrupt:
        for task in running:
            task.stop()


def keep_gradients_out(parameters: Iterable[torch.Tensor]) -> None:
    """A backward that has begun by now leaves no gradient in ``parameters``: it ends at the first of them.

    Later ones do. The hook goes with the graph of the abandoned step, where nothing else holds it.
    """
    # The engine numbers its backwards as they begin: what is not newer than this was under way.
    newest = _newest_backward()

    def refuse(_gradients: Any) -> None:
        if current_graph_task_id() <= newest:
            raise StepAbandoned

    with torch.inference_mode(False), torch.enable_grad():
        for parameter in parameters:
            if parameter.requires_grad:
                torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(refuse)


def _newest_backward() -> int:
    """The engine numbers its backwards; this one is of a single number, in the calling thread."""
    numbers: list[int] = []

    def note(_gradient: torch.Tensor) -> None:
        numbers.append(current_graph_task_id())

    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.zeros((), device="cpu", requires_grad=True)
        probe.register_hook(note)  # type: ignore[no-untyped-call]
        torch.autograd.backward(probe)
    return numbers[0]
