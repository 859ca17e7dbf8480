import dataclasses
from collections import namedtuple

import numpy as np
import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.replicas.slicing import (
    UncuttableBatch,
    batch_size,
    parse_workload,
    slice_batch,
    split_sizes,
)

Pair = namedtuple("Pair", "image label")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


@pytest.mark.parametrize(
    ("rows", "workload", "usual", "sizes"),
    [
        (8, [1, 1, 1, 1], 0, (2, 2, 2, 2)),
        (10, [1, 1, 1, 1], 0, (3, 3, 2, 2)),
        (16, [3, 1], 0, (12, 4)),
        (2, [1, 1, 1, 1], 0, (1, 1, 0, 0)),
        (3, [1, 1, 1, 1], 8, (3, 0, 0, 0)),
        (5, [1, 1, 1, 1], 8, (3, 2, 0, 0)),
        (10, [1, 1, 1, 1], 32, (5, 5, 0, 0)),
        (1, [1, 1], 1, (1, 0)),
        # The first replica is rank 0 and always takes part; others whose share is less than half a row do not.
        (10, [3.3, 0.1, 0.1], 0, (10, 0, 0)),
        (10, [0.1, 0.1, 3.3], 0, (1, 0, 9)),
        (10, [0.1, 3.3, 0.1], 0, (1, 9, 0)),
        # A short batch is left to those that get most of a full one.
        (8, [1, 9], 20, (2, 6)),
        (4, [0.1, 0.1, 3.3], 10, (1, 0, 3)),
        (3, [1, 9], 20, (3, 0)),
    ],
)
def test_sizes_follow_the_workload_and_short_batches_go_to_fewer_replicas(rows, workload, usual, sizes) -> None:
    assert split_sizes(rows, workload, usual) == sizes


def test_sizes_always_sum_to_the_batch() -> None:
    for rows in range(1, 70):
        for workload in ([1], [1, 1, 1], [7, 1], [0.1, 0.2, 0.7], [1e9, 1.0]):
            for usual in (0, 16, 64):
                assert sum(split_sizes(rows, workload, usual)) == rows


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ([1, 2], "2 entries"), ([1, 0, 1], r"workload\[1\]=0"), ([1, -1, 1], r"workload\[1\]=-1"),
        ([1, 1, float("nan")], r"workload\[2\]=nan"), ([1, 1, float("inf")], "inf"), (["a", 1, 1], "'a'"),
        ("fair", "'even'"), ([True, 1, 1], "True"), (np.array([1, 2, 3]), r"array\(\[1, 2, 3\]\) is not allowed"),
    ],
)  # fmt: skip
def test_bad_workloads_are_refused_by_name(workload, message) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        parse_workload(workload, 3)


def test_every_container_keeps_its_type() -> None:
    rows = torch.arange(5)
    batch = {"pair": Pair(rows, rows + 1), "names": list("abcde"), "sample": Sample(rows, "x"), "scale": 3, "k": [rows]}
    first, second = slice_batch(batch, [3, 2])
    assert isinstance(first["pair"], Pair)
    assert isinstance(first["sample"], Sample)
    assert first["names"] == ["a", "b", "c"]
    assert second["names"] == ["d", "e"]
    assert second["pair"].label.tolist() == [4, 5]
    assert (first["scale"], second["sample"].name) == (3, "x")


def test_batch_dim_per_input() -> None:
    batch = (torch.arange(12).view(3, 4), torch.arange(4), torch.arange(7))
    dims = {"0": 1, "2": -1}
    assert batch_size(batch, dims) == 4
    parts = slice_batch(batch, [3, 1], dims)
    assert [tuple(t.shape) for t in parts[1]] == [(3, 1), (1,), (7,)]


def test_minus_one_gives_all_that_is_in_a_container_whole() -> None:
    batch = {"x": torch.arange(4), "tables": {"a": torch.ones(3), "b": [torch.ones(4), object()]}}
    _, second = slice_batch(batch, [3, 1], {"tables": -1})
    assert second["tables"] is batch["tables"]


def test_a_dim_out_of_range_is_an_error_of_whoever_gave_it() -> None:
    with pytest.raises(dpx.SliceError, match="out of range") as caught:
        batch_size(torch.ones(3), 1)
    assert not isinstance(caught.value, UncuttableBatch)
