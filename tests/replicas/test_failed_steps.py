"""After the error of a step nothing of it writes to the module; what blocks for ever finds no parameter to write to."""

import threading

import torch
from torch import nn

from lightning_dpx.replicas import end_failed_step


class Blocks(torch.autograd.Function):
    """Waits in backward."""

    @staticmethod
    def forward(ctx, value, entered, leave):
        ctx.events = entered, leave
        return value * 1

    @staticmethod
    def backward(ctx, gradient):
        entered, leave = ctx.events
        entered.set()
        leave.wait(30)
        return gradient, None, None


def test_without_anything_at_work_nothing_is_waited_for_and_gradients_stay() -> None:
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    end_failed_step([module], interrupted=True)
    assert module.weight.grad is not None
    module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad.tolist() == [[2, 2]]


def test_gradients_of_the_next_step_arrive_after_one_that_failed() -> None:
    module = nn.Linear(2, 1)
    entered, leave = threading.Event(), threading.Event()
    output = Blocks.apply(module(torch.ones(1, 2)), entered, leave)
    thread = threading.Thread(target=output.sum().backward, daemon=True)
    thread.start()
    assert entered.wait(30)
    leave.set()
    thread.join(30)
    end_failed_step([module])
    module.zero_grad()
    module(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad.tolist() == [[1, 1]]
