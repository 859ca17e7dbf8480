import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_dpx as dpx
from lightning_dpx.replicas.replica import replicate

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


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].guard = threading.Lock()
    with pytest.raises(dpx.ReplicationError, match=r"'0\.guard' fails with TypeError"):
        replicate(module, [CPU, CPU])


def test_a_closure_over_the_module_is_refused() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].register_forward_hook(lambda *_: module.train())
    with pytest.raises(dpx.ReplicationError, match=r"0\._forward_hooks holds the function"):
        replicate(module, [CPU, CPU])


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(dpx.ReplicationError, match=r"Parameter 0\.weight is lazy"):
        replicate(nn.Sequential(nn.LazyLinear(3)), [CPU, CPU])
