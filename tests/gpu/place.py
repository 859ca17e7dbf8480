"""Where a task runs, how large its models are, and what it records."""

import gzip
import json
import pickle
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
Event = list[Any]
_MOST_BLOCKS = 200_000


@dataclass(frozen=True, slots=True)
class Place:
    """A device, or what stands in its place.

    Attributes:
        kind: ``"cuda"`` or ``"sim"``.
        traces: The folder for recordings.
        figures: The file for what a task has found so far.
    """

    kind: str
    traces: Path
    figures: Path

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

    def tell(self, figures: dict[str, Any]) -> None:
        """Writes down all that a task has found so far, also for one that will fail or be stopped."""
        # Beside it first: the session reads what a task has left that it stopped in the middle of this.
        new = self.figures.with_suffix(".new")
        new.write_text(json.dumps(figures))
        new.replace(self.figures)

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
        """What the block allocates, frees and runs, in a file; nothing on simulated devices.

        The file is JSON: ``blocks`` has what the allocator did, ``[action, address, bytes]`` in order; ``events`` what
        the profiler saw, ``[category, name, thread or stream, microseconds, duration, bytes, bytes in all]``, of which
        the last two are those of an allocation.
        """
        if not self.is_real:
            yield
            return
        torch.cuda.memory._record_memory_history(context=None, max_entries=_MOST_BLOCKS)
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        try:
            with torch.profiler.profile(activities=kinds, profile_memory=True) as profiler:
                yield
                self.synchronize()
            traced = torch.cuda.memory._snapshot()["device_traces"][self.device.index]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        blocks = [(entry["action"], entry["addr"], entry["size"]) for entry in traced]
        with gzip.open(self._file(name, "json"), "wt") as file:
            json.dump({"blocks": blocks, "events": self._events(profiler)}, file)

    def keep(self, name: str, what: object) -> None:
        """A pickled object beside the recordings, to be looked at elsewhere."""
        if self.is_real:
            with gzip.open(self._file(name, "pickle"), "wb") as file:
                pickle.dump(what, file)

    def _file(self, name: str, kind: str) -> Path:
        self.traces.mkdir(parents=True, exist_ok=True)
        return self.traces / f"{name.replace(' ', '_')}.{kind}.gz"

    def _events(self, profiler: torch.profiler.profile) -> list[Event]:
        """Those that last or allocate on the device, without what else a trace says of them."""
        whole = self.traces / "whole.json"
        profiler.export_chrome_trace(str(whole))
        found = json.loads(whole.read_text())["traceEvents"]
        whole.unlink()
        return [_event(one) for one in found if "dur" in one or one.get("name") == "[memory]"]


def read_recording(path: Path) -> dict[str, list[Event]]:
    """What :meth:`Place.recording` has written."""
    with gzip.open(path, "rt") as file:
        found: dict[str, list[Event]] = json.load(file)
    return found


def _event(one: dict[str, Any]) -> Event:
    args = one.get("args", {})
    amounts = [args.get("Bytes", 0), args.get("Total Allocated", 0)]
    place = args.get("Device Id", -1) if one["name"] == "[memory]" else one["tid"]
    return [one.get("cat", ""), one["name"], place, one["ts"], one.get("dur", 0), *amounts]
