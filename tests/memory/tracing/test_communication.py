"""Steps that talk to other processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_dpx.memory import profile_module
from lightning_dpx.memory.tracing.communication import CommunicationWatch, has_other_processes


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """Of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_collective_is_seen_and_an_operator_is_none(mesh: DeviceMesh) -> None:
    rows = torch.ones(4, 4)
    with CommunicationWatch() as watch:
        rows = rows @ rows
    assert not watch.has_seen_any
    with CommunicationWatch() as watch:
        distributed.all_reduce(rows)
    assert watch.has_seen_any


def test_an_operator_on_distributed_tensors_is_none_unless_it_talks(mesh: DeviceMesh) -> None:
    sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with CommunicationWatch() as watch:
        added = sharded + 1
    assert not watch.has_seen_any
    with CommunicationWatch() as watch:
        distributed.all_reduce(added.to_local())
    assert watch.has_seen_any


def test_one_process_has_nobody_to_talk_to(mesh: DeviceMesh) -> None:
    assert not has_other_processes()


def test_a_call_that_talks_to_other_processes_is_not_replayed(mesh: DeviceMesh) -> None:
    class Tail(nn.Module):
        def __init__(self, *, talks: bool) -> None:
            super().__init__()
            self.talks = talks
            self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x)
            if self.talks:
                distributed.all_reduce(torch.ones(1))
            return out.log_softmax(1)

    replayable = []
    for talks in (False, True):
        tail = Tail(talks=talks)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), tail, *(nn.Linear(64, 64) for _ in range(24)))
        profile = profile_module(model, torch.ones(64, 64))
        replayable.append("2" in {call.name for call in profile.calls})
    assert replayable == [True, False]
