"""One monitor at a time sees the tensors that every submodule returns."""

from typing import Any

import torch
from torch import nn

from lightning_dpx.group.output_monitors import OutputMonitors
from lightning_dpx.replicas.replica import Replica


class Returns(nn.Module):
    """Returns a tensor in a dict, and a number."""

    def forward(self, rows: torch.Tensor) -> dict[str, Any]:
        return {"rows": rows + 1, "number": 3}


def test_another_monitor_takes_the_place_of_the_first_and_a_silent_one_sees_nothing() -> None:
    module = nn.Sequential(nn.Identity(), Returns())
    replicas = [Replica(2, torch.device("cpu"), module)]
    first: list[Any] = []
    second: list[Any] = []
    monitors = OutputMonitors()
    monitors.exchange(lambda *seen: first.append(seen[:2]), replicas)
    module(torch.zeros(1))
    assert first == [(2, "0"), (2, "1"), (2, "")], "numbers are no tensors"
    monitors.exchange(lambda *seen: second.append(float(seen[2])), replicas)
    monitors.are_silent = True
    module(torch.zeros(1))
    monitors.are_silent = False
    module(torch.zeros(1))
    monitors.exchange(None, replicas)
    module(torch.zeros(1))
    assert len(first) == 3
    assert second == [0, 1, 1]
