"""A step that the host has no room for is stopped while there is some left; no process is ended for these tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.devices import HostRoom
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.execute.whole_call_replays import WholeCallReplay
from lightning_dpx.memory.profile.call_course import CallCourse
from lightning_dpx.memory.profile.costs import CostModel, WatchedReplay
from lightning_dpx.memory.profile.profiler import profile_step
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.python_objects.leave_no_trace import BeforeWrites, CopyOnWrite
from lightning_dpx.torch_compat import FakeTensorMode

MIB = 2**20


class Host:
    """One that has less and less left, as it is asked."""

    def __init__(self, *left: int) -> None:
        self._left: Iterator[int] = iter(left)
        self.num_looks: int = 0

    def left(self) -> int:
        self.num_looks += 1
        return next(self._left)


def test_what_is_left_is_looked_at_after_each_eighth_of_it() -> None:
    host = Host(800, 400, 200)
    room = HostRoom(host.left)
    room.take(60)
    room.take(40)
    assert host.num_looks == 1, "an eighth of 800 cannot have used up the rest"
    room.take(1)
    assert host.num_looks == 2
    room.take(50)
    assert host.num_looks == 2
    room.take(1)
    assert host.num_looks == 3


def test_a_step_stops_before_another_operator_of_its_size_would_not_fit() -> None:
    room = HostRoom(Host(64 * MIB, 21 * MIB, 19 * MIB).left)
    room.take(10 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"19.* MiB left of 64.* MiB.* takes 10.* MiB: the step is"):
        room.take(10 * MIB)


def test_a_host_that_is_nearly_full_has_room_for_a_small_step() -> None:
    host = Host(MIB, MIB // 2)
    room = HostRoom(host.left)
    for _ in range(150):
        room.take(MIB // 1000)
    assert host.num_looks == 2


def test_only_what_an_operator_has_made_takes_room() -> None:
    taken: list[int] = []
    base = torch.zeros(4, 4)
    with BeforeWrites(CopyOnWrite(()), taken.append):
        base.t()
        base.add_(1)
        base.expand(1000, 4, 4)
        base.clone()
        base.max(0)
    assert taken == [64, 16 + 32]


class NearlyFull(CostModel):
    """Measures on a host that has ``left`` bytes before the runs to come, and nothing when it is looked at again."""

    def __init__(self, *left: int) -> None:
        super().__init__(torch.device("cpu"))
        self._before_runs = iter(left)

    def room_for_step(self) -> HostRoom:
        return HostRoom(Host(next(self._before_runs), 0).left)


@pytest.mark.parametrize("roomy_runs", [0, 2, 3])
def test_a_profile_stops_in_whichever_run_does_not_fit_and_leaves_nothing(roomy_runs: int) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 64))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    inputs = torch.randn(256, 64)
    costs = NearlyFull(*[1000 * MIB] * roomy_runs, *[MIB // 4] * 8)
    with pytest.raises(torch.OutOfMemoryError, match="before the system would end the process"):
        profile_step(module, lambda: module(inputs).square().mean(), torch.device("cpu"), costs=costs)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in module.parameters())


class FullInTrials(CostModel):
    """Measures on a host that has nothing left while a call of the step is made again."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._left = MIB // 4

    def room_for_step(self) -> HostRoom:
        return HostRoom(lambda: self._left)

    def watched_replay(self, replay: WholeCallReplay) -> WatchedReplay:
        self._left = 0
        try:
            return super().watched_replay(replay)
        finally:
            self._left = MIB // 4

    def course_of(self, call: Value) -> CallCourse:
        self._left = 0
        try:
            return super().course_of(call)
        finally:
            self._left = MIB // 4


class Opaque(torch.autograd.Function):
    """Has no recipe: what it saves comes from the call that saves it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        result = rows.sin()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.saved_tensors[0]


class Curve(nn.Module):
    """Its only value comes from a call that is made again."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        curve: torch.Tensor = Opaque.apply(rows * 2)
        return curve


def layer() -> nn.Sequential:
    """It saves enough to be worth a replay as a whole."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))


@pytest.mark.parametrize("part", [layer, Curve])
def test_a_trial_that_the_host_has_no_room_for_stops_the_profile(part: Callable[[], nn.Module]) -> None:
    module = nn.Sequential(*(part() for _ in range(3)))
    inputs = torch.randn(256, 64, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError, match="before the system would end the process"):
        profile_step(module, lambda: module(inputs).square().mean(), torch.device("cpu"), costs=FullInTrials())


def test_tensors_without_memory_take_no_room() -> None:
    taken: list[int] = []
    with BeforeWrites(CopyOnWrite(()), taken.append):
        torch.empty(10**12, device="meta").add(1)
        with FakeTensorMode():
            torch.ones(10**9).max(0)
    assert set(taken) <= {0}
    trace = MemoryTrace(torch.device("cpu"), makes=taken.append)
    with FakeTensorMode():
        fake = torch.ones(10**9)
    with trace:
        fake.max(0)
    assert set(taken) <= {0}
