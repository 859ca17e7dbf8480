"""How long a device works, by its own clock."""

import pytest
import torch

from lightning_dpx.devices import Stopwatch
from tests.conftest import SIMULATED, sim_device


def test_on_the_host_it_is_the_time_between_the_marks() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    assert watch.seconds() == 0, "work that never ended"
    sum(range(1000))
    watch.stop()
    assert watch.done
    assert watch.seconds() > 0


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")
def test_on_a_device_only_its_own_work_counts() -> None:
    rows = torch.ones(1000, device=sim_device(1))
    elsewhere = torch.ones(100_000, device=sim_device(2))
    watch, idle = Stopwatch(sim_device(1)), Stopwatch(sim_device(1))
    watch.start()
    rows.add_(1)
    watch.stop()
    idle.start()
    elsewhere.add_(1)
    idle.stop()
    assert watch.seconds() > 0
    assert idle.seconds() == 0
