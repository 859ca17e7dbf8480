"""Which parameter was written since a forward began, and which bits are other ones."""

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.shared_writes import SharedWrites, UnseenWrites
from tests.replicas.state_pairs import pair


def begun() -> tuple[SharedWrites, list[nn.Parameter]]:
    replicas = pair()
    writes = SharedWrites(replicas)
    parameters = replicas[0].parameters
    writes.begin(parameters, [parameter._version for parameter in parameters])
    return writes, parameters


def test_a_write_moves_the_version_and_one_through_data_the_bits() -> None:
    writes, parameters = begun()
    assert writes.find() is None
    with torch.no_grad():
        parameters[1].add_(1)
    assert writes.find() is parameters[1]
    writes, parameters = begun()
    parameters[0].data.add_(1)
    assert writes.find() is parameters[0]


def test_one_replica_shares_its_memory_with_none() -> None:
    (mine, _) = pair()
    writes = SharedWrites([mine])
    assert not writes.are_possible
    writes.begin(mine.parameters, [-1, -1])
    assert writes.find() is None


@pytest.mark.parametrize("who", ["by_hooks", "by_step"])
def test_hooks_and_steps_are_watched_only_where_it_was_asked(who: str) -> None:
    weight = torch.zeros(3)
    writes = UnseenWrites()
    writes.begin([weight])
    assert not writes.has_begun
    setattr(writes, who, True)
    writes.begin([weight])
    assert not writes.are_in([weight])
    weight.data[1] = 2
    assert writes.are_in([weight])
