"""What a step has written into the batch that it got."""

from typing import Any

import torch
from torch import nn

from lightning_dpx.lightning.batch_writes.given_batch import (
    GivenBatch,
    given_batch,
    on_host,
    written_paths,
    wrote_nothing,
)
from lightning_dpx.lightning.batch_writes.places import exchangeable
from lightning_dpx.replicas import BatchSlice, Replica

REPLICA = Replica(0, torch.device("cpu"), nn.Identity())


def given(batch: Any) -> tuple[GivenBatch, Any]:
    shown = exchangeable(batch)
    return given_batch(BatchSlice(REPLICA, 2, batch), batch, shown, is_as_loaded=True), shown


def test_a_step_that_only_reads_writes_nothing() -> None:
    for batch in ([torch.zeros(2)], {"x": torch.zeros(2), "names": ["a", "b"]}):
        one, shown = given(batch)
        assert wrote_nothing(one, shown)


def test_writes_in_place_and_new_entries_are_found_by_path() -> None:
    batch: dict[str, Any] = {"x": torch.zeros(2), "y": torch.zeros(2), "z": torch.zeros(2)}
    one, shown = given(batch)
    batch["x"].add_(1)
    batch["z"] = torch.ones(2)
    batch["new"] = torch.ones(2)
    assert set(written_paths(one, one.now(shown))) == {("x",), ("z",), ("new",)}


def test_what_is_taken_out_goes_with_all_that_it_held() -> None:
    batch = {"x": torch.zeros(2), "pair": [torch.zeros(2), torch.zeros(2)]}
    one, shown = given(batch)
    del batch["pair"]
    assert set(written_paths(one, one.now(shown))) == {("pair",)}


def test_the_same_counts_as_written_in_a_copy_on_the_host() -> None:
    batch = {"x": torch.zeros(2), "y": torch.zeros(2)}
    one, shown = given(batch)
    batch["x"].add_(1)
    copied = on_host(one, shown)
    assert set(written_paths(copied, copied.now(shown))) == {("x",)}
