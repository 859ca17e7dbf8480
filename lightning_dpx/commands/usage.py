"""What the exit status of ``dpx`` says, also where a parser ends the program, and how warnings look."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ERROR = 1
DOES_NOT_FIT = 2  # of `dpx plan` and `dpx tune`
_PACKAGE = Path(__file__).parent.parent
_OF_A_PARSER = 2  # with which argparse and jsonargparse end a program


class UnreadableArguments(SystemExit):
    """A parser has said what is wrong, and ends the program with the status of an error."""


@contextmanager
def reading_arguments() -> Iterator[None]:
    """A parser that refuses what it reads in here ends the program with the status of an error.

    Raises:
        UnreadableArguments: it did.
    """
    try:
        yield
    except SystemExit as end:
        # Help and completion end it, too, with a status of their own.
        if end.code == _OF_A_PARSER:
            raise UnreadableArguments(ERROR) from end
        raise


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """Warnings of this package are lines of a command's output: where its code gives them helps no reader."""
    as_before = warnings.formatwarning

    def in_words(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        text = str(message)
        # Lightning's own function gives them from its own files.
        if text.startswith("dpx: "):
            return f"{text}\n"
        if Path(filename).is_relative_to(_PACKAGE):
            return f"dpx: {text}\n"
        return as_before(message, category, filename, lineno, line)

    warnings.formatwarning = in_words
    try:
        yield
    finally:
        warnings.formatwarning = as_before
