"""Places in a batch: what is there, and how something else is put there."""

from collections import namedtuple

import torch

from lightning_dpx.lightning.batch_writes.places import (
    MISSING,
    exchangeable,
    leaves_by_path,
    other_kind,
    put_at,
    takes_items,
    value_at,
)

Pair = namedtuple("Pair", ["first", "second"])


def test_what_is_at_a_path() -> None:
    batch = {"items": [1, Pair(2, 3)]}
    assert value_at(batch, ("items", 1, "second")) == 3
    assert value_at(batch, ("items", 7)) is MISSING
    assert value_at(batch, ("items", 0, 0)) is MISSING
    assert dict(leaves_by_path(batch["items"], ())) == {(0,): 1, (1, "first"): 2, (1, "second"): 3}


def test_something_else_is_put_there_or_taken_out() -> None:
    batch = {"a": [1, 2], "b": (torch.zeros(2),)}
    put_at(batch, ("a", 2), 3)
    put_at(batch, ("b", 0), torch.ones(2))
    assert batch["a"] == [1, 2, 3]
    assert batch["b"][0].tolist() == [1, 1]
    put_at(batch, ("a", 1), MISSING)
    put_at(batch, ("c",), 4)
    put_at(batch, ("c",), MISSING)
    assert batch["a"] == [1]
    assert set(batch) == {"a", "b"}


def test_what_hooks_get_can_be_exchanged_and_shares_its_memory() -> None:
    loaded = [torch.zeros(2), {"x": torch.zeros(2)}, (torch.zeros(2),)]
    shown = exchangeable(loaded)
    shown[0].add_(1)
    assert loaded[0].tolist() == [1, 1]
    put_at(shown, (1, "x"), torch.ones(2))
    put_at(shown, (2, 0), torch.ones(2))
    assert shown[2][0].tolist() == [1, 1]
    assert loaded[1]["x"].tolist() == [0, 0]
    assert loaded[2][0].tolist() == [0, 0]


def test_which_containers_take_the_place_of_others() -> None:
    assert takes_items([1, 2], (1, 2, 3))
    assert not takes_items((1, 2), [1, 2, 3])
    assert other_kind({"x": [1, 2]}, {"x": (1, 2)}, (4, 2), "batch") is None
    assert other_kind([1], {"x": 1}, (4, 2), "batch") is not None
