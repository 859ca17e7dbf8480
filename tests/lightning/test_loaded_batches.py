"""Batches that a step fetches itself come again, and rows are counted as Lightning counts them."""

import pytest
import torch

from lightning_dpx.lightning.loaded_batches import RewindableBatches, fetches_by_itself, rows_to_weigh_by


def test_a_step_that_begins_anew_fetches_the_same_batches() -> None:
    batches = RewindableBatches(iter("abc"))
    assert [next(batches), next(batches)] == ["a", "b"]
    batches.rewind()
    assert list(batches) == ["a", "b", "c"]
    batches.rewind()
    assert next(batches) == "a", "also those that were fetched the second time"


def test_only_an_iterator_of_loaders_is_fetched_by_the_step() -> None:
    assert fetches_by_itself(RewindableBatches(iter("a")))
    assert not any(map(fetches_by_itself, [[torch.ones(2)], iter("a"), None]))


@pytest.mark.parametrize(
    ("batch", "rows"), [(torch.ones(3, 2), 3), ({"x": [torch.ones(4)]}, 4), (iter([1, 2]), 1), (object(), 1)]
)
def test_rows_are_those_that_lightning_finds_or_one(batch: object, rows: int) -> None:
    assert rows_to_weigh_by(batch) == rows
