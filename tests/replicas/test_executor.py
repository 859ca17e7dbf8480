import threading

import pytest
import torch

from lightning_dpx.errors import CollectiveError
from lightning_dpx.replicas.context import RendezvousSlot
from lightning_dpx.replicas.executor import Task
from lightning_dpx.replicas.inline_executor import InlineExecutor
from lightning_dpx.replicas.threaded_executor import ThreadedExecutor

CPU = torch.device("cpu")


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
        with pytest.raises(CollectiveError, match=r"The forward of .*replica 1 on cpu did not end within") as caught:
            executor.run(tasks(meets, hangs), slot)
    finally:
        is_over.set()
        executor.close()
    assert "is_over.wait(60)" in "\n".join(caught.value.__notes__)
