"""Which calls tell apart the steps of one module."""

from dataclasses import replace

from lightning_dpx.memory.profile.joining.call_counts import call_of, calls_in, has_calls, varying_paths
from tests.memory.profile.joining.made_up import step_of


def test_the_name_of_a_value_tells_the_call_that_saves_it() -> None:
    assert call_of("blocks.2.mlp:1") == ("blocks.2.mlp", 1)
    assert call_of("blocks.2.mlp#3:0") == ("blocks.2.mlp", 3)


def test_calls_that_save_nothing_are_told_by_their_count() -> None:
    profile = replace(step_of([1, 2]), called=(("layers.1", 3), ("silent", 2)))
    assert calls_in(profile) == {"layers.1": 3, "layers.2": 1, "silent": 2}
    assert has_calls(profile, {"layers.1": 3, "layers.2": 1})
    assert not has_calls(profile, {"layers.2": 2})


def test_only_modules_that_save_something_tell_steps_apart() -> None:
    one = replace(step_of([1, 2]), called=(("silent", 2),))
    assert varying_paths([one, step_of([1, 3])]) == ["layers.2", "layers.3"]
    assert varying_paths([one, one]) == []
