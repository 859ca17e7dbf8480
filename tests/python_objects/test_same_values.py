"""Dicts hold the same objects until one is set, added or taken out."""

from typing import Any

from lightning_dpx.python_objects.same_values import SameValues


def test_an_equal_object_is_another_one() -> None:
    value: dict[Any, Any] = {"a": [1], "b": [2]}
    other: dict[Any, Any] = {}
    held = SameValues([value, other])
    assert held.are_same()
    assert held.values == [[1], [2]]
    value["a"] = [1]
    assert not held.are_same()


def test_what_comes_or_goes_is_seen() -> None:
    value: dict[Any, Any] = {"a": [1]}
    held = SameValues([value])
    value["b"] = [2]
    assert not held.are_same()
    held = SameValues([value])
    del value["a"]
    assert not held.are_same()
