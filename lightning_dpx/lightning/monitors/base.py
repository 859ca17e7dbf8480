"""What callbacks that report have in common: when a step is measured, and where its figures go."""

import csv
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_dpx.arguments import is_whole_number
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.lightning_api import Trainer, rank_zero_info, rank_zero_only
from lightning_dpx.lightning.lightning_compat import RICH_IS_AVAILABLE, steps_for_logs

WARM_UP = 2  # the first steps are always measured: the second is the first with optimizer state


class Pace:
    """Which steps of a fit are measured.

    Args:
        every_n_steps: Each so many; the trainer's ``log_every_n_steps`` unless given.

    Raises:
        ConfigurationError: it is no positive integer.
    """

    def __init__(self, every_n_steps: int | None) -> None:
        is_positive = is_whole_number(every_n_steps) and every_n_steps >= 1
        if every_n_steps is not None and not is_positive:
            raise ConfigurationError(f"every_n_steps={every_n_steps!r} is not allowed; give a positive integer.")
        self._every = every_n_steps
        self._steps = 0

    def restart(self) -> None:
        """Begins to count anew, for another fit."""
        self._steps = 0

    def step(self, trainer: Trainer) -> bool:
        """Counts a step; whether it is measured."""
        self._steps += 1
        # A log_every_n_steps of 0 turns logs off, and nothing can be divided by it.
        every = self._every or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self._steps <= WARM_UP or (every > 0 and self._steps % every == 0)


def check_file(save_to: str | Path | None) -> Path | None:
    """The path of a report.

    Raises:
        ConfigurationError: it is neither CSV nor JSON.
    """
    path = None if save_to is None else Path(save_to)
    # When the callback is made, not hours later when fit ends and the rows are written.
    if path is not None and path.suffix not in (".csv", ".json"):
        raise ConfigurationError(f"save_to={str(save_to)!r} is not allowed; name a .csv or a .json file.")
    return path


def check_writable(name: str, path: Path | None) -> None:
    """Checks before training that a file can be written after it.

    Args:
        name: The argument that named the file.
        path: The file, if there shall be one; folders on its way are made later.

    Raises:
        ConfigurationError: it cannot be written; says why.
    """
    if path is None:
        return
    # The root exists in any case, so there is always one.
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        reason = "that is a folder"
    elif not folder.is_dir():
        reason = f"{folder} is no folder"
    # Asked of the system without opening the file, which would empty a report of an earlier fit.
    elif path.exists() and not os.access(path, os.W_OK):
        reason = "the file may not be written"
    elif not path.exists() and not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{folder} may not be written"
    else:
        return
    raise ConfigurationError(f"{name}={str(path)!r} cannot be written: {reason}. Name another file.")


class RowsFile:
    """What a fit has measured so far, the file that it is for, and whether there is anything in it that was not told.

    Args:
        save_to: A ``.csv`` or a ``.json`` file, or ``None``: then rows are counted and not kept.

    Attributes:
        has_news: Whether something was measured since the last report.

    Raises:
        ConfigurationError: the file is neither CSV nor JSON.
    """

    def __init__(self, save_to: str | Path | None) -> None:
        self._path = check_file(save_to)
        self._rows: list[Mapping[str, Any]] = []
        self.has_news: bool = False

    def restart(self) -> None:
        """Forgets the fit before; looks whether the file can be written.

        Raises:
            ConfigurationError: it cannot.
        """
        # Before the check: a fit that ends with its error has nothing to report.
        self._rows = []
        self.has_news = False
        check_writable("save_to", self._path)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds what one step has shown."""
        self.has_news = True
        # A long fit has many, which only a file is for.
        if self._path is not None:
            self._rows += rows

    def write(self, trainer: Trainer) -> None:
        """Writes all rows on rank 0; warns where that fails, as the fit itself went on until here."""
        path = self._path
        if path is None or not trainer.is_global_zero:
            return
        # A fit that was continued after its last step must not empty the report of the one before.
        if not self._rows and path.exists():
            return
        with warn_unless_written(path):
            write_rows(path, self._rows)


@contextmanager
def warn_unless_written(path: Path) -> Iterator[None]:
    """Makes a warning of an error of the file system.

    A disk that is full by the end of a fit must not cost the trained weights, and after another error it must
    not take that error's place.
    """
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"The report {path} is not written: {error.strerror or error}. The fit itself is not concerned.",
            stacklevel=3,
        )


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows of equal keys, as CSV with a header or as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
        return
    # As the csv module wants it: with translated line ends, Windows would have blank rows between.
    with path.open("w", newline="") as file:
        # A fit without a measured step still leaves a file that tools can read.
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["step"])
        writer.writeheader()
        writer.writerows(rows)


def log_figures(trainer: Trainer, figures: dict[tuple[str, ...], float], step: int) -> None:
    """Gives figures to every logger, under ``dpx/...``, in names that none of them changes."""
    for logger in trainer.loggers:
        # Loggers group figures by different signs, and replace those that they do not allow.
        named = {logger.group_separator.join(("dpx", *parts)): value for parts, value in figures.items()}
        logger.log_metrics(named, step=step)


def steps_taken(trainer: Trainer) -> int:
    """The count that Lightning's own logs have on their x-axis."""
    return int(steps_for_logs(trainer))


def short_name(device: torch.device) -> str:
    """``cuda1``: without the colon, which some loggers replace."""
    return f"{device.type}{'' if device.index is None else device.index}"


def format_rows(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table, its cells aligned to the right."""
    everything = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]
    lines = [title]
    for row in everything:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def show_rows(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table on rank 0: with rich on a terminal that has it, as plain text otherwise."""
    # Imported here, as rich is no requirement and takes a while to import.
    if RICH_IS_AVAILABLE:
        from rich.console import Console
        from rich.table import Table

        # On stderr, where logging writes: standard output belongs to the user's program.
        console = Console(stderr=True)
        if console.is_terminal:
            table = Table(*heads, title=title)
            for row in rows:
                table.add_row(*row)
            _print_once(console, table)
            return
    rank_zero_info(format_rows(title, heads, rows))


# A table by rich does not pass through rank_zero_info.
@rank_zero_only
def _print_once(console: Any, table: Any) -> None:
    console.print(table)
