"""Tasks run in the calling thread or in threads, and meet in a slot that no abandoned run can reach."""

import threading
from collections.abc import Callable

import pytest
import torch

from lightning_dpx.replicas.executor_choice import Lanes, make_executor
from lightning_dpx.replicas.inline_executor import InlineExecutor
from lightning_dpx.replicas.threaded_executor import ThreadedExecutor
from tests.conftest import SIMULATED, sim_device

CPU = torch.device("cpu")


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")
def test_threads_are_one_for_each_device_or_one_for_each_replica_where_asked_for() -> None:
    devices = [sim_device(0), sim_device(1)]
    for execution, where, kind in (
        ("auto", [CPU, CPU], InlineExecutor), ("inline", devices, InlineExecutor), ("auto", devices, ThreadedExecutor),
        ("threads", [CPU, CPU], ThreadedExecutor), ("threads", [CPU], InlineExecutor),
    ):  # fmt: skip
        executor = make_executor(execution, where)
        assert type(executor) is kind, (execution, where)
        executor.close()


def test_an_abandoned_run_and_the_next_one_do_not_meet() -> None:
    lanes = Lanes("inline", [CPU] * 2, device_of=[0, 1], deadline=None, beyond=None)
    first = lanes.open_slot()
    assert lanes.open_slot() is first
    first.abandoned = True
    assert lanes.open_slot() is not first
    assert not lanes.slot.abandoned
    lanes.close()


def test_the_callers_threads_come_back_when_replicas_in_threads_end() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    lanes = Lanes("threads", [CPU] * 2, device_of=[0, 1], deadline=None, beyond=None)
    assert lanes.in_threads
    assert not lanes.in_line_on_host
    lanes.claim_cores()
    assert torch.get_num_threads() == 1
    lanes.choose(threads=False)
    assert lanes.in_line_on_host
    lanes.close()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_threads_that_begin_after_replicas_in_threads_have_the_callers_number() -> None:
    before = torch.get_num_threads()
    lanes = Lanes("threads", [CPU] * 2, device_of=[0, 1], deadline=None, beyond=None)
    in_a_thread(lambda: torch.set_num_threads(before + 1))
    lanes.close()
    seen: list[int] = []
    in_a_thread(lambda: seen.append(torch.get_num_threads()))
    assert seen == [before]


def in_a_thread(task: Callable[[], None]) -> None:
    thread = threading.Thread(target=task)
    thread.start()
    thread.join()
