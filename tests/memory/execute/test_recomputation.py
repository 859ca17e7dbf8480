"""Values are computed again from what is kept, and let go after their last use."""

import pytest
import torch

from lightning_dpx.memory.execute.recipes.registry import NotRecomputable
from lightning_dpx.memory.execute.recomputation import compute, release_use
from lightning_dpx.memory.execute.values import Value


def dropped(name: str, tensor: torch.Tensor, source: Value) -> Value:
    """A value that doubles its source, which is told of this use."""
    value = Value(name, "MulBackward0")
    value.learn(lambda x: x * 2, (source,))
    source.add_use()
    value.add_use()  # backward's own
    value.drop(tensor)
    return value


def chain() -> tuple[Value, Value, Value]:
    first = Value("a:1", "leaf")
    first.keep(torch.ones(3))
    second = dropped("b:1", torch.full((3,), 2.0), first)
    third = dropped("c:1", torch.full((3,), 4.0), second)
    return first, second, third


def test_what_is_on_the_way_is_made_as_well_and_stays_for_those_that_still_ask() -> None:
    first, second, third = chain()
    assert torch.equal(compute(third), torch.full((3,), 4.0))
    assert second.tensor is not None, "backward itself asks for it"
    release_use(second)
    assert second.tensor is None
    assert first.tensor is not None, "it was never dropped"


def test_a_second_backward_finds_the_same() -> None:
    _, second, third = chain()
    for _ in range(2):
        assert torch.equal(compute(third), torch.full((3,), 4.0))
        release_use(third)
        release_use(second)
        assert third.tensor is None
        assert second.tensor is None


def test_a_source_that_was_written_to_is_refused() -> None:
    first, _, third = chain()
    first.held().add_(1)
    with pytest.raises(RuntimeError, match=r"a:1 of shape .* has version 1 instead of 0"):
        compute(third)


def test_without_a_recipe_it_says_so() -> None:
    value = Value("d:1", "FooBackward0")
    with pytest.raises(NotRecomputable, match="d:1 has no recipe"):
        compute(value)
