"""A set of replicas deals out rows, knows when its module has changed, and runs every replica as itself."""

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.replicas.replica_set import ReplicaSet
from tests.replicas.test_replicate import MakesParametersAnew

CPU = torch.device("cpu")


def test_the_rows_of_a_batch_follow_the_workload_and_the_largest_batch_so_far() -> None:
    replicas = ReplicaSet(nn.Linear(1, 1), [CPU] * 3, workload=[2, 1, 1], execution="inline")
    assert replicas.sizes(8) == (4, 2, 2)
    assert replicas.sizes(1) == (1, 0, 0)
    assert [part.num_rows for part in replicas.slices(torch.ones(8, 1))] == [4, 2, 2]
    replicas.partition.forget_usual_rows()
    assert replicas.sizes(4) == (2, 1, 1)
    replicas.close()


def test_merged_replicas_on_one_device_take_a_batch_whole() -> None:
    replicas = ReplicaSet(nn.Linear(1, 1), [CPU] * 2, join_slices=True)
    assert replicas.partition.is_one_slice
    assert not replicas.cuts_batches
    assert replicas.partition.num_active == 1
    assert replicas.sizes(6) == (6, 0)
    replicas.close()


def test_arguments_that_are_not_allowed_are_named_with_those_that_are() -> None:
    with pytest.raises(dpx.ConfigurationError, match="execution='fast' is not allowed; choose one of 'auto', 'inline'"):
        ReplicaSet(nn.Linear(1, 1), [CPU], execution="fast")
    with pytest.raises(dpx.ConfigurationError, match="devices is empty"):
        ReplicaSet(nn.Linear(1, 1), [])


def test_copies_draw_no_random_numbers_of_the_run() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(MakesParametersAnew(2, 2))  # its constructor draws
    state = torch.get_rng_state()
    ReplicaSet(module, [CPU] * 2).close()
    assert torch.equal(torch.get_rng_state(), state)
