"""What backward asks for in a joined step."""

from dataclasses import replace

from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.joining.join_steps import join_steps
from tests.memory.profile.joining.made_up import step_of

BOTH = {"layers.2": 1, "layers.3": 1}


def saving(profile: Profile) -> Profile:
    return replace(profile, saves=tuple((value.saved, index) for index, value in enumerate(profile.values)))


def test_backward_asks_for_the_values_in_the_order_of_the_step_that_calls_all() -> None:
    step = join_steps([step_of([1, 3]), step_of([1, 2])], BOTH)
    asked = [(request.event, request.value) for request in step.requests]
    assert asked == [(request.event, request.value) for request in step_of([1, 2, 3]).requests]


def test_saves_are_known_of_the_step_where_they_are_of_both() -> None:
    known = join_steps([saving(step_of([1, 3])), saving(step_of([1, 2]))], BOTH)
    assert known.saves == saving(step_of([1, 2, 3])).saves
    assert join_steps([saving(step_of([1, 3])), step_of([1, 2])], BOTH).saves == ()
