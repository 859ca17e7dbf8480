"""How long a device works."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_dpx.devices.identity import is_host, is_only_of_its_type


def is_modelled(device: torch.device) -> bool:
    """Whether seconds of ``device`` are those of a model of it, and no time that passes: it is simulated."""
    return device.type == "sim"


class ModelledRates(NamedTuple):
    """What a simulated device does in a second of its clock.

    Attributes:
        bytes: Of operands and results of operators.
        copied: Bytes from or to another device or the host; infinite where copies take no time.
        latency: Seconds until a copy begins.
    """

    bytes: float
    copied: float
    latency: float


def modelled_rates(device: torch.device) -> ModelledRates | None:
    """The rates by which the clock of ``device`` goes; nothing of a device whose time passes by itself."""
    # Only its name is there before the first device is simulated.
    if not is_modelled(device) or not hasattr(torch, device.type):
        return None
    module = torch.get_device_module(device)
    copied = module.link_bytes_per_second() or math.inf
    return ModelledRates(module.bytes_per_second(device), copied, module.link_latency())


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds that what runs there takes: processor time on the host, where others may be at work at that moment.

    Of this thread, because the others that share in its operators only work while it does. Of a simulated device, those
    of its own clock, if that counts copies as well: else a tensor in the host's memory would cost nothing there.
    """
    if is_host(device):
        return time.thread_time
    if counts_by_its_clock(device):
        return partial(_modelled_seconds, device)
    return time.perf_counter


def counts_by_its_clock(device: torch.device) -> bool:
    """Whether seconds of ``device`` are those of a model in which copies take time, each after what came before it."""
    rates = modelled_rates(device)
    return rates is not None and rates.copied < math.inf


def _modelled_seconds(device: torch.device) -> float:
    return float(torch.get_device_module(device).busy_seconds(device))


class Stopwatch:
    """How long a device works on what is queued between :meth:`start` and :meth:`stop`, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def start(self) -> None:
        """Sets a mark: the first one begins the work, and the second one, as ``stop``, ends it."""
        if is_host(self._device):
            self._marks.append(time.perf_counter())
        else:
            module = torch.get_device_module(self._device)
            # An event is a mark in the queue of the device: setting it waits for nothing.
            event = module.Event(enable_timing=True)
            if is_only_of_its_type(self._device):
                event.record()
            else:
                event.record(module.current_stream(self._device))
            self._marks.append(event)

    stop = start

    @property
    def done(self) -> bool:
        """Whether the device has passed both marks, or the work never ended."""
        return len(self._marks) < 2 or is_host(self._device) or bool(self._marks[1].query())

    def seconds(self) -> float:
        """Seconds of the device between both marks; 0 if the work never ended."""
        if len(self._marks) < 2:
            return 0.0
        if is_host(self._device):
            return float(self._marks[1] - self._marks[0])
        # Events tell milliseconds.
        return float(self._marks[0].elapsed_time(self._marks[1])) / 1e3
