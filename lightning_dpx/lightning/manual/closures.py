"""One call of ``optimizer.step(closure)`` for all replicas, whose closure is that of every replica.

An optimizer may call its closure never, once or many times (LBFGS, line searches, sharpness-aware minimization). The
real optimizer therefore steps in a thread of its own, which waits in its closure until all replicas have run theirs::

    replica 0   step(closure) --+--> run own closure --+--> run own closure --+--> result
    replica 1   step(closure) --+--> run own closure --+--> run own closure --+--> result
    optimizer                   +--- closure() waits --+--- closure() waits --+ done

The replicas meet at every ``+``; what happens between two meetings is up to the optimizer.
"""

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from lightning_dpx.devices import device_context
from lightning_dpx.python_objects.compiled import untraced
from lightning_dpx.replicas import CallerContext


@dataclass(frozen=True, slots=True)
class RunClosure:
    """Every replica is to run its closure and to come back with what that returned.

    Attributes:
        rounds: To which the answer goes.
        grad_enabled: Whether the optimizer called its closure with gradients enabled.
    """

    rounds: "ClosureRounds"
    grad_enabled: bool


@dataclass(frozen=True, slots=True)
class StepDone:
    """The optimizer has stepped.

    Attributes:
        result: What ``optimizer.step`` returned.
    """

    result: Any


Command = RunClosure | StepDone  # what an optimizer tells the replicas


# No Exception, which an optimizer might catch round its closure.
class AbandonedStep(BaseException):
    """Unwinds an optimizer whose replicas have failed; it is not seen outside of this file."""


class ClosureRounds:
    """Runs ``take_step(closure)`` in a thread and hands its calls of the closure over, one at a time.

    Args:
        take_step: Steps the real optimizer with the closure that it is given.
        device: The device that is current in the thread.
    """

    def __init__(self, take_step: Callable[[Callable[[], Any]], Any], device: torch.device) -> None:
        self._take_step = take_step
        self._device = device
        self._commands: SimpleQueue[Command | BaseException] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._is_over = False
        # Grad mode, autocast and the like belong to a thread: the optimizer must find those of its caller.
        self._caller = CallerContext.capture()
        # A thread begins with an empty context; the optimizer must see the variables of its caller.
        variables = contextvars.copy_context()
        # A daemon, so that an optimizer that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=variables.run, args=(self._run,), name="dpx-optimizer", daemon=True)

    def begin(self) -> Command:
        """Starts the optimizer's step; returns what it wants first.

        Raises:
            BaseException: the optimizer failed; its own error.
        """
        self._thread.start()
        return self._next()

    def answer(self, value: Any) -> Command:
        """Hands over what the closure returned; returns what the optimizer wants next.

        Raises:
            BaseException: the optimizer failed; its own error.
        """
        self._answers.put(value)
        return self._next()

    def abandon(self) -> None:
        """A replica has failed: the optimizer's call of its closure never returns."""
        if not self._is_over:
            self._is_over = True
            # Raised from the closure, it ends the optimizer's step where it is, and its
            # thread with it.
            self._answers.put(AbandonedStep())
            self._thread.join()

    def _next(self) -> Command:
        command = self._commands.get()
        if isinstance(command, RunClosure):
            return command
        self._is_over = True
        # It was the last word of the optimizer: nothing of it may run beside what the
        # replicas do next.
        self._thread.join()
        if isinstance(command, BaseException):
            raise command
        return command

    def _run(self) -> None:
        with self._caller.entered(), device_context(self._device):
            try:
                # Where the optimizer's step is compiled, its compiler would follow the waiting as well.
                result = self._take_step(untraced(self._closure))
            # The replica that failed raises its own error.
            except AbandonedStep:
                return
            except BaseException as error:  # noqa: BLE001  it is raised where the replicas meet
                self._commands.put(error)
                return
            self._commands.put(StepDone(result))

    def _closure(self) -> Any:
        # The optimizer's thread cannot run the closures: each belongs to its replica's own thread.
        self._commands.put(RunClosure(self, torch.is_grad_enabled()))
        answer = self._answers.get()
        if isinstance(answer, AbandonedStep):
            raise answer
        return answer
