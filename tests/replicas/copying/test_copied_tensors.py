"""What every copy of a module has copies of is found where it is, and nothing else."""

import torch
from torch import nn

from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.replicas.copying.copied_tensors import copied_tensors


class Holder:
    def __init__(self) -> None:
        self.tensor = torch.zeros(3)


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(2)
        self.layer.cache = torch.zeros(4)
        self.alias = self.layer  # a submodule of two names
        self.weights = {"first": self.layer.weight}
        self.listed = [torch.zeros(5), Holder()]
        self.teacher = (nn.Linear(6, 1, bias=False),)


def test_tensors_in_attributes_containers_and_objects_are_found_once() -> None:
    found = copied_tensors(Holding())
    assert sorted(tensor.numel() for tensor in found) == [3, 4, 5, 6]


def test_what_is_kept_by_reference_is_none_of_them() -> None:
    module = Holding()
    found = copied_tensors(module, [module.listed, module.teacher[0]])
    assert [tensor.numel() for tensor in found] == [4]


def test_a_replica_has_other_memory_for_each() -> None:
    replicas = ReplicaSet(Holding(), [torch.device("cpu")] * 2)
    mine = {tensor.data_ptr() for tensor in replicas.copied_tensors()}
    theirs = {tensor.data_ptr() for tensor in copied_tensors(replicas.replicas[1].module)}
    assert len(mine) == len(theirs) == 4
    assert not mine & theirs
