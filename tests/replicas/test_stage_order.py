"""What a stage was seen to do decides whether replicas that have threads take turns in it."""

import sys
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.replicas import BatchSlice, ReplicaSet
from tests.conftest import SIMULATED, sim_device

CPUS = [torch.device("cpu")] * 2
needs_devices = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")


def test_a_stage_that_needs_order_for_good_is_not_watched_any_more() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    net.shared = {"number": 1}
    replicas = ReplicaSet(net, [torch.device("cpu")] * 2, execution="threads")
    slices = replicas.slices(torch.ones(4, 2))
    profilers: list[object] = []

    def step(part: BatchSlice) -> torch.Tensor:
        profilers.append(sys.getprofile())
        return part.replica.module(part.batch)

    before = sys.getprofile()
    with pytest.warns(UserWarning, match="The step draws random numbers from a generator"):
        replicas.run("step", slices, step)
    replicas.run("step", slices, step)
    replicas.close()
    assert replicas.traits.needs_order_for_good("step", training=True)
    assert profilers[0] is not before, "the first one is watched"
    assert profilers[2:] == [before, before]


def test_replicas_in_threads_note_what_their_stages_do() -> None:
    replicas = ReplicaSet(nn.Dropout(), [torch.device("cpu")] * 2, execution="threads")
    slices = replicas.slices(torch.ones(4, 2))
    replicas.run("step", slices, lambda part: part.batch + 1)
    assert not replicas.traits.needs_order("step", training=True)
    with pytest.warns(UserWarning, match="The other draws random numbers from a generator"):
        replicas.run("other", slices, lambda part: part.replica.module(part.batch))
    replicas.close()
    assert replicas.traits.has_drawn


def test_a_stage_that_was_seen_to_write_shared_state_takes_turns() -> None:
    replicas = ReplicaSet(nn.Identity(), CPUS, execution="threads")
    slices = replicas.slices(torch.ones(4, 2))
    for _ in range(2):
        replicas.run("step", slices, lambda part: part.batch + 1)
    assert not replicas.order.runs_one_by_one("step")
    replicas.order.note_shared_write("step")
    assert replicas.order.takes_turns("step")
    assert replicas.order.runs_one_by_one("step")
    replicas.close()


def test_what_a_thread_writes_to_shared_state_is_told_and_takes_turns_from_then_on() -> None:
    module: Any = nn.Identity()
    module.names = []
    replicas = ReplicaSet(module, CPUS, execution="threads")
    slices = replicas.slices(torch.ones(4, 2))

    def run(call: Any) -> None:
        replicas.python_state.share()
        replicas.run("step", slices, call)
        replicas.python_state.collect([part.replica for part in slices])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            run(lambda part: part.batch + 1)
    assert not replicas.order.takes_turns("step")
    with pytest.warns(UserWarning, match="The step writes Python state that its replicas share, so they take turns"):
        run(lambda part: part.replica.module.names.append("a"))
    assert replicas.order.takes_turns("step")
    assert module.names == ["a", "a"]
    replicas.close()


def test_replicas_in_line_run_one_by_one_and_take_no_turns() -> None:
    replicas = ReplicaSet(nn.Identity(), CPUS, execution="inline")
    assert replicas.order.runs_one_by_one("step")
    assert not replicas.order.takes_turns("step")


@needs_devices
@pytest.mark.parametrize(("places", "in_turns"), [((0, 0), True), ((0, 1), False)])
def test_replicas_that_draw_from_the_generator_of_a_device_take_turns(places: tuple[int, ...], in_turns: bool) -> None:
    """Another lane moves it on between the state that a checkpointed block keeps and its draws: masks would differ."""
    devices = [sim_device(index) for index in places]
    replicas = ReplicaSet(nn.Dropout().to(devices[0]), devices, execution="threads")
    slices = replicas.slices(torch.ones(4, 2))
    with pytest.warns(UserWarning, match="draws random numbers from a generator") if in_turns else nullcontext():
        replicas.run("step", slices, lambda part: part.replica.module(part.batch.to(part.replica.device)))
    assert replicas.order.takes_turns("step") is in_turns
    assert replicas.order.takes_turns("backward"), "it may recompute, and was not seen yet"
    replicas.run("backward", slices, lambda part: part.batch + 1)
    assert replicas.order.takes_turns("backward") is in_turns
    replicas.close()
