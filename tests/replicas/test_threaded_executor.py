"""Tasks that run side by side."""

import pytest
import torch

from lightning_dpx.replicas.executor import Task
from lightning_dpx.replicas.threaded_executor import ThreadedExecutor

CPU = torch.device("cpu")


def test_the_lowest_replica_is_first_and_others_are_noted() -> None:
    executor = ThreadedExecutor(range(2))

    def fail(text):
        def call():
            raise ValueError(text)

        return call

    with pytest.raises(ValueError, match="first") as caught:
        executor.run([Task(0, CPU, "forward", fail("first")), Task(1, CPU, "forward", fail("second"))])
    executor.close()
    assert any("Replica 1 on cpu failed too: ValueError: second" in note for note in caught.value.__notes__)
