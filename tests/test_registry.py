"""Classes by name: unknown names list those that exist, a taken one names its owner."""

import pytest

import lightning_dpx as dpx
from lightning_dpx.registry import Registry


class First:
    pass


class Second:
    pass


def test_a_class_is_found_under_its_name_and_names_are_sorted() -> None:
    registry: Registry[object] = Registry("planner")
    assert registry.register("b")(First) is First
    registry.register("a")(Second)
    registry.register("b")(First)  # a module that is imported twice
    assert registry["b"] is First
    assert list(registry) == ["a", "b"]


def test_unknown_and_taken_names_are_refused() -> None:
    registry: Registry[object] = Registry("planner")
    registry.register("greedy")(First)
    with pytest.raises(dpx.ConfigurationError, match=r"Unknown planner 'greddy'; available: greedy\. Did you mean"):
        registry["greddy"]
    with pytest.raises(dpx.ConfigurationError, match="planner name 'greedy' is taken by First; register Second under"):
        registry.register("greedy")(Second)


def test_a_name_that_was_taken_back_can_be_given_to_another() -> None:
    registry: Registry[object] = Registry("planner")
    registry.register("greedy")(First)
    registry.unregister("greedy")
    assert list(registry) == []
    with pytest.raises(dpx.ConfigurationError, match="Unknown planner 'greedy'"):
        registry.unregister("greedy")
    registry.register("greedy")(Second)
    assert registry["greedy"] is Second
