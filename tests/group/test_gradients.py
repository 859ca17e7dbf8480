"""What becomes of the gradients of a group's parameters."""

import pytest
import torch
from torch import nn

from lightning_dpx.group.gradients import GroupGradients
from lightning_dpx.reducers import make_reducer
from lightning_dpx.replicas import ReplicaSet

CPU = torch.device("cpu")


def gradients_of(module: nn.Module, request: str) -> GroupGradients:
    replicas = ReplicaSet(module, [CPU, CPU])
    requests = {name: request for name, _ in module.named_parameters()}
    return GroupGradients(replicas, make_reducer("naive", [CPU, CPU]), requests, fixed_params=["bias"])  # type: ignore[arg-type]


def test_gradients_are_added_to_those_of_earlier_steps() -> None:
    module = nn.Linear(2, 1)
    gradients = gradients_of(module, "add")
    module.weight.grad = torch.ones_like(module.weight)
    with gradients.of_a_backward():
        assert module.weight.grad is None
        module.weight.grad = torch.ones_like(module.weight)
        gradients.reduce()
    assert module.weight.grad.tolist() == [[2.0, 2.0]]


def test_after_an_error_the_earlier_gradients_are_there() -> None:
    module = nn.Linear(2, 1)
    gradients = gradients_of(module, "add")
    before = module.weight.grad = torch.ones_like(module.weight)
    with pytest.raises(KeyError), gradients.of_a_backward():
        raise KeyError
    assert module.weight.grad is before


def test_fixed_parameters_ask_for_none_while_the_graph_is_made() -> None:
    module = nn.Linear(2, 1)
    gradients = gradients_of(module, "write")
    with gradients.without_fixed():
        assert not module.bias.requires_grad
        assert module.weight.requires_grad
    assert module.bias.requires_grad
    assert gradients.are_wanted
    assert not gradients_of(nn.Linear(2, 1), "null").are_wanted
