"""Autograd's threads, when the interpreter ends and after a backward that failed.

Autograd has one thread per accelerator. It lets go of a graph a moment after ``backward`` has returned elsewhere, and
what Python has given to that graph (hooks, tensors, and always the context variables of the caller) needs the GIL to be
let go of. In an interpreter that is ending, Python up to 3.13 ends a thread that asks for the GIL, by force and out of
C++ that must not be left so: "terminate called without an active exception", and a run that ended well ends with
SIGABRT (pytorch/pytorch#190489).

After an error, ``backward`` returns while threads of other devices may still be in an operator of the same graph, and
what was queued holds the memory of the step until a thread comes to it.
"""

import atexit
import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.torch_compat import execution_engine


@cache
def finish_backward_at_exit(device: torch.device) -> None:
    """Has :func:`finish_backward` called for ``device`` when the interpreter ends; once per process.

    Args:
        device: An accelerator; nothing to do for the host, whose part of a backward runs in the thread that calls it.
    """
    if not is_host(device):
        atexit.register(finish_backward, device)


def finish_backward(device: torch.device) -> None:
    """Returns when autograd's thread of ``device`` has let go of all graphs of earlier backwards.

    The thread works in order, so one more backward there comes back after that. That one must not do the same harm: it
    takes nothing of Python along but three tensors, and Python keeps those for ever, so that the thread is never the
    last to let go of anything.

    Args:
        device: An accelerator. One that is full, lost, or not usable after a fork is left alone.
    """
    # Anomaly mode would give even the nodes of this graph something of Python.
    modes = torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False)
    with suppress(RuntimeError), modes[0], modes[1], modes[2]:
        probe = torch.ones((), device=device, requires_grad=True)
        result = probe * 1
        gradient = torch.ones((), device=device)
        # Before the backward: from then on the thread of the device may be the last to hold them.
        _keep_forever([probe, result, gradient])
        # The engine itself: torch.autograd.backward gives every graph the caller's context variables (torch 2.11+).
        execution_engine.run_backward(
            (result,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def end_failed_backward(devices: Sequence[torch.device], seconds: float) -> bool:
    """Waits until autograd's threads of ``devices`` run, and hold, nothing more of a backward that has failed.

    Args:
        devices: All that the backward may have used; the host is none of them.
        seconds: How long to wait at most: an operator may block for ever.

    Returns:
        Whether they have ended.
    """
    found = [device for device in devices if not is_host(device)]
    if not found:
        return True
    done = threading.Event()

    def pass_through() -> None:
        # Twice: an operator that ends after a thread was passed may hand its result on to that very thread.
        for device in (*found, *found):
            _pass_through(_probe_on(device))
        done.set()

    # Another thread waits in their queues, because the engine knows no deadline.
    helper = threading.Thread(target=pass_through, name="dpx-end-backward", daemon=True)
    helper.start()
    if not done.wait(seconds):
        return False
    helper.join()
    return True


def forget_failed_backward() -> None:
    """Lets go of what a failed backward has left in the queue of the calling thread, where the host's part of it runs.

    The next backward of this thread would do it, but it may never come.
    """
    _pass_through(_probe_on(torch.device("cpu")))


def _pass_through(probe: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """A backward that ends when the queue of its device is empty."""
    if probe is None:
        return
    result, gradient = probe
    with suppress(RuntimeError):  # the device is lost, or cannot be used after a fork
        # The graph is kept, as the probe is used again.
        execution_engine.run_backward(
            (result,), (gradient,), True, False, (), allow_unreachable=True, accumulate_grad=True
        )


@cache
def _probe_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """An empty tensor with a graph, and its gradient; ``None`` where the device cannot be used."""
    # Of the nodes in a queue the engine takes the one that was made last, by a count of each thread. A thread
    # of its own makes this one, so its count is the lowest, and it comes after all that was queued before.
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make() -> None:
        modes = torch.inference_mode(False), torch.enable_grad()
        with suppress(RuntimeError), modes[0], modes[1]:
            probe = torch.ones(0, device=device, requires_grad=True)
            made.append((probe * 1, torch.ones(0, device=device)))

    maker = threading.Thread(target=make, name="dpx-backward-probe")
    maker.start()
    maker.join()
    if not made:
        return None
    _keep_forever(list(made[0]))
    return made[0]


def _keep_forever(tensors: list[torch.Tensor]) -> None:
    """Not even an interpreter that clears its modules lets go of ``tensors``."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensors))
