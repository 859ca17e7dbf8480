"""The script for a machine with a GPU goes on after a failure, keeps what it found, and repeats only what failed."""

import json
import os
import select
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SIMULATED
from tests.gpu.place import Place
from tests.gpu.session import TASKS, Task, main, run_tasks

_PASSES = Task("passes", command=("-c", "print('here')"))
_FAILS = Task("fails", command=("-c", "import sys; sys.exit(3)"))
_HANGS = Task("hangs", command=("-c", "import time; time.sleep(600)"), seconds=1)


def test_it_goes_on_after_a_failure_and_then_repeats_only_that(tmp_path: Path, capsys: Any) -> None:
    summary = run_tasks([_FAILS, _HANGS, _PASSES], tmp_path, "sim", minutes=5)
    ends = {name: entry["end"] for name, entry in summary.items()}
    assert ends == {"fails": "exit status 3", "hangs": "stopped after 1 s", "passes": "passed"}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        log = archive.extractfile("logs/passes.log")
        assert log is not None
        assert log.read() == b"here\n"
    capsys.readouterr()
    again = run_tasks([_FAILS, _PASSES], tmp_path, "sim", minutes=5)
    assert again["passes"] == summary["passes"], "it has passed before"
    assert capsys.readouterr().out.split()[0] == "fails"


def test_a_task_is_stopped_with_all_processes_that_it_has_started(tmp_path: Path) -> None:
    """Else one of them would hold the device for all tasks to come."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = f"f = open({str(pipe)!r}, 'w'); import time; time.sleep(600)"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    task = Task("starts_another", command=("-c", text), seconds=3)
    # Without waiting for a writer, which the task starts.
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        run_tasks([task], tmp_path / "out", "sim", 5)
        readable, _, _ = select.select([end], [], [], 30)
        assert readable, "the last writer has not ended"
        assert os.read(end, 1) == b""
    finally:
        os.close(end)


@pytest.mark.parametrize(("is_timed", "status"), [(False, "passed"), (True, "exit status 1")])
def test_tasks_that_run_side_by_side_share_the_cores(
    is_timed: bool, status: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    task = Task("threads", command=("-c", "import os; assert os.environ['OMP_NUM_THREADS'] == '2'"), is_timed=is_timed)
    assert run_tasks([task], tmp_path, "sim", minutes=5)["threads"]["end"] == status


def test_what_there_is_no_time_for_is_said_to_be_open(tmp_path: Path) -> None:
    assert run_tasks([_PASSES], tmp_path, "sim", minutes=0) == {"passes": {"end": "not reached"}}


def test_a_task_that_is_stopped_leaves_the_last_figures_that_are_whole(tmp_path: Path, monkeypatch: Any) -> None:
    place = Place("sim", tmp_path, tmp_path / "task.figures.json")
    place.tell({"steps": 1})

    def stopped(path: Path, text: str) -> None:
        with open(path, "w") as file:
            file.write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        place.tell({"steps": 2})
    assert json.loads(place.figures.read_text()) == {"steps": 1}


def test_few_files_and_no_large_ones_are_copied_after_each_task(tmp_path: Path) -> None:
    """A machine that gives back eight files of 16 MiB at the most has no room for a log and a folder of each task."""
    out, copies = tmp_path / "out", tmp_path / "copies"
    traces = out / "traces" / "passes"
    traces.mkdir(parents=True)
    (traces / "large").write_bytes(os.urandom(17 * 2**20))
    (traces / "small").write_bytes(b"kept")
    run_tasks([_FAILS, _PASSES], out, "sim", minutes=5, copies=copies)
    assert sorted(path.name for path in copies.iterdir()) == ["logs.tar.gz", "summary.json", "traces.tar.gz"]
    with tarfile.open(copies / "traces.tar.gz") as archive:
        assert archive.getnames() == ["traces/passes/small"]
    with tarfile.open(copies / "logs.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["logs/fails.log", "logs/passes.log"]


def test_an_unknown_task_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="pass: no such task; there are passes"):
        run_tasks([_PASSES], tmp_path, "sim", minutes=1, only=["pass"])


def test_every_file_with_tests_for_a_gpu_is_run() -> None:
    root = Path(__file__).parents[2]
    texts = {path: path.read_text() for path in root.glob("tests/**/*.py") if path != Path(__file__)}
    marked = {str(path.relative_to(root)) for path, text in texts.items() if "mark.gpu" in text}
    (task,) = (task for task in TASKS if task.name == "marked_tests")
    assert {part for part in task.command if part.endswith(".py")} == marked


@pytest.mark.slow
@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_every_task_passes_on_simulated_devices(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--device", "sim", "--minutes", "60"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text()).keys() == {task.name for task in TASKS}
