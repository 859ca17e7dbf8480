"""Values are translated between replicas: what has a counterpart becomes it, tensors are copied, the rest is shared."""

import copy

import torch
from torch import nn

from lightning_dpx.replicas.counterparts import Counterparts
from lightning_dpx.replicas.mirrors import Mirrors
from lightning_dpx.replicas.replica import Replica

HOST = torch.device("cpu")


def pair() -> tuple[Replica, Replica, Counterparts]:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    root = Replica(0, HOST, module)
    other = Replica(1, HOST, copy.deepcopy(module))
    return root, other, Counterparts(root, Mirrors(), [])


def test_submodules_parameters_and_buffers_become_those_of_the_other() -> None:
    root, other, counterparts = pair()
    mine, theirs = root.module, other.module
    held = {"part": mine[0], "items": [mine[0].weight, mine[1].running_mean]}
    there = counterparts.there(other, held, lazily=False)
    assert there["part"] is theirs[0]
    assert there["items"][0] is theirs[0].weight
    assert there["items"][1] is theirs[1].running_mean
    back = counterparts.back(other, there)
    assert back["part"] is mine[0]
    assert back["items"][0] is mine[0].weight


def test_a_tensor_is_copied_and_a_plain_object_is_shared() -> None:
    _, other, counterparts = pair()
    tensor = torch.ones(2, requires_grad=True) * 2
    there = counterparts.there(other, tensor, lazily=False)
    assert torch.equal(there, tensor)
    assert there.grad_fn is None
    assert there.data_ptr() != tensor.data_ptr()
    lock = iter([1])
    assert counterparts.there(other, lock, lazily=False) is lock


def test_what_is_kept_is_the_same_object_for_all() -> None:
    root, other, _ = pair()

    class Helper:
        def __init__(self) -> None:
            self.tensor = torch.zeros(2)

    helper = Helper()
    counterparts = Counterparts(root, Mirrors(), [helper])
    assert counterparts.is_boundary(helper)
    assert counterparts.there(other, [helper], lazily=False)[0] is helper
    unknown = Counterparts(root, Mirrors(), [])
    assert unknown.there(other, [helper], lazily=False)[0] is not helper


def test_new_parts_are_found_once_the_old_ones_are_forgotten() -> None:
    root, other, counterparts = pair()
    counterparts.there(other, root.module[0], lazily=False)
    root.module[0], other.module[0] = nn.Linear(2, 2), nn.Linear(2, 2)
    root.refresh()
    other.refresh()
    counterparts.forget()
    assert counterparts.there(other, [root.module[0]], lazily=False)[0] is other.module[0]
