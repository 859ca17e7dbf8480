"""What the exit status of ``dpx`` says, also where a parser ends the program."""

from collections.abc import Iterator
from contextlib import contextmanager

ERROR = 1
DOES_NOT_FIT = 2  # of `dpx plan` and `dpx tune`
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
