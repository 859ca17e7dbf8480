import threading

import pytest
import torch

from lightning_dpx.errors import CollectiveError
from lightning_dpx.replicas.context import RendezvousSlot
from lightning_dpx.replicas.workers import InlineExecutor, Task, ThreadedExecutor

CPU = torch.device("cpu")


@pytest.fixture(params=["inline", "threads"])
def executor(request):
    made = InlineExecutor() if request.param == "inline" else ThreadedExecutor(range(3), 1)
    yield made
    made.close()


def tasks(*calls):
    return [Task(index, CPU, "forward", call) for index, call in enumerate(calls)]


class OddError(Exception):
    """Cannot be rebuilt from a message."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(code)
        self.why = why


def test_values_come_in_task_order(executor) -> None:
    assert executor.run(tasks(lambda: 1, lambda: 2, lambda: 3)) == [1, 2, 3]


@pytest.mark.parametrize("error", [OddError(3, why="x"), SystemExit(2), KeyboardInterrupt()])
def test_the_original_error_is_raised_with_a_note_and_the_workers_go_on(executor, error) -> None:
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        executor.run(tasks(lambda: 1, fail, lambda: 3))
    assert caught.value is error
    assert "In replica 1 on cpu, during forward." in error.__notes__
    assert executor.run(tasks(lambda: "again")) == ["again"]


def test_the_lowest_replica_is_first_and_others_are_noted() -> None:
    executor = ThreadedExecutor(range(2))

    def fail(text):
        def call():
            raise ValueError(text)

        return call

    with pytest.raises(ValueError, match="first") as caught:
        executor.run(tasks(fail("first"), fail("second")))
    executor.close()
    assert any("Replica 1 on cpu failed too: ValueError: second" in note for note in caught.value.__notes__)


def test_the_callers_context_reaches_the_workers(executor) -> None:
    def look():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    assert executor.run(tasks(look)) == [(True, False, False)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert executor.run(tasks(look)) == [(False, False, True)]
    with torch.inference_mode():
        assert executor.run(tasks(look)) == [(False, True, False)]


def test_saved_tensor_hooks_reach_the_workers(executor) -> None:
    packed = []
    weight = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        executor.run(tasks(lambda: (weight * weight).sum()))
    assert packed


@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_of_a_task_that_hangs_and_one_that_waits_for_it_the_first_is_told_with_its_stack(kind: str) -> None:
    executor = InlineExecutor(0.3) if kind == "inline" else ThreadedExecutor(range(2), deadline=0.3)
    slot = RendezvousSlot()
    is_over = threading.Event()

    def meets() -> None:
        slot.meeting.exchange(0, "all_gather", 1)

    def hangs() -> None:
        is_over.wait(60)

    try:
        # In threads both may be late: the one that waits has the same deadline.
        with pytest.raises(CollectiveError, match="The forward of .*replica 1 on cpu did not end within") as caught:
            executor.run(tasks(meets, hangs), slot)
    finally:
        is_over.set()
        executor.close()
    assert "is_over.wait(60)" in "\n".join(caught.value.__notes__)
