"""A process group whose other ranks are not there, and what is sharded over it."""

import pytest
import torch
from torch import distributed, nn

import lightning_dpx as dpx
from lightning_dpx.errors import UnsupportedError
from lightning_dpx.memory import sharded_units
from lightning_dpx.memory.absent_ranks import absent_ranks, shard_units


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 1)


def test_there_is_a_group_of_that_size_for_a_while() -> None:
    with absent_ranks(24) as mesh:
        assert (distributed.get_rank(), distributed.get_world_size()) == (0, 24)
        assert mesh["data_parallel"].size() == 24
        assert mesh["tensor_parallel"].size() == 1
    assert not distributed.is_initialized()


def test_a_group_that_is_there_stays_what_it_is() -> None:
    with absent_ranks(2):
        with pytest.raises(UnsupportedError, match="in a process of its own, and this one has a process group"):
            with absent_ranks(3):
                pass
        assert distributed.get_world_size() == 2


@pytest.mark.parametrize(
    ("patterns", "units"),
    [
        (["layers.*", "."], {"", "layers.0", "layers.1"}),
        (["layers.?", "head"], {"layers.0", "layers.1", "head"}),
        (["layers.*.1", "."], {"", "layers.0.1", "layers.1.1"}),
    ],
)
def test_a_star_stands_for_one_part_of_a_name(patterns: list[str], units: set[str]) -> None:
    net = Net()
    with absent_ranks(2) as mesh:
        shard_units(net, patterns, mesh["data_parallel"])
    assert set(sharded_units(net)) == units
    assert net.layers[0][0].weight.to_local().shape == torch.Size([2, 4])


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["layers.*"], r"head.weight, head.bias are in no unit .* such as --shard-units head\."),
        (["head"], r"layers.0.0.weight, .* and 5 more are in no unit"),
        (["layer.*", "."], r"--shard-units layer\.\* names no module of Net; it has layers, layers.0, "),
    ],
)
def test_units_are_never_guessed(patterns: list[str], said: str) -> None:
    with absent_ranks(2) as mesh, pytest.raises(dpx.ConfigurationError, match=said):
        shard_units(Net(), patterns, mesh["data_parallel"])
