"""Steps on more rows than a loader's batches have, timed: what a row takes is another thing with many of them.

items of the data set --collated as by a loader with that batch size, and through the hooks of the run--> a batch
    --a step on it, beside the line through steps on fewer rows--> by how much larger steps are slower

Beyond the caches of a processor every row takes longer. An accelerator that waits for the host on few rows takes no
longer for more of them, up to where it has enough to do.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_dpx.devices import free_bytes
from lightning_dpx.errors import describe_error
from lightning_dpx.lightning.lightning_api import LightningModule, Trainer, rank_zero_warn
from lightning_dpx.lightning.lightning_compat import before_batch_transfer
from lightning_dpx.lightning.memory.dry_run.step_profiles import StepProfiles
from lightning_dpx.lightning.tuning.profiles_by_rows import ProfilesByRows
from lightning_dpx.memory import Profile

_LONGEST_STEP = 0.5  # seconds: a longer one is beyond all caches as it is, and takes too long to be timed
_LONGEST_LOADING = 2.0  # seconds
_ROOM = 0.5  # of what is free: the step is there a second time, with its gradients


@dataclass(frozen=True, slots=True)
class Slowdown:
    """By how much steps take longer, or less long, than on the line through two steps on few rows.

    Attributes:
        start: Rows up to which steps are on the line.
        end: Rows of the step that was timed.
        factor: The time of that step over the one on the line.
        growth: The time on the line of that many rows, over the one of ``start`` rows.
    """

    start: int = 0
    end: int = 1
    factor: float = 1.0
    growth: float = 1.0

    def at(self, rows: int) -> float:
        """The factor of a step on ``rows`` rows.

        What makes rows slower grows evenly up to the rows that were timed. Where they were faster, the time does.
        """
        # Up to there the line has been measured.
        if rows <= self.start:
            return 1.0
        # Beyond the rows that were timed it goes on as it was there: nothing is out of the caches twice.
        share = min(1.0, (rows - self.start) / (self.end - self.start))
        if self.factor >= 1.0:
            return 1.0 + share * (self.factor - 1.0)
        # A factor that falls evenly on a line that rises would make steps in between the slowest of all.
        seconds = 1.0 + share * (self.factor * self.growth - 1.0)
        return seconds / (1.0 + share * (self.growth - 1.0))


def rows_worth_timing(
    candidates: Iterable[int],
    step: Callable[[int], Profile],
    current: int,
    seconds_of_a_row: float,
    home: torch.device,
) -> int | None:
    """The most rows above ``current`` on which a step can be timed in passing; ``None`` where there are none.

    Args:
        candidates: Numbers of rows to choose from.
        step: The step on so many rows, as the line says.
        current: Rows of a batch of the loader.
        seconds_of_a_row: What loading one takes.
        home: Where the step would run.
    """
    room = _ROOM * free_bytes(home)
    for rows in sorted(candidates, reverse=True):
        if rows <= current:
            break
        expected = step(rows)
        is_short = expected.step_seconds <= _LONGEST_STEP and rows * seconds_of_a_row <= _LONGEST_LOADING
        if is_short and expected.peak <= room:
            return rows
    return None


def larger_batch(trainer: Trainer, module: LightningModule, rows: int) -> tuple[Any, int] | None:
    """A batch of ``rows`` rows, as the training step would get it from a loader with that batch size, and its rows.

    Returns:
        Fewer rows, where loading takes its time. ``None`` where no such batch can be made: of a data set that can only
        be gone through, of several loaders, of batches that a sampler composes; announced, where collating fails.
    """
    # Lightning gives what the user gave: one loader, or any collection of them.
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    try:
        items = _first_items(loader, rows)
        # In the order in which the loops call them.
        batch = trainer.precision_plugin.convert_input(loader.collate_fn(items))
        batch = before_batch_transfer(module, batch)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0), len(items)
    except Exception as error:  # noqa: BLE001  whatever the data set, its collating and the hooks of the run are
        rank_zero_warn(
            f"dpx: the time of larger batches is taken from smaller ones alone: one of {rows} rows could not be made "
            f"({describe_error(error)})."
        )
        return None


def _first_items(loader: DataLoader[Any], count: int) -> list[Any]:
    """The first items of the data set, as many as two seconds give.

    The order of the sampler is the run's own, and is not drawn from.
    """
    until = time.monotonic() + _LONGEST_LOADING
    items: list[Any] = []
    while len(items) < count and time.monotonic() <= until:
        indices = list(range(len(items), min(count, len(items) + (loader.batch_size or 1))))
        # What loaders ask for where a data set has it.
        many = getattr(loader.dataset, "__getitems__", None)
        items += many(indices) if callable(many) else [loader.dataset[index] for index in indices]
    return items


class LargerStep(NamedTuple):
    """What a step on more rows than the loader's batches have tells, as far as one could be timed.

    Attributes:
        slowdown: How much slower it is than on the line through two smaller ones.
        busy_host: The share of its time in which the host was busy with it, or waited for the device.
    """

    slowdown: Slowdown = Slowdown()
    busy_host: float = 0.0


def timed_larger_step(
    trainer: Trainer,
    module: LightningModule,
    profiles: StepProfiles,
    whole: ProfilesByRows,
    candidates: Sequence[int],
    seconds_of_a_row: float,
) -> LargerStep:
    """Times a step on more rows, of ``candidates``, beside one on a batch of the loader."""
    current = whole.more
    known = rows_of_data(trainer)
    # A batch size that was asked for may be larger than the data set, and then so many items cannot be loaded.
    there = [rows for rows in candidates if known is None or rows <= known]
    rows = rows_worth_timing(there, whole, current, seconds_of_a_row, profiles.home)
    larger = None if rows is None else larger_batch(trainer, module, rows)
    if larger is None or larger[1] <= current:
        return LargerStep(busy_host=profiles.busy_host(current))
    batch, rows = larger
    try:
        measured = profiles.on_batch(batch, rows).timed(rows)
        # Timed again beside it: a profile may be of another day, from the cache.
        usual = profiles.timed(current)
    except Exception as error:  # noqa: BLE001  whatever the step does with so many rows
        rank_zero_warn(
            "dpx: the time of larger batches is taken from smaller ones alone: a step on "
            f"{rows} rows failed ({describe_error(error)})."
        )
        return LargerStep(busy_host=profiles.busy_host(current))
    expected = whole(rows).step_seconds / whole(current).step_seconds
    factor = measured.whole / usual.whole / expected
    return LargerStep(Slowdown(current, rows, factor, expected), measured.busy_host)


def rows_of_data(trainer: Trainer) -> int | None:
    """Rows of the data set that is trained on, where it tells."""
    data = getattr(trainer.train_dataloader, "dataset", None)
    try:
        # An iterable data set has no length, or raises where it is asked.
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
