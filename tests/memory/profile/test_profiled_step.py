"""The step that is profiled begins as a training step does: after ``zero_grad``, or with what batches have added up."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.profiled_step import FreshForward, ProfiledStep

CPU = torch.device("cpu")


def step_of(module: nn.Module, x: torch.Tensor, **options: Any) -> ProfiledStep:
    settings = {"accumulates": False, "counts_gradients": False, "is_worth": None} | options
    return ProfiledStep(
        module=module,
        run=lambda: module(x).sum(),
        backward=torch.Tensor.backward,
        context=nullcontext,
        costs=CostModel(CPU),
        **settings,
    )


class TestFreshForward:
    def test_it_finds_no_gradients(self) -> None:
        layer = nn.Linear(3, 1)
        layer(torch.ones(2, 3)).sum().backward()
        seen: list[Any] = []

        def run() -> torch.Tensor:
            seen.extend(parameter.grad for parameter in layer.parameters())
            loss: torch.Tensor = layer(torch.ones(2, 3)).sum()
            return loss

        FreshForward(layer, run, nullcontext)()
        assert seen == [None, None], "zeros would take memory all through the forward"

    def test_a_loss_that_trains_nothing_is_refused(self) -> None:
        layer = nn.Linear(3, 1).requires_grad_(False)
        with pytest.raises(dpx.PlanError, match="the loss does not depend on any parameter that requires grad"):
            step_of(layer, torch.ones(2, 3)).forward()

    def test_no_loss_is_none_to_go_back_from(self) -> None:
        assert FreshForward(nn.Linear(3, 1), lambda: None, nullcontext)() is None


class TestGradients:
    def test_those_that_are_there_are_found(self) -> None:
        layer = nn.Linear(3, 1)
        step = step_of(layer, torch.ones(2, 3))
        assert not step.finds_gradients
        layer.weight.grad = torch.ones(1, 3)
        assert step.finds_gradients
        assert step_of(nn.Linear(3, 1), torch.ones(2, 3), accumulates=True).finds_gradients

    def test_zeros_stand_in_for_those_that_backward_adds_to(self) -> None:
        layer = nn.Linear(3, 1)
        layer.weight.grad = torch.ones(1, 3)
        step_of(layer, torch.ones(2, 3)).stand_in_for_gradients()
        assert layer.weight.grad.tolist() == [[0, 0, 0]]
        assert layer.bias.grad is None, "backward leaves its own there"

    def test_batches_that_add_up_find_all_of_them(self) -> None:
        layer = nn.Linear(3, 1)
        layer.bias.requires_grad_(False)
        step_of(layer, torch.ones(2, 3), accumulates=True).stand_in_for_gradients()
        assert layer.weight.grad is not None
        assert layer.bias.grad is None, "it trains nothing"


def test_the_loss_is_shown_between_forward_and_backward() -> None:
    layer = nn.Linear(3, 1)
    seen: list[Any] = []
    step_of(layer, torch.ones(2, 3))(lambda loss: seen.append((loss.item(), layer.weight.grad)))
    assert seen == [(layer(torch.ones(2, 3)).sum().item(), None)]
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2, 2, 2]]
