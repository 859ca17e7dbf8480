"""A stage runs in order until it was seen to draw nothing, and always once it has drawn or written."""

from torch import nn

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
