"""A replica knows what its module consists of, and whether that has changed."""

import torch
from torch import nn

from lightning_dpx.replicas.replica import Replica


def replica(module: nn.Module) -> Replica:
    return Replica(1, torch.device("cpu"), module)


def test_parts_are_in_the_order_of_torch_and_tied_ones_count_once() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 2))
    module[2].weight = module[0].weight
    made = replica(module)
    assert made.modules == list(module.modules())
    assert [id(one) for one in made.parameters] == [id(one) for one in module.parameters()]
    assert [id(one) for one in made.buffers] == [id(one) for one in module.buffers()]


def test_lists_of_the_same_parts_stay_the_same_lists() -> None:
    made = replica(nn.Sequential(nn.Linear(2, 2)))
    before = (made.modules, made.parameters, made.buffers)
    made.refresh()
    assert all(one is other for one, other in zip(before, (made.modules, made.parameters, made.buffers), strict=True))


def test_another_structure_is_noticed_until_it_is_noted() -> None:
    made = replica(nn.Sequential(nn.Linear(2, 2)))
    assert not made.has_other_structure()
    made.module[0].bias = nn.Parameter(torch.ones(2))
    assert made.has_other_structure()
    made.refresh()
    assert not made.has_other_structure()
    made.module.append(nn.Tanh())
    assert made.has_other_structure()
