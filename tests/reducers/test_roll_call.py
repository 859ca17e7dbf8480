"""Of four processes one is lost: all others name it, and it alone."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from lightning_dpx.errors import CollectiveError
from lightning_dpx.reducers import (
    between_processes,
    current_roll_call,
    declare_failed,
    roll_call,
    start_roll_call,
    stop_roll_call,
)
from tests.programs import free_port

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]

WORLD_SIZE = 4


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failed() -> None:
    declare_failed(LookupError("on purpose"))
    os._exit(1)


def asleep() -> None:
    threading.Event().wait(300)


def one_process(rank: int, port: int, lost: int, act: Callable[[], None], folder: Path) -> None:
    """A process of a group, in which one gets lost."""
    torch.set_num_threads(1)
    if act is asleep:
        roll_call.ROLL_CALL_SECONDS = 50.0  # everyone answers, on a busy machine a little later
        # The one that keeps the store finds out first, and long before the others have heard it.
        roll_call.POLL_SECONDS = 0.2 if rank == 0 else 2.5
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", address, timedelta(seconds=60), WORLD_SIZE, rank)
    # What starts may take long on a busy machine; that one sleeps is to be seen soon.
    timeout = timedelta(seconds=8 if rank == 0 else 13)
    group = distributed.new_group(timeout=timeout) if act is asleep else None
    reduces(rank, lost, act, folder, group)


def reduces(rank: int, lost: int, act: Callable[[], None], folder: Path, group: Any) -> None:
    """Reduces again and again; leaves what it was told when that failed."""
    start_roll_call()
    told = "nothing"
    try:
        for step in range(10):
            if step == 3 and rank == lost:
                act()
            between_processes("reduction", lambda: distributed.all_reduce(torch.ones(10), group=group))
    except CollectiveError as error:
        told = str(error)
    (folder / str(rank)).write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


def told_to_survivors(target: Any, lost: int, act: Callable[[], None], folder: Path) -> list[tuple[int, str]]:
    """The ranks that are left, and what each was told, when all have run ``target``."""
    fork = multiprocessing.get_context("fork")
    port = free_port()
    processes = [fork.Process(target=target, args=(rank, port, lost, act, folder)) for rank in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    try:
        survivors = [rank for rank in range(WORLD_SIZE) if rank != lost]
        for rank in survivors:
            processes[rank].join(200)
        return [(rank, json.loads((folder / str(rank)).read_text())) for rank in survivors]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(("lost", "act"), [(2, killed), (1, killed), (3, failed), (0, killed), (2, asleep)])
def test_the_survivors_name_the_lost_process_and_no_other(lost: int, act: Callable[[], None], tmp_path: Path) -> None:
    for rank, told in told_to_survivors(one_process, lost, act, tmp_path):
        assert f"Process {rank} lost rank {lost} of 4 processes during reduction:" in told
        assert ("failed with LookupError" in told) is (act is failed)
        assert ("is in wait" in told) is (act is asleep)


def two_runs(rank: int, port: int, lost: int, act: Callable[[], None], folder: Path) -> None:
    """Of the first run rank 1 says that it failed, and the others hear it; then comes :func:`one_process`."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", address, timedelta(seconds=60), WORLD_SIZE, rank)
    start_roll_call()
    if rank == 1:
        declare_failed(KeyError("of the first run"))
    distributed.barrier()
    if rank != 1:
        # None waits in a collective now, so that the one who says so is the only one to be named.
        assert current_roll_call().lost() == {1: "failed with KeyError"}
    distributed.barrier()
    if rank % 2:
        stop_roll_call()  # as at the end of a run, which not all of them may have come to
    reduces(rank, lost, act, folder, None)


def test_a_second_run_in_one_group_hears_nothing_of_the_first(tmp_path: Path) -> None:
    for rank, told in told_to_survivors(two_runs, 3, killed, tmp_path):
        assert f"Process {rank} lost rank 3 of 4 processes during reduction:" in told
        assert "KeyError" not in told
