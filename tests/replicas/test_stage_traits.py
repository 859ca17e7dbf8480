"""A stage runs in order until it was seen to draw nothing, and always once it has drawn or written."""

import sys

import pytest
import torch
from torch import nn

from lightning_dpx.replicas import BatchSlice
from lightning_dpx.replicas.replica_set import ReplicaSet
from lightning_dpx.replicas.stage_traits import StageTraits


def test_a_stage_needs_order_until_it_was_seen_to_draw_nothing() -> None:
    traits = StageTraits(nn.Identity())
    assert traits.needs_order("forward", training=True)
    traits.note_draws("forward", training=True, drew=False)
    assert not traits.needs_order("forward", training=True)
    assert traits.needs_order("forward", training=False), "dropout draws in one mode alone"


def test_one_stage_that_draws_has_all_of_its_mode_in_order() -> None:
    traits = StageTraits(nn.Identity())
    traits.note_draws("backward", training=True, drew=False)
    traits.note_draws("forward", training=True, drew=True)
    assert traits.has_drawn
    assert traits.needs_order("backward", training=True), "activation checkpointing draws again there"
    traits.note_draws("forward", training=True, drew=False)
    assert traits.needs_order("forward", training=True), "once is enough"


def test_a_stage_that_writes_shared_state_needs_order_in_its_mode() -> None:
    traits = StageTraits(nn.Identity())
    traits.note_draws("forward", training=True, drew=False)
    traits.note_draws("forward", training=False, drew=False)
    traits.note_write("forward", training=True)
    assert traits.needs_order("forward", training=True)
    assert not traits.needs_order("forward", training=False)


def test_a_stage_that_has_made_state_needs_order_in_one_more_step() -> None:
    traits = StageTraits(nn.Identity())
    traits.note_draws("forward", training=True, drew=False)
    traits.note_new_state("forward", training=True, has_new=True)
    assert traits.needs_order("forward", training=True)
    traits.note_new_state("forward", training=True, has_new=True)
    assert not traits.needs_order("forward", training=True), "it makes new state in every step"


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
    with pytest.warns(UserWarning, match="The step draws random numbers on the CPU"):
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
    with pytest.warns(UserWarning, match="The other draws random numbers on the CPU"):
        replicas.run("other", slices, lambda part: part.replica.module(part.batch))
    replicas.close()
    assert replicas.traits.has_drawn
