"""Where a task runs, how large its models are, and what it records."""

import gzip
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import lightning_dpx

FIGURES = "{}.figures.json"


@dataclass(frozen=True, slots=True)
class Place:
    """A device, or what stands in its place.

    Attributes:
        kind: ``"cuda"`` or ``"sim"``.
        traces: The folder for recordings.
    """

    kind: str
    traces: Path

    @property
    def device(self) -> torch.device:
        """The first one."""
        return torch.device(self.kind, 0)

    @property
    def is_real(self) -> bool:
        """Whether times and kernels mean anything here; models are small where they do not."""
        return self.kind == "cuda"

    @property
    def accelerator(self) -> str:
        """Its name for ``Trainer(accelerator=...)``."""
        return "gpu" if self.is_real else self.kind

    @property
    def module(self) -> Any:
        """``torch.cuda``, or what has its names."""
        return torch.get_device_module(self.kind)

    def prepare(self) -> None:
        """The first thing that a process does."""
        if not self.is_real:
            lightning_dpx.simulate(2)
            return
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def synchronize(self) -> None:
        """Waits for everything that is queued."""
        self.module.synchronize(self.device)

    def peak_of(self, step: Callable[[], object]) -> int:
        """Bytes that the allocator gave out at the most during ``step``, beyond what it had before."""
        self.synchronize()
        before = self.module.memory_allocated(self.device)
        self.module.reset_peak_memory_stats(self.device)
        step()
        self.synchronize()
        return int(self.module.max_memory_allocated(self.device)) - int(before)

    def seconds_of(self, step: Callable[[], object], rounds: int = 7) -> float:
        """The median of ``rounds`` steps, each waited for, after one that is not counted."""
        step()
        times = []
        for _ in range(rounds):
            self.synchronize()
            start = time.perf_counter()
            step()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return median(times)

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """Every allocation and kernel of the block, in a snapshot and a trace; nothing on simulated devices."""
        if not self.is_real:
            yield
            return
        self.traces.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        try:
            with torch.profiler.profile(activities=kinds) as profiler:
                yield
                self.synchronize()
            with gzip.open(self.traces / f"{name}.memory.pickle.gz", "wb") as file:
                pickle.dump(torch.cuda.memory._snapshot(), file)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        plain = self.traces / f"{name}.kernels.json"
        profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(f"{plain}.gz", "wb") as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
