"""What one more micro-batch costs beside its own forward and backward: running it as a replica's step, adding it up.

It is measured once in a process, on a module whose step costs next to nothing: the time of many micro-batches less that
of few, and less that of as many steps by hand. Where operators run beside Python, as on accelerators, such time is
hidden and does not count.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from lightning_dpx.group import ReplicaGroup
from lightning_dpx.memory.profile import timing_effort

_FEW = 2
_MANY = 16
_ROUNDS = 15
_WARM = 2


class _Mean(nn.Module):
    """A loss of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).mean()


def seconds_of_a_micro_batch(device: torch.device) -> float:
    """Seconds of processor time for one more micro-batch, beside its operators on ``device``."""
    # An accelerator computes while Python goes on, so this time is hidden there.
    if device.type == "cpu":
        return _on_the_host()
    return 0.0


@cache
def _on_the_host() -> float:
    # Named, as the default device may be another: torch.set_default_device, or
    # a context around the step.
    rows = torch.ones(_MANY, 1, device="cpu")
    # Steps need gradients, whatever mode the caller is in, and the generator of
    # the run must not advance.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        ours = _seconds_in_group(rows, _MANY) - _seconds_in_group(rows, _FEW)
        by_hand = _seconds(partial(_by_hand, _Mean(), rows, _MANY)) - _seconds(partial(_by_hand, _Mean(), rows, _FEW))
    # Differences, so that what a step costs once is in neither; timing noise may
    # make a small one negative.
    return max(0.0, ours - by_hand) / (_MANY - _FEW)


def _seconds_in_group(rows: Tensor, number: int) -> float:
    group = ReplicaGroup(_Mean(), ["cpu"], micro_batches=number, execution="inline")
    try:
        return _seconds(lambda: group.forward_backward(rows))
    finally:
        group.close()


def _by_hand(module: nn.Module, rows: Tensor, number: int) -> None:
    for part in rows.chunk(number):
        (module(part) / number).backward()


def _seconds(run: Callable[[], object]) -> float:
    return timing_effort.least_seconds(run, _ROUNDS, _WARM)
