"""What of a module is copied, and what is shared."""

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_dpx as dpx
from lightning_dpx.replicas.replicate import replicate

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.rnn = nn.LSTM(4, 4)
        self.register_buffer("steps", torch.zeros(1))
        self.data = TensorDataset(torch.ones(3))


def test_structure_is_kept_and_parameters_on_one_device_share_storage() -> None:
    module = Tied()
    _, twin = replicate(module, [CPU, CPU])
    assert twin.module.head.weight is twin.module.embed.weight
    assert twin.module.extra[0].data_ptr() == module.extra[0].data_ptr()
    assert twin.module.extra[0] is not module.extra[0]
    assert twin.module.rnn._flat_weights[0] is twin.module.rnn.weight_ih_l0
    assert twin.module.data is module.data
    twin.module.steps.add_(1)
    assert module.steps.item() == 0, "buffers are each replica's own"


def test_what_holds_no_tensor_is_the_same_object_on_every_replica() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    held = {
        "lock": threading.Lock(),
        "file": open(__file__),  # noqa: SIM115
        "words": {"a": 0},
        "iterator": iter(range(3)),
        "generator": torch.Generator(),
        "function": lambda: 0,
    }
    vars(module[0]).update(held)
    _, twin = replicate(module, [CPU, CPU])
    held["file"].close()
    for name, value in held.items():
        assert getattr(twin.module[0], name) is value, name


def test_what_leads_to_tensors_or_submodules_is_each_replicas_own() -> None:
    module = Tied()
    module.parts = [module.embed, {"head": module.head}]
    module.method = functools.partial(module.embed.forward)
    module.loss = module.head(torch.ones(1, 4)).sum()
    module.seen = [torch.ones(2)]
    _, twin = replicate(module, [CPU, CPU])
    assert twin.module.parts[0] is twin.module.embed
    assert twin.module.parts[1]["head"] is twin.module.head
    assert twin.module.method.func.__self__ is twin.module.embed
    assert twin.module.loss.grad_fn is None, "a history belongs to the one who computed it"
    assert twin.module.seen is not module.seen
    assert torch.stack(twin.module.seen).tolist() == [[1, 1]]


class HoldsItself:
    """Refuses to be copied."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: object) -> "HoldsItself":
        raise TypeError("one of a kind")


def test_what_holds_the_module_and_cannot_be_copied_is_named() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].guard = HoldsItself(module)
    with pytest.raises(dpx.ReplicationError, match=r"'0\.guard' fails with TypeError: one of a kind"):
        replicate(module, [CPU, CPU])


class KeepsItsState(nn.Module):
    def __getstate__(self) -> Any:
        raise TypeError("no state")


def test_where_no_attribute_fails_the_error_blames_none() -> None:
    message = r"copied to cpu: Sequential fails with TypeError: no state.*copy\.deepcopy has to work"
    with pytest.raises(dpx.ReplicationError, match=message):
        replicate(nn.Sequential(KeepsItsState()), [CPU, CPU])
