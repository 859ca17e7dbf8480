"""How far planning is, on standard error, for people who wait longer than two seconds.

What plans tells where it is, wherever it is (:func:`at`); what started it decides whether that is shown
(:func:`shown`). Nothing is written unless standard error is a terminal.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_PATIENCE = 2.0
_PAUSE = 0.1  # seconds: before anything is shown, and between two looks of it
_WIDTH = 79
_BAR = 20
_CURRENT = threading.local()


class ProgressBar:
    """One line that is written over and over, and wiped away at the end.

    Args:
        file: A terminal.
        what: What takes so long.
    """

    def __init__(self, file: TextIO, what: str) -> None:
        self._file = file
        self._what = what
        self._started = time.monotonic()
        self._next = self._started + _PATIENCE
        self._length = 0

    def at(self, stage: str, done: int, of: int) -> None:
        """Shows what is done now, and how much of it; of an unknown amount if ``of`` is 0."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PAUSE
            self._write(_line(f"{self._what}, {now - self._started:.0f} s: {stage}", done, of))

    def close(self) -> None:
        """Wipes the line away."""
        # A bar that was never shown has nothing to wipe away.
        if self._length:
            self._file.write(f"\r{'':{self._length}}\r")
            self._file.flush()

    def _write(self, line: str) -> None:
        # Padded, so that nothing of a longer line before stays behind it.
        self._file.write(f"\r{line:{self._length}}")
        self._file.flush()
        self._length = len(line)


def _line(text: str, done: int, of: int) -> str:
    if not of:
        # A longer line would wrap, and the next one would begin in the last row of it.
        return f"dpx: {text}"[:_WIDTH]
    share = min(1.0, done / of)
    bar = f"[{'#' * round(share * _BAR):{_BAR}}] {share:4.0%}"
    return f"{f'dpx: {text}'[: _WIDTH - len(bar) - 1]} {bar}"


@contextmanager
def shown(what: str, *, enabled: bool = True) -> Iterator[None]:
    """What is done in here, in this thread, shows how far it is; within another one of these, as part of that.

    Args:
        what: What takes so long, in a few words.
        enabled: Whether anything is shown at all.
    """
    # The outer bar knows since when people wait, so an inner stage is shown as a part of it.
    if getattr(_CURRENT, "bar", None) is not None or not enabled or not _is_terminal(sys.stderr):
        yield
        return
    _CURRENT.bar = ProgressBar(sys.stderr, what)
    try:
        yield
    finally:
        # Also after an error, whose message would else stand behind the bar.
        _CURRENT.bar.close()
        _CURRENT.bar = None


def at(stage: str, done: int = 0, of: int = 0) -> None:
    """Tells the bar of this thread, if there is one, what is done now."""
    bar: ProgressBar | None = getattr(_CURRENT, "bar", None)
    if bar is not None:
        bar.at(stage, done, of)


def _is_terminal(file: TextIO | None) -> bool:
    # A program without a console has no standard error, and a test runner may have closed it.
    return file is not None and not file.closed and file.isatty()
