"""Attributes are compared with what they were, containers by what they hold, and nothing is kept alive for it."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dpx.replicas.seen_values import content_of, is_content_of

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "tensor": (lambda: [torch.zeros(2)], lambda held: held[0].add_(1)),
    "tensor in a dict": (lambda: {"old": torch.zeros(2)}, lambda held: held.update(old=torch.zeros(2))),
    "nested": (lambda: {"a": [1, (2, [3])]}, lambda held: held["a"][1][1].append(4)),
    "key": (lambda: {"a": 1}, lambda held: held.update(b=held.pop("a"))),
    "array": (lambda: [np.zeros(2)], lambda held: held[0].fill(1)),
    "array, then a number": (lambda: [np.zeros(2)], lambda held: held.__setitem__(0, 5)),
    "number": (lambda: [1.0], lambda held: held.__setitem__(0, 2.0)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_inside_is_seen(kind: str) -> None:
    make, change = CHANGES[kind]
    value = make()
    seen = content_of(value)
    assert is_content_of(seen, value)
    change(value)
    assert not is_content_of(seen, value)


def test_equal_numbers_are_the_same_and_other_types_are_not() -> None:
    assert is_content_of(content_of(10**20), 10**20)
    assert not is_content_of(content_of(1), True)
    assert not is_content_of(content_of((1,)), [1])


def test_nothing_is_kept_alive() -> None:
    tensor = torch.zeros(2)
    gone = weakref.ref(tensor)
    seen = content_of({"rows": [tensor]})
    del tensor
    gc.collect()
    assert gone() is None
    assert not is_content_of(seen, {"rows": [torch.zeros(2)]})
