"""What commands say beside their result, and errors of the files that they write."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_dpx.commands.progress import done
from lightning_dpx.errors import ConfigurationError


def tell(text: str) -> None:
    """Says it on standard error, after what :func:`progress` says."""
    # The line of progress has no end of its own, and the text would stand behind it.
    done()
    print(text, file=sys.stderr)


class TellOnce:
    """Says a sentence once, however many devices and batch sizes it is true of."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        """Says it, unless it was said before."""
        if text not in self._said:
            self._said.add(text)
            tell(text)


@contextmanager
def written(option: str, path: Path) -> Iterator[None]:
    """Tells an error of the file system by the option that named the file.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"--{option} {path} cannot be written: {error.strerror or error}. Name another file."
        ) from error


def flush() -> None:
    """Writes what was printed: where that fails when Python ends, nothing handles the error."""
    # A shell may have closed it: `>&-`.
    if sys.stdout is not None:
        sys.stdout.flush()


@contextmanager
def flushed_help() -> Iterator[None]:
    """A parser that ends the program in here has printed a help text, which is written by then."""
    try:
        yield
    except SystemExit:
        flush()
        raise


def lost_output() -> OSError | None:
    """Why standard output cannot be written, such as that its reader has ended; ``None`` where it can, or is closed."""
    # Python writes nothing then, and fails at nothing.
    if sys.stdout is None:
        return None
    try:
        # An error of the user's own pipes and files leaves it as it is.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None
