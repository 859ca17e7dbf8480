"""Larger inputs are noticed."""

import sys
from collections import OrderedDict, namedtuple
from typing import Any

import torch

from lightning_dpx.memory.execute.largest_inputs import LargestInputs, tensors_in


def test_inputs_grow_in_bytes_or_in_a_dim() -> None:
    inputs = LargestInputs()
    assert inputs.have_grown(((torch.ones(4, 8), "text"), {"mask": torch.ones(4)}))
    assert not inputs.have_grown(((torch.ones(4, 8), "text"), {"mask": torch.ones(4)}))
    assert not inputs.have_grown((torch.ones(3, 7), torch.ones(2)))
    assert inputs.have_grown((torch.ones(2, 16), torch.ones(2)))  # as many bytes: fewer rows, and longer ones
    assert inputs.have_grown((torch.ones(4, 16), torch.ones(4)))  # no longer in any dim
    assert not inputs.have_grown((torch.ones(4, 16), torch.ones(4)))


def test_what_has_no_tensors_never_grows() -> None:
    inputs = LargestInputs()
    assert not inputs.have_grown(())
    assert not inputs.have_grown((None, "a", [1, 2]))


Pair = namedtuple("Pair", "first, second")


def test_tensors_are_found_in_all_containers_of_pytree() -> None:
    tensors = [torch.full((1,), float(number)) for number in range(6)]
    inputs = (
        (tensors[0], {"a": [tensors[1], "word"]}),
        Pair(tensors[2], 1),
        OrderedDict(b=tensors[3]),
        object(),
        tensors,
    )
    assert {id(tensor) for tensor in tensors_in(inputs)} == set(map(id, tensors))
    assert len(tensors_in(inputs)) == 4 + len(tensors)


def test_a_list_that_holds_itself_is_searched_once() -> None:
    rows: list[Any] = [torch.ones(2)]
    rows.append(rows)
    assert len(tensors_in((rows,))) == 1


def test_long_lists_of_words_are_not_flattened_in_every_step() -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    inputs = (torch.ones(2), [f"word {number}" for number in range(10_000)])
    sys.setprofile(count)
    try:
        found = tensors_in(inputs)
    finally:
        sys.setprofile(None)
    assert len(found) == 1
    assert calls < 100
