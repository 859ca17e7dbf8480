"""Processes that work on demand: one line in, lines of JSON out."""

import json
import subprocess
from collections.abc import Sequence
from typing import IO, Any, cast

from lightning_dpx.errors import BenchError


class Child:
    """A process that is told what to do, line by line.

    Args:
        command: To start.
        errors: Where its error output goes; a file, or ``subprocess.DEVNULL``.
        tells: Whether what it prints is read.
        own_session: Whether the processes that it starts itself can be ended with it.
    """

    def __init__(
        self, command: Sequence[str], errors: IO[str] | int, *, tells: bool = True, own_session: bool = False
    ) -> None:
        self.process: subprocess.Popen[str] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            # A pipe that nothing reads would fill up and stop the process.
            stdout=subprocess.PIPE if tells else subprocess.DEVNULL,
            stderr=errors,
            text=True,
            start_new_session=own_session,
        )

    def tell(self, line: str) -> None:
        """Gives the process a line to read."""
        stdin = cast("IO[str]", self.process.stdin)  # a pipe, as asked for
        stdin.write(f"{line}\n")
        # The child waits for the line, which would else stay in the buffer of this process.
        stdin.flush()

    def read(self, key: str) -> Any:
        """What the process reports under ``key`` next; other output is passed over.

        Raises:
            BenchError: it ended, or closed its output, before it said so.
        """
        stdout = cast("IO[str]", self.process.stdout)
        for line in stdout:
            # Libraries print, too.
            if line.startswith("{") and key in (values := json.loads(line)):
                return values[key]
        raise BenchError(f"A process ended before it reported {key}.")
