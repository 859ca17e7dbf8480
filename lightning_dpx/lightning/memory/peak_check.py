"""What a planned step took, beside what was predicted of it: said once, where it was more."""

from collections.abc import Callable, Iterable

import torch

from lightning_dpx.devices import allocated_and_peak, is_host, reset_peak_memory
from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.units import format_mib

_CHECKED_STEP = 2  # the first would be judged with an optimizer state that is still to come
_TOLERANCE = 0.05  # of a predicted peak
_UNNOTICED = 2**18  # bytes: small things that come while activations go


class PeakCheck:
    """Measures one step after every new plan.

    Attributes:
        passing: By device, bytes beside activations that come in a backward: gradients, and what passes with them.
    """

    def __init__(self) -> None:
        self.passing: dict[torch.device, int] = {}
        self._before: dict[torch.device, int] = {}
        self._num_steps = 0

    def restart(self) -> None:
        """There is a new plan, or none."""
        self._before = {}
        self._num_steps = 0

    def begin_step(self, devices: Iterable[torch.device]) -> None:
        """A step begins that follows plans on these devices."""
        self._num_steps += 1
        if self._num_steps != _CHECKED_STEP:
            return
        # The host is left out: it has the resident memory of the process only, not what its tensors take.
        self._before = {device: allocated_and_peak(device)[0] for device in devices if not is_host(device)}
        for device in self._before:
            reset_peak_memory(device)

    def end_backward(self, predicted: Callable[[torch.device], int]) -> None:
        """Compares what the step took with what was ``predicted`` of activations, in bytes."""
        for device, before in self._before.items():
            present, peak = allocated_and_peak(device)
            expected = predicted(device)
            taken = peak - before
            # What is planned for apart may have been there at the peak, where another device was ahead of this one.
            unnoticed = max(present - before, _UNNOTICED + self.passing.get(device, 0))
            if expected and taken > expected * (1 + _TOLERANCE) + unnoticed:
                rank_zero_warn(
                    f"dpx: the activations on {device} took {format_mib(taken)} where {format_mib(expected)} was "
                    "predicted: operators that need much memory inside, or other work on the device."
                )
        self._before = {}
