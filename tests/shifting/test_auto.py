"""Which parts of a model are shifted where nobody names them."""

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.activations import trace_activations
from lightning_dpx.shifting import Part, choose_parts
from lightning_dpx.shifting.auto import parts_of, scaled


def test_the_fewest_last_parts_are_chosen() -> None:
    parts = [Part(f"p{index}", 10, 2) for index in range(5)]
    assert choose_parts(parts, 5, (1000, 0))[0] == []
    names, (source, target) = choose_parts(parts, 5, (80, 100), per_parameter=1)
    assert names == ["p4"], "25 elsewhere and in transit, 48 stay, the parameters of p4 are freed"
    assert (source, target) == (71, 34)
    with pytest.raises(dpx.ConfigurationError, match="found no cut that fits"):
        choose_parts(parts, 5, (20, 20))
    figures = "need 16 MiB and 304 KiB and have 30 KiB and 243 KiB"  # each in a unit of its own
    with pytest.raises(dpx.ConfigurationError, match=figures):
        choose_parts([Part("last", 2**14, 2**16)], 2**24, (2**15, 2**18))


def test_what_modules_keep_grows_with_the_rows_as_in_two_traces() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    few, more = (trace_activations(module, torch.ones(rows, 4)) for rows in (2, 4))
    kept = scaled(few, more, (2, 4), 10)
    assert kept == {"1": 10 * 8 * 4}, "the input of the first layer is the caller's"


def test_containers_that_keep_nothing_are_taken_apart_and_parts_are_in_the_order_of_forward() -> None:
    module = nn.Module()
    module.last = nn.Linear(2, 2)
    module.blocks = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Tanh()))
    parts = parts_of(module, {"blocks.0": 8, "blocks.1.0": 4, "last": 2})
    assert [part.name for part in parts] == ["blocks.0", "blocks.1.0", "last"]
    assert [part.kept for part in parts] == [8, 4, 2]
    assert [part.parameters for part in parts] == [(2 * 3 + 3) * 4, 0, (2 * 2 + 2) * 4]
