"""What the slices of a batch make of a number of the module: which values are looked at, and what was added to them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dpx.replicas.merging.rebound_numbers import (
    NumberWatch,
    changed_numbers,
    increments,
    joined_changes,
    numbers_of,
)


def test_numbers_are_copies_and_no_large_tensors_or_parts_of_graphs() -> None:
    counts = torch.zeros(3)
    leaf = torch.ones(3, requires_grad=True)
    attributes = {
        "counts": counts,
        "large": torch.zeros(2**16 + 1),
        "features": leaf * 2,
        "loss": (leaf * 2).sum(),
        "weight": nn.Parameter(torch.zeros(2)),
        "array": np.zeros(2),
        "steps": 3,
        "name": "x",
        "list": [1],
    }
    found = numbers_of(attributes.items())
    assert list(found) == ["counts", "loss", "array", "steps"]
    counts += 1
    assert found["counts"].tolist() == [0, 0, 0]
    assert not found["loss"].requires_grad


def test_of_what_hooks_read_only_gradients_and_other_tensors_are_left_out() -> None:
    leaf = torch.ones(3, requires_grad=True)
    retained = leaf * 2
    retained.retain_grad()
    large = torch.zeros(2**16 + 1)
    attributes = {"large": large, "features": leaf * 2, "leaf": leaf, "retained": retained, "name": "x"}
    assert list(numbers_of(attributes.items(), read=attributes)) == ["large", "features"]


def test_what_is_equal_has_not_changed_and_what_was_not_there_has() -> None:
    nan = float("nan")
    before = {"a": 1, "b": torch.tensor([1.0, nan]), "c": 2.0, "d": 1, "nan": nan, "big": 2**70, "bigger": 2**70}
    after = {"a": 1, "b": torch.tensor([1.0, nan]), "c": 3.0, "d": 1.0, "nan": nan, "e": 5}
    after |= {"big": 2**70, "bigger": 2**70 + 1}
    assert changed_numbers(before, after) == {"c", "d", "e", "bigger"}


@pytest.mark.parametrize(
    ("before", "parts", "expected"),
    [
        (10, [13, 11], [3, 1]),
        (torch.tensor([1.0, 2.0]), [torch.tensor([2.0, 2.0])], [torch.tensor([1.0, 0.0])]),
        (None, [1, 2], [1, 2]),  # the first step makes it
        (None, [True, False], None),
        (None, [1, torch.ones(1)], None),
        (True, [True, False], None),
        (torch.tensor(True), [torch.tensor(False)], None),
        (np.bool_(True), [np.bool_(False)], None),
        (np.array([1, 2]), [np.array([3, 2])], [np.array([2, 0])]),
        (1, [1.5], [0.5]),  # as a sum of losses that begins at 0
        (1, [True], None),
        (0, ["1"], None),
        (torch.zeros(2), [torch.zeros(3)], None),
    ],
)
def test_what_was_added_is_known_for_numbers_of_one_kind(before: Any, parts: Any, expected: Any) -> None:
    found = increments(parts, before)
    if expected is None:
        assert found is None
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_elements_are_those_of_the_replica_that_has_changed_them(make: Any) -> None:
    before = make([1.0, float("nan"), 3.0])
    apart = [make([5.0, float("nan"), 3.0]), make([1.0, 2.0, 3.0])]
    assert joined_changes([before, before], make([1.0])) is None, "of a single number"
    assert joined_changes([before, make([1.0, 2.0])], before) is None, "another shape"
    joined, overlap = joined_changes(apart, before)
    assert (joined.tolist(), overlap) == ([5.0, 2.0, 3.0], False)
    assert type(joined) is type(before)
    joined, overlap = joined_changes([*apart, make([7.0, float("nan"), 3.0])], before)
    assert (joined.tolist(), overlap) == ([7.0, 2.0, 3.0], True)


def test_replicas_that_changed_nothing_have_no_parts() -> None:
    modules = [nn.Module() for _ in range(2)]
    for module in modules:
        module.count = 4  # type: ignore[assignment]
    watch = NumberWatch(modules, modules[0], ["count"])
    assert watch.parts("count") == []
    modules[1].count = 6  # type: ignore[assignment]
    assert watch.parts("count") == [4, 6]
    watch.replace("count", watch.before("count") + 2)
    assert modules[0].count == 6
    del modules[1].count
    assert watch.parts("count") == []
