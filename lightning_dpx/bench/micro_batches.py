"""What micro-batches cost beside the same ones in a loop by hand: ``python -m lightning_dpx.bench.micro_batches``.

Processor time of a step, in milliseconds, in one thread; the median, and of several rounds in turn the least.
"""

import argparse
import statistics
import sys
import time
import warnings
from typing import Any

import torch

from lightning_dpx.bench.models import MODELS, Batch, BenchModel, BenchModule, ready_loader
from lightning_dpx.lightning import DPXStrategy
from lightning_dpx.lightning.lightning_api import Callback, Trainer, seed_everything

WARM_UP = 10  # steps that are not counted: rehearsal, caches, allocator


class ByHand(BenchModule):
    """Micro-batches as a user would write them, in manual optimization.

    Args:
        model: What to train.
        number: M, the micro-batches of a step.
    """

    def __init__(self, model: BenchModel, number: int) -> None:
        super().__init__(model)
        self.automatic_optimization = False
        self._number = number

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        """A loop over slices, each with its backward."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        rows = len(batch[0])
        for part in zip(*(tensor.tensor_split(self._number) for tensor in batch), strict=True):
            loss = super().training_step(part, batch_idx)
            # Each loss is a mean over its own rows, and the last part may have fewer.
            torch.autograd.backward(loss * (len(part[0]) / rows))
        optimizer.step()


class _StepTimes(Callback):
    """Notes the processor time from the end of a batch to the end of the next one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self._last = time.process_time()


def step_milliseconds(name: str, number: int, way: str, num_steps: int) -> float:
    """The processor time of a step, in milliseconds.

    Args:
        name: Of a model, from ``MODELS``.
        number: M, the micro-batches.
        way: ``"whole"`` (M is 1), ``"by hand"`` or ``"dpx"``.
        num_steps: Steps that are counted.
    """
    # All three ways begin with the same weights.
    seed_everything(0, verbose=False)
    model = MODELS[name]
    times = _StepTimes()
    trainer = Trainer(
        accelerator="cpu",
        # What is compared is the work for micro-batches alone.
        devices=1,
        strategy=DPXStrategy(micro_batches=number) if way == "dpx" else "auto",
        limit_train_batches=WARM_UP + num_steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    module = ByHand(model, number) if way == "by hand" else BenchModule(model)
    trainer.fit(module, ready_loader(model, model.batch_size))
    return statistics.median(times.seconds[WARM_UP:]) * 1e3


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["tiny", "deep"])
    parser.add_argument("--numbers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    # Processor time counts all threads, also those that only wait for work.
    torch.set_num_threads(1)
    ways = ("whole", "by hand", "dpx")
    sys.stdout.write(f"{'model':6} {'M':>3} {'whole ms':>9} {'by hand':>9} {'dpx':>9} {'dpx / by hand':>14}\n")
    for name in args.models:
        for number in args.numbers:
            rounds = [[step_milliseconds(name, number, way, args.steps) for way in ways] for _ in range(args.rounds)]
            # The least of the rounds: whatever else runs on the machine only adds to a time.
            whole, by_hand, ours = (min(column) for column in zip(*rounds, strict=True))
            sys.stdout.write(f"{name:6} {number:3} {whole:9.3f} {by_hand:9.3f} {ours:9.3f} {ours / by_hand:14.2f}\n")


if __name__ == "__main__":
    main()
