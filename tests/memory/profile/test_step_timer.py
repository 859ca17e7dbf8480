"""Steps are timed at one state, and the least of several counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import pytest
import torch

from lightning_dpx.devices import clock_of
from lightning_dpx.memory.profile import step_timer, timing_effort
from lightning_dpx.memory.profile.step_timer import StepTimer
from lightning_dpx.python_objects.gc_pause import COLLECTOR
from tests.conftest import SIMULATED, sim_device

CPU = torch.device("cpu")


def test_every_step_is_put_back_and_backward_gets_what_forward_returned() -> None:
    log: list[object] = []

    @contextmanager
    def alone(*, watches: bool) -> Iterator[None]:
        log.append(f"alone, watched {watches}")
        yield
        log.append("put back")

    timer = StepTimer(CPU, alone)
    loss = torch.ones(1)

    def forward() -> torch.Tensor:
        sum(range(1000))
        log.append("forward")
        return loss

    whole, first_part = timer.timed(forward, lambda result: log.append(result is loss))
    assert 0 < first_part <= whole
    assert log == ["alone, watched True", "forward", True, "put back"]
    assert not timer.watches, "nothing was seen that must be watched"


def test_what_the_device_still_has_to_do_is_no_time_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    @contextmanager
    def alone(*, watches: bool) -> Iterator[None]:
        yield

    def takes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(step_timer, "clock_of", lambda device: lambda: now[0])
    monkeypatch.setattr(step_timer, "synchronize", lambda device: takes(8.0))
    timer = StepTimer(CPU, alone)

    def forward() -> torch.Tensor:
        takes(2.0)
        return torch.ones(1)

    assert timer.timed(forward, lambda result: takes(1.0)) == (2 + 8 + 1 + 8, 2 + 8)
    assert timer.queued == 2 + 1
    timer.timed(forward, lambda result: takes(3.0))
    assert timer.queued == 2 + 1, "the least of all steps"


def test_the_first_step_does_not_count_and_long_ones_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timing_effort.VARIABLE, "full")

    @contextmanager
    def alone(*, watches: bool) -> Iterator[None]:
        yield

    calls: list[int] = []

    def forward() -> None:
        calls.append(1)

    least, forward_only = StepTimer(CPU, alone).least(forward, lambda result: None)
    assert len(calls) > 3, "short steps are taken several times, after one that fills caches"
    assert least == forward_only or least > 0
    assert clock_of(CPU)() >= 0


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_what_a_step_leaves_in_cycles_is_not_beside_the_next_one_on_an_accelerator() -> None:
    """Python's collector rests while a step is profiled, and a device may have room for one step's activations only."""

    class Kept:
        def __init__(self) -> None:
            self.itself = self

    there: WeakSet[Kept] = WeakSet()
    beside: list[int] = []

    @contextmanager
    def alone(*, watches: bool) -> Iterator[None]:
        yield

    def forward() -> None:
        beside.append(len(there))
        there.add(Kept())

    with COLLECTOR.resting():
        StepTimer(sim_device(0), alone).least(forward, lambda _: None)
    assert len(beside) > 1
    assert max(beside) == 0


class _Cycle:
    """Leads to itself, as a graph does that an object keeps."""

    def __init__(self) -> None:
        self.own = self


def test_without_room_for_what_steps_in_a_row_leave_in_cycles_each_is_cleaned_up_after() -> None:
    """On the host, where that is left to the next search otherwise."""

    @contextmanager
    def alone(*, watches: bool) -> Iterator[None]:
        yield

    left = WeakSet[_Cycle]()

    def forward() -> torch.Tensor:
        left.add(_Cycle())
        if len(left) > 1:
            raise torch.OutOfMemoryError("not enough memory")
        return torch.ones(1)

    timer = StepTimer(CPU, alone)
    with COLLECTOR.resting():
        assert timer.least(forward, lambda result: None)[0] > 0
        assert len(left) <= 1
