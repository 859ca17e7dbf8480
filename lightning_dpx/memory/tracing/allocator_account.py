"""What operators allocate and free inside themselves, by the account of the device's own allocator.

A library that repacks a convolution's input, or a backward that needs room to sum, takes memory that no tensor of the
step ever shows. Only the allocator sees it. The account is taken round one operator at a time, in the thread that runs
it, and tells the most bytes that were there at once beyond those that were there before.

    host           every block that the CPU allocator gives out or takes back is reported to a profiler, in order.
                   torch's older profiler (``torch.autograd.profiler_legacy``) starts and stops in 8 us, so it can be
                   put round every operator; ``torch.profiler`` takes 0.1 s for that. What other threads of an operator
                   allocate is not reported, and what a library takes from malloc itself is in no account.
    accelerators   the peak of the allocator's own statistics, which begins anew at every operator.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch

from lightning_dpx.devices import allocated_and_peak, is_host, keeps_statistics, reset_peak_memory
from lightning_dpx.torch_compat import (
    DisableTorchDispatch,
    ProfilerConfig,
    end_legacy_profiler,
    has_legacy_profiler,
    profiler_is_enabled,
    start_legacy_profiler,
)

_profiler: Any = torch.autograd  # its names are not exported, and there is no other way to hear of blocks so cheaply


def account_of(device: torch.device) -> "Account":
    """What tells how much an operator on ``device`` takes."""
    if is_host(device):
        if HostAccount.is_there():
            return HostAccount()
        return Account()
    if device.type != "meta" and keeps_statistics(device):
        return PeakAccount(device)
    return Account()


def hidden_on(device: torch.device) -> str:
    """Why nothing can be told of operators on ``device`` now; empty if it can."""
    if device.type == "meta":
        return ""
    if not is_host(device):
        return "" if keeps_statistics(device) else f"torch tells no peaks of {device.type} devices"
    if not HostAccount.is_there():
        return "this version of torch reports no blocks of the CPU allocator"
    if _a_profiler_runs():
        return "a profiler that runs in this thread already hides it"
    return ""


def _a_profiler_runs() -> bool:
    running: bool = profiler_is_enabled()
    return running


class OperatorMemory(NamedTuple):
    """What an operator took.

    Attributes:
        most: Bytes at the most at once, beyond those that were there before.
        blocks: Bytes of each block, in order, negative where it was given back; empty where they are not known.
        stays: Bytes that are there at its end, beyond those that were there before.
    """

    most: int = 0
    blocks: Sequence[int] = ()
    stays: int = 0

    def until_each_stays(self) -> list[tuple[int, int]]:
        """For every block that is still there at the end, in order: its bytes, and the most bytes before it came.

        Of several blocks of one size those count as given back that came first, so that what stays came late: then
        the most before is never too low.
        """
        given_back = dict[int, int]()
        for size in self.blocks:
            if size < 0:
                given_back[-size] = given_back.get(-size, 0) + 1
        staying = list[tuple[int, int]]()
        most = 0
        for size, live in zip(self.blocks, accumulate(self.blocks), strict=True):
            if size > 0 and not given_back.get(size):
                staying.append((size, most))
            elif size > 0:
                given_back[size] -= 1
            most = max(most, live)
        return staying


class Account:
    """The account of an allocator that tells nothing."""

    def start(self) -> int:
        """An operator begins; what this returns belongs to :meth:`stop`."""
        return 0

    def stop(self, started: int) -> OperatorMemory:
        """Ends the account: what was taken since."""
        return OperatorMemory()


class HostAccount(Account):
    """The account of the CPU allocator, for the calling thread.

    Where a profiler runs in this thread already, nothing is told: there can only be one.
    """

    def __init__(self) -> None:
        # In order: shapes, memory, stacks, FLOPs, modules. Only memory is of use here.
        nothing = ProfilerConfig()
        self._config = _profiler.ProfilerConfig(_profiler.ProfilerState.CPU, False, True, False, False, False, nothing)

    @staticmethod
    def is_there() -> bool:
        """Whether this torch has the profiler."""
        return has_legacy_profiler()

    def start(self) -> int:
        """Starts counting; returns whether an account is kept."""
        if _a_profiler_runs():  # to start another one would end it
            return False
        start_legacy_profiler(self._config)
        return True

    def stop(self, started: int) -> OperatorMemory:
        """The operator's blocks, and the most bytes of them at once."""
        if not started:
            return OperatorMemory()
        # Every operator of a step comes here.
        blocks: list[int] = []
        for event in chain.from_iterable(end_legacy_profiler()):
            size = event.cpu_memory_usage()
            if size:  # events of other kinds have none
                blocks.append(size)
        return OperatorMemory(max(accumulate(blocks), default=0), blocks, sum(blocks))


class PeakAccount(Account):
    """The account of an accelerator's allocator, whose statistics lose their peak so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> int:
        """An operator begins; what is there already."""
        with DisableTorchDispatch():  # a device may be asked by an operator, which other traces would see
            reset_peak_memory(self._device)
            return allocated_and_peak(self._device)[0]

    def stop(self, started: int) -> OperatorMemory:
        """The peak of the statistics, beyond what was there before."""
        with DisableTorchDispatch():
            allocated, peak = allocated_and_peak(self._device)
            return OperatorMemory(max(0, peak - started), stays=allocated - started)
