"""How long a device works, by its own clock."""

import time

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.devices import Stopwatch, clock_of
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


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_the_clock_of_a_simulated_device_counts_where_it_counts_copies() -> None:
    device = sim_device(0)
    assert clock_of(device) is time.perf_counter
    assert clock_of(torch.device("cpu")) is time.thread_time
    try:
        dpx.simulate(8, link="5GB/s")
        clock = clock_of(device)
        before = clock()
        torch.ones(1000).to(device)
        assert clock() - before == pytest.approx(4000 / 5e9)
        again = clock()
        assert clock() == again, "nothing was done in between"
    finally:
        dpx.simulate(8)
