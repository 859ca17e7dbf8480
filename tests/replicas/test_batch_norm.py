"""Batch norm over the slices of all replicas, and its own class again afterwards."""

import copy
import io

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.batch_norm import SyncedBatchNorm, restore_batch_norm, synchronize_batch_norm
from lightning_dpx.replicas.collectives import Rendezvous
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank, as_rank
from lightning_dpx.replicas.workers import Task, ThreadedExecutor

CPU = torch.device("cpu")


def synchronized() -> nn.Sequential:
    module = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3))
    synchronize_batch_norm(module)
    return module


@pytest.mark.parametrize("sizes", [(4, 4), (1, 7)])
def test_slices_are_normalised_by_the_statistics_of_the_whole_batch(sizes: tuple[int, int]) -> None:
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = nn.BatchNorm1d(3, momentum=0.3).double()
    expected = whole(rows)
    modules = [synchronized().double() for _ in sizes]
    slot = RendezvousSlot(meeting=Rendezvous(2))

    def forward(index: int, part: torch.Tensor) -> torch.Tensor:
        with as_rank(ReplicaRank(index, 2, slot)):
            return modules[index](part)

    executor = ThreadedExecutor(range(2))
    parts = rows.split(sizes)
    found = executor.run(
        [Task(index, CPU, "forward", lambda index=index: forward(index, parts[index])) for index in range(2)]
    )
    executor.close()
    torch.testing.assert_close(torch.cat(found), expected)
    for module in modules:
        torch.testing.assert_close(module[0].running_mean, whole.running_mean)
        torch.testing.assert_close(module[0].running_var, whole.running_var)


def test_names_copies_and_files_are_those_of_batch_norm() -> None:
    module = synchronized()
    assert list(module.state_dict()) == list(nn.Sequential(nn.BatchNorm1d(3)).state_dict())
    assert isinstance(copy.deepcopy(module)[0], SyncedBatchNorm), "replicas are copies"
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False)[0]) is nn.BatchNorm1d
    restore_batch_norm(module)
    assert type(module[0]) is nn.BatchNorm1d


def test_without_other_replicas_it_is_batch_norm() -> None:
    rows = torch.randn(4, 3)
    assert torch.equal(synchronized()(rows), nn.BatchNorm1d(3)(rows))
