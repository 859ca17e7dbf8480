"""Tasks whose caller has gone end, and leave no gradients behind."""

import sys
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


def test_functions_are_traced_while_a_stopped_task_is_blocked_which_ends_as_soon_as_it_can() -> None:
    """By a debugger, coverage, or this package, which watches the next step; Python 3.11 hung in the first function."""
    task = RunningTask()
    has_begun = threading.Event()
    release = threading.Lock()
    ended: list[str] = []

    def blocked() -> None:
        task.begin()
        try:
            has_begun.set()
            release.acquire(timeout=10)  # in C, as in an operator
            ended.append("its next line")
        except StepAbandoned:
            ended.append("stopped")
        finally:
            task.end()

    release.acquire()
    thread = threading.Thread(target=blocked)
    thread.start()
    has_begun.wait()
    stop_tasks([task])
    assert task.goes_on
    sys.setprofile(lambda *_: None)
    try:
        is_blocked = (lambda: task.goes_on)()
    finally:
        sys.setprofile(None)
    assert is_blocked
    release.release()
    thread.join()
    assert ended == ["stopped"]
