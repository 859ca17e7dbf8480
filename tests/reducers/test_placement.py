import random

import pytest

import lightning_dpx as dpx
from lightning_dpx.reducers import small_aside_placement


def loads(sizes: list[int], placed: list[str], devices: list[str]) -> list[int]:
    return [sum(size for size, device in zip(sizes, placed, strict=True) if device == d) for d in devices]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_loads_differ_by_at_most_the_largest_item(num_devices: int) -> None:
    generator, devices = random.Random(num_devices), [f"d{k}" for k in range(num_devices)]
    for _ in range(50):
        sizes = [generator.randrange(1000) for _ in range(generator.randrange(1, 40))]
        totals = loads(sizes, dpx.least_loaded_placement(sizes, devices), devices)
        assert max(totals) - min(totals) <= max(sizes)
        assert max(totals) <= 4 / 3 * max(sum(sizes) / num_devices, *sizes)


def test_the_order_of_ties_is_fixed() -> None:
    assert dpx.least_loaded_placement([5, 5, 5], ["a", "b"]) == ["a", "b", "a"]
    assert dpx.least_loaded_placement([], ["a"]) == []


def test_small_items_go_aside() -> None:
    placed = small_aside_placement([1, 100, 2, 90, 3], ["a", "b"], "c", threshold=10)
    assert placed == ["c", "a", "c", "b", "c"]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="devices is empty"):
        dpx.least_loaded_placement([1], [])
    with pytest.raises(dpx.ConfigurationError, match=r"sizes\[1\]=-2 is not allowed"):
        dpx.least_loaded_placement([1, -2], ["a"])


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf"), "8", None])
def test_sizes_are_numbers(size) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"sizes\[1\]=.* is not allowed; sizes are numbers, not negative"):
        dpx.least_loaded_placement([3, size], ["cuda:0", "cuda:1"])
