"""Python's collector rests in planned forwards, whoever else is in one, and is as it was afterwards."""

import gc
import threading

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.python_objects.gc_pause import COLLECTOR


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(gc.isenabled())
        return torch.tanh(self.inner(x)).sigmoid()


def test_it_rests_in_a_planned_forward_only() -> None:
    module, x = Watching(), torch.randn(64, 64)
    plan = dpx.search_plan(module, x)
    plan = plan.with_actions({plan.decisions[-1].name: "recompute"})
    module.seen.clear()
    module(x)
    dpx.apply_plan(module, plan)
    module(x).sum().backward()
    assert module.seen == [True, False]
    assert gc.isenabled()


def test_the_last_to_leave_wakes_it() -> None:
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with COLLECTOR.resting():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(ValueError, match="of the model"), COLLECTOR.resting():
        raise ValueError("of the model")
    seen.append(gc.isenabled())
    leave.set()
    thread.join()
    assert [*seen, gc.isenabled()] == [False, True]


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with COLLECTOR.resting():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
