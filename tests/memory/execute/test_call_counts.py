"""Calls that are counted: those that save something for backward, once each."""

import copy

import torch
from torch import nn

from lightning_dpx.memory.execute.call_counts import CallCounts


def test_calls_that_autograd_follows_are_counted_forward_by_forward() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    counts = CallCounts({"first": first, "second": second})
    x = torch.ones(2, 4)
    first(x)
    with counts.active():
        second(first(first(x)))
    with counts.active():
        first(x)
        with torch.no_grad():
            second(x)
    assert counts.found == {frozenset({("first", 2), ("second", 1)}), frozenset({("first", 1)})}


def test_neither_copies_of_a_module_nor_a_module_without_its_hooks_count() -> None:
    module = nn.Linear(4, 4)
    counts = CallCounts({"it": module})
    twin = copy.deepcopy(module)
    with counts.active():
        twin(torch.ones(2, 4))
    assert counts.found == {frozenset()}
    assert counts.is_on
    counts.remove()
    assert not counts.is_on
    with counts.active():
        module(torch.ones(2, 4))
    assert counts.found == {frozenset()}
