"""What a planned step took, beside what was predicted of it and what a budget allows: said once, where it was more."""

from collections.abc import Callable, Iterable

import torch

from lightning_dpx.devices import allocated_and_peak, is_host, reset_peak_memory
from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.powers import is_power_of_two
from lightning_dpx.units import format_mib

Forecast = Callable[[torch.device], tuple[int, int]]
_CHECKED_STEP = 2  # the first would be judged with an optimizer state that is still to come
_TOLERANCE = 0.05  # of a predicted peak
_UNNOTICED = 2**18  # bytes: small things that come while activations go
_ABOVE_LIMIT = 0.02  # of it
_SMALL = 2**16  # bytes: what an optimizer takes for one parameter of a small model


def is_worth_telling(taken: int, limit: int) -> bool:
    """Whether so many bytes are beyond a limit by more than what small models and roundings take."""
    return taken - limit > max(_ABOVE_LIMIT * limit, _SMALL)


class PeakCheck:
    """Measures one step after every new plan, and what all steps since have taken now and then, and before the next.

    Args:
        forecast: Bytes of activations on a device at their peak, and what its budget allows for everything.
        option: What has led to that budget, as a user writes it.

    Attributes:
        passing: By device, bytes beside activations that come in a backward: gradients, and what passes with them.
    """

    def __init__(self, forecast: Forecast, option: Callable[[], str] = lambda: "memory_budget") -> None:
        self._forecast = forecast
        self._option = option
        self.passing: dict[torch.device, int] = {}
        self._before: dict[torch.device, int] = {}
        self._measured: list[torch.device] = []
        self._warned: set[torch.device] = set()  # those of them of which something is told
        self._num_steps = 0
        self._num_updates = 0  # since then

    def end_plan(self) -> None:
        """There will be a new plan, or none: tells what steps have taken since the last look, and begins anew."""
        self._look()
        self._before = {}
        self._measured = []
        self._warned = set()
        self._num_steps = 0

    def note_told(self, devices: Iterable[torch.device]) -> None:
        """That these exceed their budgets is told already, and why."""
        self._warned.update(devices)

    def begin_step(self, devices: Iterable[torch.device]) -> None:
        """A step begins that follows plans on these devices."""
        self._num_steps += 1
        if self._num_steps != _CHECKED_STEP:
            return
        # The host is left out: it has the resident memory of the process only, not what its tensors take.
        self._before = {device: allocated_and_peak(device)[0] for device in devices if not is_host(device)}
        self._measured = list(self._before)
        self._num_updates = 0
        for device in self._before:
            reset_peak_memory(device)

    def end_update(self) -> None:
        """An optimizer has stepped: tells where more was there at a time than a budget allows, whatever it was."""
        self._num_updates += 1
        # After 1, 2, 4, 8, ... of them, as an allocator takes its time to answer.
        if is_power_of_two(self._num_updates):
            self._look()

    def _look(self) -> None:
        for device in self._measured:
            if device in self._warned:
                continue
            planned, limit = self._forecast(device)
            peak = allocated_and_peak(device)[1]
            if limit and is_worth_telling(peak, limit):
                self._warned.add(device)
                rank_zero_warn(
                    f"dpx: {format_mib(peak)} were allocated on {device} at a time in the last steps, where "
                    f"{self._option()} allows {format_mib(limit)}, of which {format_mib(planned)} are planned for "
                    "activations. What may take more: the step of the optimizer (least with fused=True or "
                    "foreach=False), steps that call more than the planned ones, checks of slices (none with "
                    "verify='off'), an evaluation, callbacks."
                )

    def end_backward(self) -> None:
        """Compares what the step took with what was predicted of its activations."""
        for device, before in self._before.items():
            present, peak = allocated_and_peak(device)
            expected, _ = self._forecast(device)
            taken = peak - before
            # What is planned for apart may have been there at the peak, where another device was ahead of this one.
            unnoticed = max(present - before, _UNNOTICED + self.passing.get(device, 0))
            if expected and taken > expected * (1 + _TOLERANCE) + unnoticed:
                self._warned.add(device)
                rank_zero_warn(
                    f"dpx: the activations on {device} took {format_mib(taken)} where {format_mib(expected)} was "
                    "predicted: operators that need much memory inside, a step that calls more than the planned ones, "
                    "or other work on the device."
                )
        self._before = {}
