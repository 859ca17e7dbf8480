"""Tasks whose caller has gone end, and leave no gradients behind."""

import threading

import pytest
import torch

from lightning_dpx.replicas.abandonment import RunningTask, StepAbandoned, keep_gradients_out, stop_tasks


def test_a_task_that_was_stopped_before_it_began_does_not_begin() -> None:
    task = RunningTask()
    task.stop()
    with pytest.raises(StepAbandoned):
        task.begin()


def test_a_task_that_goes_on_is_ended_in_its_own_thread() -> None:
    task = RunningTask()
    begun = threading.Event()
    ended_by: list[BaseException] = []

    def work() -> None:
        try:
            task.begin()
            begun.set()
            while True:  # code of a user that hears nothing of Ctrl-C
                pass
        except StepAbandoned as error:
            ended_by.append(error)
        finally:
            task.end()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait()
    assert task.goes_on
    stop_tasks([task])
    thread.join()
    assert len(ended_by) == 1
    assert task.is_over


def test_a_backward_that_had_begun_leaves_no_gradient_and_later_ones_do() -> None:
    weight = torch.ones(2, requires_grad=True)

    class Interrupted(torch.autograd.Function):
        """In its backward the caller gives the step up."""

        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            keep_gradients_out([weight])
            return gradient

    with pytest.raises(StepAbandoned):
        Interrupted.apply(weight * 2).sum().backward()
    assert weight.grad is None
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [3, 3]
