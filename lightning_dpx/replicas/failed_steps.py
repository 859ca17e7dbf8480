"""A step that has failed: nothing of it goes on in other threads, or not for long."""

from collections.abc import Iterable

import torch
from torch import nn

from lightning_dpx.backward_threads import end_failed_backward, forget_failed_backward
from lightning_dpx.devices import distinct_devices
from lightning_dpx.replicas.abandonment import keep_gradients_out

_SECONDS_AFTER_ERROR = 10.0  # an operator of another device's backward may take: it is waited for
_SECONDS_AFTER_INTERRUPTION = 0.5  # Ctrl-C must end a fit within two seconds


def end_failed_step(
    modules: Iterable[nn.Module], devices: Iterable[torch.device] = (), *, interrupted: bool = False
) -> None:
    """After the error of a step nothing of it is running, or writing to a module; within a bound.

    Args:
        modules: The module, or its replicas.
        devices: Where they run, beside where their parameters are.
        interrupted: The error is Ctrl-C, or the step was abandoned.
    """
    forget_failed_backward()
    parameters: list[nn.Parameter] = []
    for module in modules:
        parameters += module.parameters()
    # Shifted parts have their parameters on other devices than their replica.
    places = distinct_devices([*devices, *(parameter.device for parameter in parameters)])
    seconds = _SECONDS_AFTER_INTERRUPTION if interrupted else _SECONDS_AFTER_ERROR
    # An operator may block for ever. What comes after it finds no parameter to write to.
    if not end_failed_backward(places, seconds):
        keep_gradients_out(parameters)
