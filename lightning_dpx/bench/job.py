"""One training job of the step bench, in processes of its own: ``python -m lightning_dpx.bench.job MODEL MODE ...``.

It trains one step, reports, and then trains one chunk of steps for every line that it reads, so that several jobs can
be measured in turn while the others wait. Reports are lines of JSON on standard output.
"""

import argparse
import json
import resource
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dpx.bench.models import MODELS, BenchModule, ready_loader
from lightning_dpx.lightning import DeviceMemoryMonitor, DeviceThroughputMonitor, DPXStrategy
from lightning_dpx.lightning.lightning_api import Callback, LightningModule, Trainer, seed_everything
from lightning_dpx.replicas import Execution


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to train: our strategy with an ``execution``, or one of Lightning's; ``devices`` if not what was asked."""

    strategy: str
    execution: Execution = "auto"
    devices: int | None = None
    watched: bool = False


# The first one is what the table compares the others with.
MODES = {
    "one device": Mode("auto", devices=1),
    "dpx, 1 replica": Mode("dpx", devices=1),
    "dpx": Mode("dpx"),
    "dpx, watched": Mode("dpx", watched=True),
    "dpx inline": Mode("dpx", "inline"),
    "dpx threads": Mode("dpx", "threads"),
    "ddp": Mode("ddp"),
}


class ObeyLines(Callback):
    """Waits for a line before every chunk of steps, on the process that reports."""

    def __init__(self, steps: int, chunks: int) -> None:
        self._steps = steps
        self._chunks = chunks
        self._left = 0
        self._times: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        """Notes the time since the end of the batch before; at the end of a chunk reports and waits."""
        # DDP's other processes are held by the next all-reduce.
        if not trainer.is_global_zero:
            return
        now = time.perf_counter()
        if trainer.global_step == 1:
            # By the clock on the wall, the one that this process shares with the one that
            # has started it.
            report(first_step=time.time())
        else:
            self._times.append(now - self._last)
            self._left -= 1
        if self._left <= 0:
            if self._times:
                report(step_seconds=self._times)
            self._times = []
            self._left = self._steps
            # After the last chunk nothing more is asked, and the fit ends.
            if self._chunks > 0:
                sys.stdin.readline()
            self._chunks -= 1
        # After the wait for a line, which is no part of the next step.
        self._last = time.perf_counter()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Sums the peak memory of all processes."""
        peak, shared = peak_memory()
        # Code and libraries are mapped into all processes and lie in memory once.
        own = torch.tensor(float(peak if trainer.is_global_zero else peak - shared))
        total = trainer.strategy.reduce(own, reduce_op="sum")
        if trainer.is_global_zero:
            report(peak_bytes=int(total))


def peak_memory() -> tuple[int, int]:
    """The peak resident bytes of this process, and those of its pages that all processes of the job share (files)."""
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, 0
    # VmHWM is the largest that was ever resident, which no look at one moment tells.
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    peak, shared = (int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "RssFile"))
    return peak, shared


def report(**values: Any) -> None:
    """Prints one line of JSON."""
    sys.stdout.write(json.dumps(values) + "\n")
    # The bench waits for this line.
    sys.stdout.flush()


def make_trainer(mode: Mode, devices: int, **options: Any) -> Trainer:
    """A Trainer without anything that is not training."""
    strategy = DPXStrategy(execution=mode.execution) if mode.strategy == "dpx" else mode.strategy
    return Trainer(
        accelerator="cpu",
        devices=mode.devices or devices,
        strategy=strategy,
        # The number of steps ends the fit, however long an epoch is.
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def main() -> None:
    """Runs the job that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--chunks", type=int, required=True)
    args = parser.parse_args()
    # Of the job only its reports should be seen, and its error if it fails.
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    model = MODELS[args.model]
    monitors = [DeviceMemoryMonitor(), DeviceThroughputMonitor()] if MODES[args.mode].watched else []
    trainer = make_trainer(
        MODES[args.mode],
        args.devices,
        max_steps=1 + args.chunks * model.steps,
        callbacks=[ObeyLines(model.steps, args.chunks), *monitors],
    )
    # Each process of DDP has a loader of its own; dpx cuts what one loader gives.
    rows = model.batch_size // (args.devices if args.mode == "ddp" else 1)
    trainer.fit(BenchModule(model), ready_loader(model, rows))


if __name__ == "__main__":
    main()
