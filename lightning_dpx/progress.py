"""How far planning is, for people who wait longer than two seconds: on a terminal, or in the cell of a notebook.

What plans tells where it is, wherever it is (:func:`at`); what started it decides whether that is shown
(:func:`shown`). Nothing is written where standard error is a file or a pipe.
"""

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

_PATIENCE = 2.0
_PAUSE = 0.1  # seconds: before anything is shown, and between two looks of it
_WIDTH = 79
_BAR = 20
_CURRENT = threading.local()


def line_width(most: int) -> int:
    """The columns of a line that a terminal shows in one row, at most ``most``.

    A longer one would wrap, and the next one would begin in the last row of it. ``COLUMNS`` is heeded.
    """
    # The last column is left, as some terminals wrap once it is written.
    return max(1, min(most, shutil.get_terminal_size().columns - 1))


class Line(Protocol):
    """One line that is written over and over."""

    def write(self, text: str) -> None:
        """Shows ``text`` in the place of what was there."""

    def wipe(self) -> None:
        """Leaves nothing of it."""


class TerminalLine:
    """The last line of a terminal.

    Args:
        file: The terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._length = 0

    def write(self, text: str) -> None:
        """Shows ``text`` in the place of what was there."""
        # Padded, so that nothing of a longer line before stays behind it.
        self._file.write(f"\r{text:{self._length}}")
        self._file.flush()
        self._length = len(text)

    def wipe(self) -> None:
        """Overwrites it by blanks."""
        self._file.write(f"\r{'':{self._length}}\r")
        self._file.flush()


class CellLine:
    """An output of the cell that runs in a notebook; not standard error, which notebooks show as if it were an error.

    Args:
        display: ``IPython.display.display``.
    """

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def write(self, text: str) -> None:
        """Shows ``text`` in the place of what was there."""
        content = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def wipe(self) -> None:
        """Empties the output, which cannot be taken back."""
        self.write("")


class ProgressBar:
    """How far it is, in a line that is there from some time on.

    Args:
        line: Where it is shown.
        what: What takes so long.
    """

    def __init__(self, line: Line, what: str) -> None:
        self._line = line
        self._what = what
        self._started = time.monotonic()
        self._next = self._started + _PATIENCE
        self._is_shown = False

    def at(self, stage: str, done: int, of: int) -> None:
        """Shows what is done now, and how much of it; of an unknown amount if ``of`` is 0."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PAUSE
            self._is_shown = True
            self._line.write(_line(f"{self._what}, {now - self._started:.0f} s: {stage}", done, of))

    def close(self) -> None:
        """Wipes the line away."""
        # A bar that was never shown has nothing to wipe away.
        if self._is_shown:
            self._line.wipe()


def _line(text: str, done: int, of: int) -> str:
    width = line_width(_WIDTH)
    if not of:
        return f"dpx: {text}"[:width]
    share = min(1.0, done / of)
    bar = f"[{'#' * round(share * _BAR):{_BAR}}] {share:4.0%}"
    return f"{f'dpx: {text}'[: max(0, width - len(bar) - 1)]} {bar}"[:width]


@contextmanager
def shown(what: str, *, enabled: bool = True) -> Iterator[None]:
    """What is done in here, in this thread, shows how far it is; within another one of these, as part of that.

    Args:
        what: What takes so long, in a few words.
        enabled: Whether anything is shown at all.
    """
    # The outer bar knows since when people wait, so an inner stage is shown as a part of it.
    line = _line_to_write() if enabled and getattr(_CURRENT, "bar", None) is None else None
    if line is None:
        yield
        return
    _CURRENT.bar = ProgressBar(line, what)
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


def _line_to_write() -> Line | None:
    """Where a person who waits would look; ``None`` without a terminal or a notebook."""
    if _is_terminal(sys.stderr):
        return TerminalLine(sys.stderr)
    # Not imported for this: in a notebook it is there.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", _no_shell)()
    # A shell on a terminal has no kernel, and here its standard error leads to a file.
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return CellLine(display)


def _no_shell() -> None:
    """What IPython says where it runs nothing."""


def _is_terminal(file: TextIO | None) -> bool:
    # A program without a console has no standard error, and a test runner may have closed it.
    return file is not None and not file.closed and file.isatty()
