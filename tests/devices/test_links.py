"""How values get from one device to another."""

import pytest
import torch

from lightning_dpx import devices
from tests.conftest import SIMULATED, sim_device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("count", "groups"), [(1, [[0]]), (3, [[0, 1, 2]]), (4, [[0, 1], [2, 3]]), (5, [[0, 1, 2], [3, 4]])]
)
def test_two_halves_where_nothing_is_known_of_the_links(count: int, groups: list[list[int]]) -> None:
    assert devices.linked_groups([torch.device("meta")] * count) == groups
    assert devices.num_direct_links([torch.device("meta")] * count) == 0


def test_processes_send_from_cuda_or_from_the_host() -> None:
    assert devices.wire_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert devices.default_backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert devices.wire_device(torch.device("meta")) == CPU
    assert devices.default_backend(CPU) == "gloo"
    assert not devices.has_nccl([CPU])


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")
def test_a_tensor_moves_and_comes_back() -> None:
    there = devices.moved(torch.arange(3), sim_device(1))
    devices.synchronize(sim_device(1))
    assert there.device == sim_device(1)
    assert devices.moved(there, CPU).tolist() == [0, 1, 2]
