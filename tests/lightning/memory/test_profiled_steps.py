"""A profiled step, and which slices every device has a part in."""

import torch
from torch import nn

from lightning_dpx.lightning.memory.profiled_steps import SeenStep, by_device, pressure
from lightning_dpx.replicas import BatchSlice, Replica
from tests.memory.made_up import SIZE, chain


def test_the_demand_is_that_of_the_fullest_device() -> None:
    step = SeenStep((chain(2), chain(6)), (1, 2))
    assert pressure(step, [SIZE, 6 * SIZE]) == 2.0
    assert pressure(step, [4 * SIZE, 6 * SIZE]) == 2.0


def test_every_device_has_the_slices_of_its_replicas_the_largest_first() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    replicas = [Replica(index, device, nn.Linear(1, 1)) for index, device in enumerate([cpu, meta, cpu])]
    slices = [BatchSlice(replica, rows, None) for replica, rows in zip(replicas, (2, 3, 5), strict=True)]
    found = by_device(slices)
    assert {device: [part.num_rows for part in mine] for device, mine in found.items()} == {cpu: [5, 2], meta: [3]}


def test_of_slices_with_as_many_rows_the_one_with_more_in_them_comes_first() -> None:
    """Such as micro-batches of as many graphs, which share their parameters: the first one is profiled for all."""
    module = nn.Linear(2, 2)
    replicas = [Replica(index, torch.device("cpu"), module) for index in range(3)]
    nodes = [torch.ones(count, 4) for count in (10, 30, 20)]
    slices = [BatchSlice(replica, 2, batch) for replica, batch in zip(replicas, nodes, strict=True)]
    assert by_device(slices) == {torch.device("cpu"): [slices[1]]}
