"""Backwards that run before the gradient of the merged loss is known, and what becomes of their gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.errors import ReplicationError
from lightning_dpx.replicas import BatchSlice, EarlyBackward, ExpectedGradient, Replica

CPU = torch.device("cpu")


class Step:
    """Two micro-batches of a net with two parameters, with losses of 2w + b and 4w + b."""

    def __init__(self, **expected: Any) -> None:
        self.net = nn.Linear(1, 1)
        replicas = [Replica(index, CPU, self.net) for index in range(2)]
        self.early = EarlyBackward(replicas[:1], ExpectedGradient(**expected), {0: 0.25, 1: 0.75})
        self.slices = [BatchSlice(replica, 1, row) for replica, row in zip(replicas, (2.0, 4.0), strict=True)]

    def run(self, zeroed: frozenset[int] = frozenset()) -> list[Any]:
        self.early.stash_gradients(zeroed)
        call = self.early.call(
            lambda one: {"loss": self.net(torch.tensor([one.batch])).sum(), "row": one.batch}, {0: 0, 1: 0}
        )
        outputs = [call(one) for one in self.slices]
        self.early.take()
        return outputs

    @property
    def gradients(self) -> list[float | None]:
        return [None if one.grad is None else float(one.grad) for one in (self.net.weight, self.net.bias)]


def add_gradients(step: Step, gradient: float, weights: dict[int, float] | None = None) -> list[float | None]:
    step.early.add_gradients(torch.tensor(gradient), weights or {0: 0.25, 1: 0.75})
    return step.gradients


def test_gradients_are_held_until_the_loss_has_its_own() -> None:
    step = Step()
    outputs = step.run()
    assert step.gradients == [None, None]
    assert [output["row"] for output in outputs] == [2.0, 4.0]
    assert all(output["loss"].grad_fn is None and output["loss"].requires_grad for output in outputs)
    assert add_gradients(step, 1.0) == [3.5, 1.0]


def test_another_gradient_than_expected_scales_them() -> None:
    step = Step(value=torch.tensor(8.0))
    step.run()
    assert add_gradients(step, 24.0) == [84.0, 24.0]


def test_a_gradient_that_is_certain_is_not_looked_at() -> None:
    step = Step(is_certain=True)
    step.run()
    assert add_gradients(step, 5.0) == [3.5, 1.0]


def test_weights_of_those_that_have_a_loss_scale_them() -> None:
    """The other one, of which only its rows were known, had none."""
    step = Step()
    step.early.stash_gradients()
    step.early.call(lambda one: loss_of_net(step, one), {0: 0})(step.slices[0])
    step.early.call(lambda one: None, {1: 0})(step.slices[1])
    step.early.take()
    assert add_gradients(step, 1.0, {0: 1.0}) == [2.0, 1.0]


def loss_of_net(step: Step, one: BatchSlice) -> torch.Tensor:
    return step.net(torch.tensor([one.batch])).sum()


def test_a_loss_that_weighs_nothing_has_no_backward() -> None:
    """The mean over no tokens is NaN, and so would be its gradients."""
    step = Step()
    early = EarlyBackward([step.slices[0].replica], ExpectedGradient(), {0: 0.0, 1: 1.0})
    early.stash_gradients()
    call = early.call(lambda one: loss_of_net(step, one) * (torch.nan if one.replica.index == 0 else 1.0), {0: 0, 1: 0})
    for one in step.slices:
        call(one)
    early.take()
    early.add_gradients(torch.tensor(1.0), {1: 1.0})
    assert step.gradients == [4.0, 1.0]


def test_weights_that_no_factor_explains_are_an_error() -> None:
    step = Step()
    step.run()
    with pytest.raises(ReplicationError, match="weights of the micro-batches' losses changed"):
        add_gradients(step, 1.0, {0: 0.5, 1: 0.5})


def test_a_gradient_that_no_factor_explains_is_an_error() -> None:
    step = Step(value=0.0)
    step.run()
    with pytest.raises(
        ReplicationError, match="began with a gradient of 1, after those of its micro-batches had run with 0"
    ):
        add_gradients(step, 1.0)


def test_what_was_there_is_added_to_unless_it_will_be_zeroed() -> None:
    for zeroed, expected in (([], [13.5, 11.0]), (["weight"], [3.5, 11.0]), (["weight", "bias"], [3.5, 1.0])):
        step = Step()
        for parameter in step.net.parameters():
            parameter.grad = torch.full_like(parameter, 10.0)
        step.run(frozenset(id(step.net.get_parameter(name)) for name in zeroed))
        left = [None if name in zeroed else 10.0 for name in ("weight", "bias")]
        assert step.gradients == left
        assert add_gradients(step, 1.0) == expected


def test_forwards_may_see_what_was_there() -> None:
    step = Step()
    step.net.weight.grad = torch.full_like(step.net.weight, 10.0)
    seen = []

    def call(one: BatchSlice) -> torch.Tensor:
        seen.append(step.gradients)
        return loss_of_net(step, one)

    assert step.early.stash_gradients(shown=True)
    both = step.early.call(call, {0: 0, 1: 0})
    for one in step.slices:
        both(one)
    step.early.take()
    assert seen == [[10.0, None]] * 2
    assert add_gradients(step, 1.0) == [13.5, 1.0]


def test_an_abandoned_step_leaves_what_was_there() -> None:
    step = Step()
    step.net.weight.grad = torch.full_like(step.net.weight, 10.0)
    step.early.stash_gradients()
    step.early.call(lambda one: loss_of_net(step, one), {0: 0})(step.slices[0])
    step.early.abandon()
    assert step.gradients == [10.0, None]
    step.run()
    step.early.abandon()  # an error after the last micro-batch
    assert step.gradients == [10.0, None]


def test_the_backward_runs_outside_of_autocast() -> None:
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    step = Step()
    step.early.stash_gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step.early.call(lambda one: Identity.apply(step.net(torch.tensor([1.0])).sum()), {0: 0})(step.slices[0])
    assert seen == [False]
