"""Replicas are as good as the module that they were copied from: what changes on it is noticed."""

import torch
from torch import nn

from lightning_dpx.replicas.replica_set import ReplicaSet

CPU = torch.device("cpu")


def test_a_module_that_has_changed_makes_its_replicas_outdated_until_they_are_made_anew() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    replicas = ReplicaSet(module, [CPU] * 2, execution="inline")
    assert not replicas.structure.has_changed
    module[0].bias.register_hook(lambda gradient: gradient)
    assert replicas.structure.has_changed
    assert replicas.structure.name_with_other_hooks == "0.bias"
    module.append(nn.BatchNorm1d(1))
    replicas.remake()
    assert not replicas.structure.has_changed
    assert len(replicas.replicas[1].module) == 2
    replicas.close()


def test_a_module_that_is_its_only_replica_may_change() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    replicas = ReplicaSet(module, [CPU])
    module.append(nn.ReLU())
    assert not replicas.structure.has_changed
    replicas.close()
