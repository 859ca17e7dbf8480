"""torch.profiler that sees what the replicas do in their threads."""

import atexit
import weakref
from pathlib import Path
from typing import Any

from lightning_dpx.lightning.lightning_api import PyTorchProfiler
from lightning_dpx.torch_compat import ProfilerConfig


class DPXProfiler(PyTorchProfiler):
    """Lightning's PyTorchProfiler, for all threads: torch.profiler alone records only the one that started it.

    Args:
        dirpath: Folder of the report; the logger's unless given.
        filename: Of the report, without its suffix; printed on standard output unless given.
        export_to_chrome: Write a trace for chrome://tracing or Perfetto beside it.
        row_limit: Rows of the table; -1 for all.
        sort_by_key: Of the table's columns, for example ``"cpu_time_total"``.
        options: Of Lightning's PyTorchProfiler, and of torch.profiler.profile, such as ``profile_memory=True``.

    Examples:
        >>> profiler = dpx.DPXProfiler(dirpath="profile", filename="steps", row_limit=10)
        >>> trainer = Trainer(strategy="dpx", accelerator="cpu", devices=2, profiler=profiler, **quiet)
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        **options: Any,
    ) -> None:
        # Without it a trace lacks all that runs in the workers of replicas.
        options.setdefault("experimental_config", ProfilerConfig(profile_all_threads=True))
        super().__init__(
            dirpath,
            filename,
            export_to_chrome=export_to_chrome,
            row_limit=row_limit,
            sort_by_key=sort_by_key,
            **options,
        )
        # A fit that fails leaves torch's profiler on, and with all threads watched the end of the process would be
        # a crash instead of the error of the fit.
        atexit.register(_stop, weakref.ref(self))


def _stop(profiler: "weakref.ref[DPXProfiler]") -> None:
    running = profiler()
    if running is not None:
        running.teardown(stage=None)
