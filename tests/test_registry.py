"""Classes by name: unknown names list those that exist, a taken one names its owner."""

import pytest

import lightning_dpx as dpx
from lightning_dpx.registry import Registry


class First:
    pass


class Second:
    pass


def test_a_class_is_found_under_its_name_and_names_are_sorted() -> None:
    registry: Registry[object] = Registry("planner", object)
    assert registry.register("b")(First) is First
    registry.register("a")(Second)
    registry.register("b")(First)  # a module that is imported twice
    assert registry["b"] is First
    assert list(registry) == ["a", "b"]


def test_unknown_and_taken_names_are_refused() -> None:
    registry: Registry[object] = Registry("planner", object)
    registry.register("greedy")(First)
    with pytest.raises(dpx.ConfigurationError, match=r"Unknown planner 'greddy'; available: greedy\. Did you mean"):
        registry["greddy"]
    with pytest.raises(dpx.ConfigurationError, match=r"Unknown planner \['greedy'\]; available: greedy"):
        registry[["greedy"]]  # type: ignore[index]  # as a config may have it
    with pytest.raises(dpx.ConfigurationError, match="planner name 'greedy' is taken by First; register Second under"):
        registry.register("greedy")(Second)


def test_a_name_that_was_taken_back_can_be_given_to_another() -> None:
    registry: Registry[object] = Registry("planner", object)
    registry.register("greedy")(First)
    registry.unregister("greedy")
    assert list(registry) == []
    with pytest.raises(dpx.ConfigurationError, match="Unknown planner 'greedy'"):
        registry.unregister("greedy")
    registry.register("greedy")(Second)
    assert registry["greedy"] is Second


@pytest.mark.parametrize("name", ["", 3, "auto", First])
def test_names_are_texts_that_mean_nothing_else(name) -> None:
    registry: Registry[object] = Registry("planner", object, reserved=("auto",))
    with pytest.raises(dpx.ConfigurationError, match=r"is not allowed as the name of a planner; give another text"):
        registry.register(name)


@pytest.mark.parametrize("entry", [Second, "First", lambda: First()])
def test_entries_are_classes_of_their_kind(entry) -> None:
    registry: Registry[First] = Registry("planner", First)
    with pytest.raises(dpx.ConfigurationError, match="cannot be the planner 'mine'; decorate a subclass of First"):
        registry.register("mine")(entry)
    assert list(registry) == []
