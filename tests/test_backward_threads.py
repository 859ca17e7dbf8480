"""Autograd's thread of a device has let go of everything when the interpreter ends."""

import contextvars
import threading
from typing import Any

import pytest
import torch

from lightning_dpx.backward_threads import (
    end_failed_backward,
    finish_backward,
    finish_backward_at_exit,
    forget_failed_backward,
)

Events = list[str]
held: contextvars.ContextVar[object] = contextvars.ContextVar("held")


class LetGo:
    """Takes its time to go: until the thread that waits for it says so."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __del__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        self.events.append(f"gone, in the main thread: {threading.current_thread() is threading.main_thread()}")


def backward_that_holds(value: LetGo) -> None:
    """A graph holds the context variables of its backward, and nothing else holds these."""
    context = contextvars.copy_context()
    context.run(held.set, value)
    rows = torch.ones(3, device="sim:1", requires_grad=True)
    context.run(torch.autograd.backward, (rows * 2).sum())


@pytest.mark.usefixtures("sim")
def test_it_returns_when_the_thread_has_let_go_of_earlier_graphs() -> None:
    events: Events = []
    value = LetGo(events)
    begun, may_end = value.begun, value.may_end
    helper = threading.Thread(target=lambda: begun.wait(60) and may_end.set())
    helper.start()
    backward_that_holds(value)
    del value  # if the graph has gone already, here
    finish_backward(torch.device("sim:1"))
    assert len(events) == 1
    helper.join()


@pytest.mark.usefixtures("sim")
def test_modes_that_the_program_left_on_change_nothing() -> None:
    with torch.autograd.set_detect_anomaly(True), torch.inference_mode():
        finish_backward(torch.device("sim:0"))
        assert torch.is_anomaly_enabled()
        assert torch.is_inference_mode_enabled()


def test_the_host_has_no_such_thread_and_a_device_that_is_not_there_is_left_alone() -> None:
    finish_backward_at_exit(torch.device("cpu"))
    finish_backward(torch.device("sim:9"))


class BlocksInBackward(torch.autograd.Function):
    """Tells that it has begun, and ends when it may."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, value: LetGo) -> torch.Tensor:
        ctx.value = value
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.value.begun.set()
        assert ctx.value.may_end.wait(60)
        ctx.value.events.append("ended")
        return gradients[0], None


class FailsWhenOthersRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, value: LetGo) -> torch.Tensor:
        ctx.value = value
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        assert ctx.value.begun.wait(60)
        raise LookupError


class Blocked:
    """A backward that fails on the host while ``sim:1`` is in an operator; what comes before that is on ``sim:2``."""

    def __init__(self) -> None:
        self.events: Events = []
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.weight = torch.ones(64, device="sim:2", requires_grad=True)

    def fail(self) -> None:
        blocked = BlocksInBackward.apply((self.weight * 2).to("sim:1"), self)
        failing = FailsWhenOthersRun.apply(torch.ones(3, requires_grad=True), self)
        with pytest.raises(LookupError):
            torch.autograd.backward([blocked.sum(), failing.sum()])


def test_after_an_error_nothing_of_a_backward_runs_on_any_device(sim: Any) -> None:
    places = [torch.device("sim", index) for index in range(3)]
    blocked = Blocked()
    before = [sim.memory_allocated(index) for index in range(3)]
    blocked.fail()
    assert not blocked.events
    assert not end_failed_backward(places, 0.0), "it is still there"
    blocked.may_end.set()
    assert end_failed_backward(places, 60.0)
    for helper in [thread for thread in threading.enumerate() if thread.name == "dpx-end-backward"]:
        helper.join(60)  # of the look that did not wait
    forget_failed_backward()
    assert blocked.events == ["ended"]
    assert blocked.weight.grad is None
    assert [sim.memory_allocated(index) for index in range(3)] == before


def test_on_the_host_there_is_nobody_to_wait_for() -> None:
    assert end_failed_backward([torch.device("cpu")], 0.0)
