"""Batch norm over the slices of all replicas, and its own class again afterwards."""

import copy
import io
from contextlib import closing

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.batch_norm import SyncedBatchNorm, restore_batch_norm, synchronize_batch_norm
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank, as_rank
from lightning_dpx.replicas.executor import Task
from lightning_dpx.replicas.threaded_executor import ThreadedExecutor

CPU = torch.device("cpu")


def synchronized(momentum: float | None = 0.3) -> nn.Sequential:
    module = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum))
    synchronize_batch_norm(module)
    return module


@pytest.mark.parametrize("counts", [True, False])  # old checkpoints bring no number of batches
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 7)])
def test_slices_are_normalized_by_the_statistics_of_the_whole_batch(
    sizes: tuple[int, int], momentum: float | None, counts: bool
) -> None:
    rows = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = nn.BatchNorm1d(3, momentum=momentum).double()
    modules = [synchronized(momentum).double() for _ in sizes]
    if not counts:
        for norm in (whole, *(module[0] for module in modules)):
            norm.num_batches_tracked = None
    expected = whole(rows)
    slot = RendezvousSlot()

    def forward(index: int, part: torch.Tensor) -> torch.Tensor:
        with as_rank(ReplicaRank(index, 2, slot)):
            return modules[index](part)

    parts = rows.split(sizes)
    tasks = [Task(index, CPU, "forward", lambda index=index: forward(index, parts[index])) for index in range(2)]
    with closing(ThreadedExecutor(range(2))) as executor:
        found = executor.run(tasks, slot)
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
