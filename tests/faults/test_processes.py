"""Cases 72 to 77 of the table of faults: several processes, each with its own replicas."""

import contextlib
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.conftest import SIMULATED, assert_equal
from tests.lightning.processes.test_processes import one_device
from tests.programs import free_port

# The deadlines are for machines that have ten other things to do; an idle one needs a few seconds.
pytestmark = [pytest.mark.timeout(600), pytest.mark.processes]
DEADLINE = 250  # seconds until a process that does not end is an error

PROGRAM = Path(__file__).with_name("process_program.py")
on_sim = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


@contextlib.contextmanager
def started(case: str, folder: Path, ranks: tuple[int, ...] = (0, 1), **more: str) -> Iterator[list[Any]]:
    """The processes of a run, as a cluster's launcher would start them: one per node; killed in the end."""
    cluster = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    processes = [
        programs.start(PROGRAM, case, folder, environment={**cluster, "NODE_RANK": str(rank)}, joint=True)
        for rank in ranks
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def outcome(case: str, folder: Path, ranks: tuple[int, ...] = (0, 1), **more: str) -> list[tuple[int, str]]:
    """Exit status and output of every process; a process that does not end in time is an error."""
    with started(case, folder, ranks, **more) as processes:
        printed = [process.communicate(timeout=DEADLINE)[0] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]


IN_VAIN: dict[str, tuple[str, tuple[int, ...]]] = {  # a name, a case, and the ranks that are started
    "stopped": ("stopped", (0, 1)),
    "no rank 0": ("alone", (1,)),
    "no address": ("alone", (1,)),
    "no port 0": ("taken", (0,)),
    "no port 1": ("taken", (1,)),
}


@pytest.fixture(scope="module", autouse=True)
def in_vain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[list[Any], str]]]:
    """Programs that end when their time is over: they wait while other tests run. With the port of each."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, (case, ranks) in IN_VAIN.items():
            more: dict[str, str] = {"MASTER_ADDR": "nowhere.invalid"} if name == "no address" else {}
            if case == "taken":
                other = stack.enter_context(socket.socket())
                other.bind(("127.0.0.1", 0))
                other.listen()
                more["MASTER_PORT"] = str(other.getsockname()[1])
            folder = tmp_path_factory.mktemp("in_vain")
            processes = stack.enter_context(started(case, folder, ranks, **more))
            found[name] = processes, more.get("MASTER_PORT", "")
        yield found


def end_of(processes: list[Any]) -> tuple[int, str]:
    """Exit status and output of the first of them."""
    printed = processes[0].communicate(timeout=DEADLINE)[0]
    return processes[0].returncode, printed


def by_case(results: list[tuple[int, str]], cases: list[str]) -> list[dict[str, str]]:
    """What each process printed in each of ``cases``, all of which it must have reached."""
    parts = [re.split(r"^case (.*):$", printed, flags=re.MULTILINE)[1:] for _, printed in results]
    assert all(part[::2] == cases for part in parts), results
    return [dict(zip(part[::2], part[1::2], strict=True)) for part in parts]


def weights(case: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"{case}_{rank}.pt", weights_only=True) for rank in range(2)]


@on_sim
@pytest.mark.parametrize("case", ["replicas", "replicas-colocate"])
def test_case_72_nodes_with_different_numbers_of_replicas_train_to_the_weights_of_one_device(
    case: str, tmp_path: Path
) -> None:
    for status, printed in outcome(case, tmp_path):
        assert status == 0, printed
    first, second = weights(case, tmp_path)
    assert_equal(second, first, bitwise=True)
    assert_equal(first, one_device(precision="64-true"))


REFUSED = {
    "dtype": r"parameter net\.2\.weight is .*float32 on rank 0 and .*float64 on rank 1",
    "buffer": r"buffer extra is .*\[3\].* on rank 0 and .*\[7\].* on rank 1",
    "buffer-missing": r"buffer extra is .*\[7\].* on rank 0 and missing on rank 1",
    "gradient_buckets": "gradient_buckets is 8 on rank 0 and 1 on rank 1",
    "reducer": "reducer is auto on rank 0 and colocate on rank 1",
    "accumulate": "accumulate_grad_batches is 1 on rank 0 and 3 on rank 1",
    "precision": "precision is 32-true on rank 0 and bf16-mixed on rank 1",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes printed, by case; one run after the other, as a refusal leaves both usable."""
    return by_case(outcome(",".join(REFUSED), tmp_path_factory.mktemp("refused")), list(REFUSED))


@on_sim
@pytest.mark.parametrize("case", REFUSED)
def test_case_73_what_differs_between_the_ranks_is_refused_at_setup_by_name(
    case: str, refusals: list[dict[str, str]]
) -> None:
    for printed in refusals:
        assert "refused after" in printed[case], printed
        assert re.search(REFUSED[case], printed[case]), printed[case]


@pytest.mark.parametrize("case", ["raises", "killed-between", "killed-elsewhere"])
def test_case_74_a_process_that_raises_or_is_killed_is_named_and_the_others_end(case: str, tmp_path: Path) -> None:
    with started(case, tmp_path) as processes:
        printed = processes[0].communicate(timeout=DEADLINE)[0]
        assert processes[0].returncode == 1, printed
        assert "Process 0 lost rank 1 of 2 processes during" in printed, printed
        if case == "raises":
            assert "LookupError: on purpose" in processes[1].communicate(timeout=DEADLINE)[0]
            assert processes[1].returncode == 1


def test_case_74_the_loss_of_rank_0_is_told_by_rank_1(tmp_path: Path) -> None:
    """Rank 0 keeps the store that the roll is called with."""
    with started("endless", tmp_path) as processes:
        while not (tmp_path / "running_0").exists():
            with contextlib.suppress(subprocess.TimeoutExpired):  # without taking its processor from it
                raise AssertionError(processes[0].wait(0.1), processes[0].communicate()[0])
        processes[0].send_signal(signal.SIGKILL)
        printed = processes[1].communicate(timeout=DEADLINE)[0]
        assert processes[1].returncode == 1, printed
        assert "Process 1 lost rank 0 of 2 processes during" in printed, printed


def test_case_75_uneven_numbers_of_batches_end_together_or_with_an_error(tmp_path: Path) -> None:
    results = outcome("batches", tmp_path)
    if any(status for status, _ in results):
        for status, printed in results:
            assert status == 1, printed
            assert "batches" in printed, printed
    else:
        first, second = weights("batches", tmp_path)
        assert_equal(second, first, bitwise=True)


@pytest.mark.parametrize(("case", "told"), [("sigterm", 1), ("sigterm-first", 0)])
def test_case_76_sigterm_at_one_rank_stops_all_at_the_same_step(case: str, told: int, tmp_path: Path) -> None:
    results = outcome(case, tmp_path)
    for status, printed in results:
        assert status == 128 + signal.SIGTERM, printed
        assert "SIGTERMException at step 8, batch 12" in printed, results
        assert f"SIGTERM told rank {told} of 2 processes to stop" in printed, printed
        assert "CollectiveError" not in printed, "told to stop, not left alone"


# Who was told, the last step, and the last batch of the last evaluation.
STOPPED: dict[str, tuple[int | str, int, int | None]] = {
    "sigterm-all": ("0, 1", 8, 12),
    "sigterm-forward": (1, 8, 12),
    "sigterm-update": (0, 8, 12),  # after the reduction of step 7
    "sigterm-accumulated": (1, 4, 1),  # no gradients of batches that accumulate are lost
    "sigterm-manual": (1, 2, 1),  # told in the step's own backward, where gradients meet
    "sigterm-last": (1, 6, 12),
    "sigterm-sanity": (1, 0, 2),
    "sigterm-validation": (1, 3, 4),
    "sigterm-uneven": (1, 3, None),  # nobody can meet before the end
    "sigterm-validate": (1, 0, None),
    "sigterm-test": (1, 0, 4),
    "sigterm-predict": (0, 0, 4),
}


@pytest.fixture(scope="module")
def stops(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes printed, by case; one run after the other."""
    return by_case(outcome(",".join(STOPPED), tmp_path_factory.mktemp("stopped")), list(STOPPED))


@pytest.mark.parametrize("case", STOPPED)
def test_case_76_sigterm_at_any_moment_stops_all_at_the_same_step(case: str, stops: list[dict[str, str]]) -> None:
    told, step, batches = STOPPED[case]
    for rank, printed in enumerate(stops):
        last = (12, 8)[rank] if batches is None else batches
        assert f"SIGTERMException at step {step}, batch {last}\n" in printed[case], stops
        assert f"exit status {128 + signal.SIGTERM}" in printed[case], printed[case]
        assert f"SIGTERM told rank {told} of 2 processes to stop" in printed[case], printed[case]
        assert ("the user's own handler" in printed[case]) == (str(rank) in str(told))


def test_case_74_a_process_that_stops_is_named_and_the_others_end(in_vain: dict[str, tuple[list[Any], str]]) -> None:
    status, printed = end_of(in_vain["stopped"][0])
    assert status == 1, printed
    assert "Process 0 lost rank 1 of 2 processes during" in printed, printed


def test_case_77_who_waits_in_vain_says_for_whom_and_where(in_vain: dict[str, tuple[list[Any], str]]) -> None:
    status, printed = end_of(in_vain["no rank 0"][0])
    assert status == 1
    assert re.search(r"Process 1 of 2 waited 4 s at 127\.0\.0\.1:\d+ for the others", printed), printed


@pytest.mark.parametrize("rank", [0, 1])
def test_case_77_a_port_that_somebody_else_has_is_an_error_in_time(
    rank: int, in_vain: dict[str, tuple[list[Any], str]]
) -> None:
    processes, port = in_vain[f"no port {rank}"]
    status, printed = end_of(processes)
    assert status == 1
    assert re.search(rf"Process {rank} of 2 .*127\.0\.0\.1:{port}", printed), printed


def test_case_77_an_address_that_is_not_there_is_an_error_in_time(in_vain: dict[str, tuple[list[Any], str]]) -> None:
    status, printed = end_of(in_vain["no address"][0])
    assert status == 1
    assert re.search(r"Process 1 of 2 .*nowhere\.invalid", printed), printed
