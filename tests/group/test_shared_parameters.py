"""One copy of parameters and buffers stands in two modules."""

import pytest
import torch
from torch import nn

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.group.shared_parameters import adopt_buffers, adopt_parameters, parameters_by_replica
from lightning_dpx.replicas import ReplicaSet

CPU = torch.device("cpu")


def test_parameters_of_the_same_names_are_adopted() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    theirs = nn.Sequential(nn.Linear(2, 2))
    own = module[1].weight
    adopt_parameters(module, dict(theirs.named_parameters()))
    assert module[0].weight is theirs[0].weight
    assert module[1].weight is own


def test_parameters_of_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Parameter weight has shape"):
        adopt_parameters(nn.Linear(2, 2), dict(nn.Linear(3, 2).named_parameters()))


def test_statistics_are_one_and_constants_are_not() -> None:
    module = nn.BatchNorm1d(2)
    theirs = nn.BatchNorm1d(2)
    module.register_buffer("mask", torch.ones(2), persistent=False)
    theirs.register_buffer("mask", torch.ones(2))
    adopt_buffers(module, theirs)
    assert module.running_mean is theirs.running_mean
    assert module.mask is not theirs.mask


def test_groups_on_other_devices_share_nothing() -> None:
    replicas = ReplicaSet(nn.Linear(2, 1), [CPU, CPU]).primaries
    assert [set(one) for one in parameters_by_replica(replicas, [CPU, CPU])] == [{"weight", "bias"}] * 2
    with pytest.raises(ConfigurationError, match="shared_group lives on cpu, cpu, this group on cpu"):
        parameters_by_replica(replicas, [CPU])
