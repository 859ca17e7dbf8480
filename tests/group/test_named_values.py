"""Parameters and buffers are read and written by name: all of them, or none."""

import pytest
import torch
from torch import nn

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.group.named_values import copied_parameters, mean_buffers, write_by_name
from lightning_dpx.replicas.replica import Replica


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight


def test_copies_are_copies() -> None:
    module = nn.Linear(2, 1)
    copied = copied_parameters(module)
    copied["weight"].zero_()
    assert list(copied) == ["weight", "bias"]
    assert module.weight.any()


def test_buffers_are_means_and_counts_those_of_the_first() -> None:
    replicas = []
    for index, value in enumerate([1.0, 3.0]):
        norm = nn.BatchNorm1d(2)
        norm.running_mean.fill_(value)
        norm.num_batches_tracked.fill_(index + 5)
        replicas.append(Replica(index, torch.device("cpu"), norm))
    buffers = mean_buffers(replicas)
    assert buffers["running_mean"].tolist() == [2, 2]
    assert int(buffers["num_batches_tracked"]) == 5


def test_a_tied_weight_goes_by_all_of_its_names() -> None:
    module = Tied()
    write_by_name(module, {"second.weight": torch.ones(2, 2)}, allow_extra=False)
    assert module.first.weight.tolist() == [[1, 1], [1, 1]]


def test_nothing_is_written_where_one_value_cannot_be() -> None:
    module = nn.Linear(2, 1)
    before = copied_parameters(module)
    for wrong in ({"other": torch.ones(1)}, {"bias": torch.ones(7)}):
        with pytest.raises(ConfigurationError):
            write_by_name(module, {"weight": torch.ones(1, 2), **wrong}, allow_extra=False)
    torch.testing.assert_close(copied_parameters(module), before)
    write_by_name(module, {"weight": torch.ones(1, 2), "other": torch.ones(1)}, allow_extra=True)
    assert module.weight.tolist() == [[1, 1]]
