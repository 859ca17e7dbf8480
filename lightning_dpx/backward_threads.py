"""Autograd's threads when the interpreter ends.

Autograd has one thread per accelerator. It lets go of a graph a moment after ``backward`` has returned elsewhere, and
what Python has given to that graph (hooks, tensors, and always the context variables of the caller) needs the GIL to be
let go of. In an interpreter that is ending, Python up to 3.13 ends a thread that asks for the GIL, by force and out of
C++ that must not be left so: "terminate called without an active exception", and a run that ended well ends with
SIGABRT (pytorch/pytorch#190489).
"""

import atexit
import ctypes
from contextlib import suppress
from functools import cache

import torch

from lightning_dpx.devices import is_host


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
        _keep_forever([probe, result, gradient])
        # The engine itself: torch.autograd.backward gives every graph the caller's context variables (torch 2.11+).
        torch.autograd.Variable._execution_engine.run_backward(
            (result,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def _keep_forever(tensors: list[torch.Tensor]) -> None:
    """Not even an interpreter that clears its modules lets go of ``tensors``."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensors))
