"""``dpx bench step``: one training step of one device, of dpx and of DDP, on the same global batches.

Every job runs in processes of its own and all jobs of a model take turns, one chunk of steps each, so that a noisy
machine is equally noisy for all of them. DDP gets one process per replica and chooses its threads itself.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_dpx.bench.child import Child
from lightning_dpx.bench.job import MODES
from lightning_dpx.bench.models import MODELS
from lightning_dpx.bench.turns import rotated
from lightning_dpx.errors import BenchError
from lightning_dpx.units import MIB

WARM_UP = 2  # steps at the start of a chunk, while caches and thread pools wake up


@dataclass(frozen=True, slots=True)
class Result:
    """What one job cost.

    Attributes:
        step_ms: Median time of a step, in milliseconds.
        startup_s: From the start of the process to the end of the first step, in seconds.
        peak_mib: Peak resident memory of all its processes in MiB, pages of shared files counted once.
    """

    model: str
    mode: str
    devices: int
    step_ms: float
    startup_s: float
    peak_mib: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Job:
    """A child that trains on demand."""

    def __init__(self, model: str, mode: str, devices: int, chunks: int) -> None:
        self.model = model
        self.mode = mode
        self.devices = devices
        options = ["--devices", str(devices), "--chunks", str(chunks)]
        command = [sys.executable, "-m", "lightning_dpx.bench.job", model, mode, *options]
        self.step_seconds: list[float] = []
        # A file, because a pipe that nothing reads fills up and stops the job.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the job
        # The child tells the end of its first step by the same clock.
        self._started = time.time()
        self._child = Child(command, self._errors, own_session=True)  # DDP's other processes are ended with it
        self._startup = 0.0

    def wait_for_first_step(self) -> None:
        """The other jobs must not compete with the start of this one."""
        self._startup = self._read("first_step") - self._started

    def _read(self, key: str) -> Any:
        try:
            return self._child.read(key)
        except BenchError:
            self._end()
            self._errors.seek(0)
            # What went wrong stands at the end of a traceback.
            text = self._errors.read()[-2000:]
            what = f"The job {self.mode!r} on {self.model!r}"
            raise BenchError(f"{what} ended before it reported {key}:\n{text}") from None

    def run_chunk(self) -> None:
        """Trains one chunk while the other jobs wait."""
        self._child.tell("")
        self.step_seconds += self._read("step_seconds")[WARM_UP:]

    def result(self) -> Result:
        """Ends the job."""
        peak = self._read("peak_bytes") / MIB
        step = statistics.median(self.step_seconds) * 1e3
        return Result(self.model, self.mode, self.devices, step, self._startup, peak)

    def _end(self) -> None:
        process = self._child.process
        if process.poll() is None:
            # Not asked but killed: a job that hangs would not hear of it.
            os.killpg(process.pid, signal.SIGKILL)
        # Closes its pipes, and leaves no zombie.
        process.communicate()

    def close(self) -> None:
        """Ends the job, at once if it still runs."""
        self._end()
        self._errors.close()


def compare_steps(
    models: Sequence[str] = tuple(MODELS),
    modes: Sequence[str] = tuple(MODES),
    devices: int = 4,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Measures every mode on every model.

    Args:
        models: Names from ``MODELS``.
        modes: Names from ``MODES``.
        devices: Replicas of dpx and processes of DDP.
        rounds: Turns of every job.
        progress: Told what happens next.

    Raises:
        BenchError: a job failed; holds the end of its error output.
    """
    results: list[Result] = []
    for model in models:
        jobs: list[_Job] = []
        try:
            for mode in modes:
                progress(f"{model}: starting {mode}")
                jobs.append(_Job(model, mode, devices, rounds))
                jobs[-1].wait_for_first_step()
            for turn in range(rounds):
                progress(f"{model}: round {turn + 1} of {rounds}")
                for job in rotated(jobs, turn):
                    job.run_chunk()
            results += [job.result() for job in jobs]
        finally:
            # Also those that wait, where one of them has failed.
            for job in jobs:
                job.close()
    return results


def format_table(results: Sequence[Result]) -> str:
    """One row per job, with its ratio to the first job of the same model."""
    lines = [f"{'model':6} {'mode':15} {'step ms':>9} {'ratio':>6} {'start-up s':>10} {'peak MiB':>9}"]
    first: dict[str, Result] = {}
    for result in results:
        base = first.setdefault(result.model, result)
        lines.append(
            f"{result.model:6} {result.mode:15} {result.step_ms:9.3f} {result.step_ms / base.step_ms:6.2f} "
            f"{result.startup_s:10.2f} {result.peak_mib:9.0f}"
        )
    return "\n".join(lines)
