"""A session on a machine with a GPU: what only such a machine can show, most important first.

    tests/gpu/run --out FOLDER                every task, on cuda:0
    tests/gpu/run --out FOLDER                once more: only what failed, or was not reached
    tests/gpu/run --out FOLDER --device sim   the same tasks, small, on simulated devices
    tests/gpu/run --out /tmp/gpu --copies $OUT      on a machine that gives back few files, and none that is large

Each task is a process of its own, so that none can spoil another, and the session goes on after a failure. Those that
time nothing run side by side first, because the device's hours are dear; then each of the others by itself. FOLDER
holds ``summary.json`` (per task: its end, its seconds, its figures), ``logs.tar.gz`` (what it printed) and
``traces.tar.gz`` (allocations and kernels, for whoever corrects a planner afterwards without a GPU), beside the files
that are packed there. All three are written anew after every task, and copied to the folder of ``--copies``: a session
that is cut off leaves what it had. An archive is kept below 16 MiB, and the largest files are left out of it.
"""

import argparse
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu.place import FIGURES, Place

_PYTHON = sys.executable
_THREADS_SIDE_BY_SIDE = "2"
_LARGEST_ARCHIVE = 16 * 2**20  # bytes, of a file that the machine gives back
_LEAST_SECONDS = 5.0  # under which no task is begun


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to be shown.

    Attributes:
        name: Of its log and its entry in the summary.
        function: ``module:function`` in ``tests.gpu``, called with a :class:`Place`; it returns figures, or fails.
        command: Instead of a function, the arguments of a Python of its own.
        seconds: After which it is stopped.
        is_timed: Whether its figures are times, which others that run beside it would spoil.
    """

    name: str
    function: str = ""
    command: tuple[str, ...] = ()
    seconds: int = 120
    is_timed: bool = False


# Warnings are printed: a new one of that machine's torch must not take the place of what a test shows.
# And options of a plugin that is missing are no error.
_PYTEST = ("-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu", "-rA")
# By name: other files need libraries that such a machine lacks, which ends a run, and take a minute to be collected.
_WITH_MARKED_TESTS = (
    "tests/devices/test_workspaces.py",
    "tests/faults/test_errors.py",
    "tests/gpu/test_cuda_calls.py",
    "tests/lightning/memory/test_planning.py",
    "tests/lightning/test_precision.py",
    "tests/lightning/test_shifts.py",
    "tests/memory/execute/recipes/test_attention.py",
    "tests/memory/execute/recipes/test_recurrent.py",
    "tests/memory/execute/test_offload.py",
    "tests/memory/profile/test_fake.py",
    "tests/reducers/test_nccl.py",
    "tests/replicas/test_caller_context.py",
    "tests/shifting/test_host.py",
)

TASKS = (
    Task("main_job", "main_job:digits"),
    Task("marked_tests", command=(*_PYTEST, *_WITH_MARKED_TESTS), seconds=240),
    Task("parity_one_device", "parity:one_device"),
    Task("parity_two_replicas", "parity:two_replicas_on_one_device"),
    Task("plans", "planning:budgets_are_kept", seconds=240, is_timed=True),
    Task("plans_dry", "planning:dry_plans_against_real_ones", seconds=120, is_timed=True),
    Task("offloading", "offloading:budget_kept_and_copies_hidden", is_timed=True),
    Task("scaler", "precision:one_replica_overflows"),
    Task("jobs_gpt2", "jobs:gpt2", seconds=240),
    Task("jobs_gpt2_replicas", "jobs:gpt2_replicas", seconds=240),
    Task("jobs_vit", "jobs:vit", seconds=240),
    Task("jobs_vit_replicas", "jobs:vit_replicas", seconds=240),
    Task("jobs_convnext", "jobs:convnext", seconds=240),
    Task("jobs_convnext_replicas", "jobs:convnext_replicas", seconds=240),
    Task("out_of_memory", "out_of_memory:replanned"),
    Task("host_time", "speed:host_time_of_a_step", is_timed=True),
    Task("step_time", "speed:step_time_at_the_peak_of_peers", seconds=240, is_timed=True),
    Task("step_time_filled", "speed:step_time_of_a_filled_device", seconds=240, is_timed=True),
    Task("compiled", "speed:step_time_at_the_peak_of_compiled_code", seconds=240, is_timed=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tasks and prints a table; the exit status is the number of tasks that did not pass."""
    options = _parse(arguments)
    if options.task is not None:
        traces = options.out / "traces" / options.task
        return _run_here(options.task, Place(options.device, traces, options.out / FIGURES.format(options.task)))
    summary = run_tasks(TASKS, options.out, options.device, options.minutes, only=options.only, copies=options.copies)
    failed = [name for name, entry in summary.items() if entry["end"] != "passed"]
    print(f"{len(summary) - len(failed)} of {len(summary)} passed" + (f"; not: {', '.join(failed)}" if failed else ""))
    return len(failed)


def run_tasks(
    tasks: Sequence[Task],
    out: Path,
    device: str,
    minutes: float,
    *,
    only: Sequence[str] = (),
    copies: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Runs those of ``tasks`` that have not passed before, or ``only`` these; tells how each ended.

    After each of them, the summary and the archives are in ``copies``, too.

    Raises:
        SystemExit: ``only`` names none of them.
    """
    names = [task.name for task in tasks]
    if unknown := set(only) - set(names):
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: no such task; there are {', '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    summary = _read(out / "summary.json")
    deadline = time.monotonic() + 60 * minutes
    asked = [
        task for task in tasks if (task.name in only if only else summary.get(task.name, {}).get("end") != "passed")
    ]
    together = [task for task in asked if not task.is_timed]
    alone = [task for task in asked if task.is_timed]

    def note(task: Task, entry: dict[str, Any]) -> None:
        summary[task.name] = entry
        if "seconds" in entry:
            print(_line(task.name, entry), flush=True)
        _write(out, summary)
        if copies is not None:
            _copy(out, copies)

    # A thread for each process, which waits for its end.
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        running = {pool.submit(_run_until, deadline, task, device, out): task for task in together}
        for future in as_completed(running):
            note(running[future], future.result())
    for task in alone:
        note(task, _run_until(deadline, task, device, out))
    return summary


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for summary.json, logs and traces")
    parser.add_argument("--copies", type=Path, help="folder of the summary and the archives alone, as well")
    parser.add_argument("--device", choices=["cuda", "sim"], default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="what is not begun by then is left out")
    parser.add_argument("--only", nargs="*", default=[], metavar="TASK", help="these tasks, whatever they did before")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    return options


def _run_until(deadline: float, task: Task, device: str, out: Path) -> dict[str, Any]:
    """How a task ended, unless there is no time left for it."""
    left = deadline - time.monotonic()
    if left < _LEAST_SECONDS:
        return {"end": "not reached"}
    return _run(task, device, out, min(left, task.seconds))


def _run(task: Task, device: str, out: Path, seconds: float) -> dict[str, Any]:
    """A task in a process of its own, its output in a log."""
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    figures = out / FIGURES.format(task.name)
    figures.unlink(missing_ok=True)
    start = time.monotonic()
    with open(logs / f"{task.name}.log", "wb") as log:
        command = _command(task, device, out)
        # A group of its own, so that it is stopped with all processes that it has started; not a session, which would
        # outlive this one where that is stopped.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=_environment(task, device), process_group=0
        )
        try:
            status = process.wait(timeout=seconds)
            end = "passed" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end = f"stopped after {seconds:.0f} s"
    entry: dict[str, Any] = {"end": end, "seconds": round(time.monotonic() - start, 1)}
    if figures.exists():
        entry["figures"] = json.loads(figures.read_text())
        figures.unlink()
    return entry


def _command(task: Task, device: str, out: Path) -> list[str]:
    if task.command:
        return [_PYTHON, *task.command]
    return [_PYTHON, "-m", "tests.gpu.session", "--out", str(out), "--device", device, "--task", task.name]


def _environment(task: Task, device: str) -> dict[str, str]:
    """With the workspaces that make cuBLAS deterministic; no simulated devices beside real ones."""
    simulate = {} if device == "sim" else {"DPX_TESTS_SIMULATE": "0"}
    # Plans whose speed nobody looks at are made from fewer timed steps.
    timing = {} if task.is_timed else {"LIGHTNING_DPX_TIMING": "quick"}
    # Those that run side by side would each take a thread of torch for every core.
    threads = {} if task.is_timed else {"OMP_NUM_THREADS": _THREADS_SIDE_BY_SIDE}
    return os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | simulate | timing | threads


def _run_here(name: str, place: Place) -> int:
    (task,) = (task for task in TASKS if task.name == name)
    module_name, _, function_name = task.function.partition(":")
    place.prepare()
    faulthandler.dump_traceback_later(0.9 * task.seconds)  # where a task is that will be stopped
    function = getattr(import_module(f"tests.gpu.{module_name}"), function_name)
    figures = function(place)
    place.tell(figures)
    print(json.dumps(figures, indent=2))
    return 0


def _read(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _write(out: Path, summary: dict[str, dict[str, Any]]) -> None:
    """Each file beside itself first, so that a session that is cut off leaves the last whole one."""
    new = out / "summary.json.new"
    new.write_text(json.dumps(summary, indent=2))
    new.replace(out / "summary.json")
    for folder in ("logs", "traces"):
        if (out / folder).exists():
            packed = out / f"{folder}.tar.gz.new"
            _pack(out / folder, packed)
            packed.replace(out / f"{folder}.tar.gz")


def _pack(folder: Path, packed: Path) -> None:
    """An archive of all files of ``folder``, or of as many of the smaller ones as fit."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    while True:
        with tarfile.open(packed, "w:gz") as archive:
            for path in files:
                archive.add(path, path.relative_to(folder.parent))
        if packed.stat().st_size < _LARGEST_ARCHIVE:
            return
        print(f"{packed.stem} would be too large: {files.pop()} is left out", flush=True)


def _copy(out: Path, copies: Path) -> None:
    copies.mkdir(parents=True, exist_ok=True)
    for name in ("summary.json", "logs.tar.gz", "traces.tar.gz"):
        if (out / name).exists():
            shutil.copyfile(out / name, copies / name)


def _line(name: str, entry: dict[str, Any]) -> str:
    return f"{name:24}{entry['end']:28}{entry.get('seconds', 0):6.1f} s"


if __name__ == "__main__":
    sys.exit(main())
