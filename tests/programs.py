"""Programs that tests run in processes of their own, without the seconds that importing PyTorch and Lightning takes.

A server (``program_server.py``) imports both once and is forked for every program: a process that is ready at once,
also on a busy machine. Where there are no handles of processes (only Linux has them), programs start as usual.
"""

import atexit
import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
SERVER = Path(__file__).with_name("program_server.py")
CAN_FORK = hasattr(os, "pidfd_open") and hasattr(socket, "send_fds")


class Program:
    """A running process, with the methods of :class:`subprocess.Popen` that tests use."""

    def __init__(self, request: Mapping[str, Any], *, joint: bool, output: Any = None) -> None:
        self.args = request["arguments"]
        self.returncode: int | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  read after the process has ended
        self._errors = self._output if joint else tempfile.TemporaryFile()  # noqa: SIM115
        self._joint = joint
        for file in (self._output, self._errors):
            weakref.finalize(self, file.close)
        self.pid = _ask(request, [(output or self._output).fileno(), self._errors.fileno()])
        self._handle = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; ``None`` while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once there is one.

        Args:
            timeout: In seconds.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1e3):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0, _text(self._output), _text(self._errors))
            self.returncode = _ask({"wait": self.pid}, [])
            os.close(self._handle)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str | None]:
        """What it printed to standard output and standard error, once it has ended."""
        self.wait(timeout)
        return _text(self._output), None if self._joint else _text(self._errors)

    def send_signal(self, number: int) -> None:
        """Nothing happens to a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it by force."""
        self.send_signal(signal.SIGKILL)


def free_port() -> int:
    """A port that nothing listens on, and that the system gives to nobody until a program takes it.

    Ports from 32768 on are those of connections: one that was free a moment ago was another test's by then.
    """
    while True:
        # Not by Python's generator, which tests seed alike.
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def start(
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    joint: bool = False,
    folder: Path | None = None,
    output: Any = None,
) -> Any:
    """Starts a Python program; a :class:`Program`, or a :class:`subprocess.Popen` where there are no servers.

    Args:
        arguments: As for the interpreter: ``-c`` and a text, ``-m`` and a module, or a file; and what it is given.
        environment: Variables beside those of the tests.
        joint: Whether standard error goes where standard output goes.
        folder: Where it runs; that of the tests unless given.
        output: A file that standard output goes to, and from which nothing is read: a pipe, or a device.
    """
    texts = [str(argument) for argument in arguments]
    variables = {**_variables(), **(environment or {})}
    if CAN_FORK:
        request = {"arguments": texts, "environment": variables, "folder": str(folder or Path.cwd())}
        return Program(request, joint=joint, output=output)
    errors = subprocess.STDOUT if joint else subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *texts], env=variables, cwd=folder, stdout=output or subprocess.PIPE, stderr=errors, text=True
    )


def run(*arguments: object, timeout: float = 300, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Starts a Python program and waits until it has ended.

    Args:
        arguments: As for :func:`start`.
        timeout: Seconds after which it is killed, and an error; many, for machines that have ten other things to do.
        options: As for :func:`start`.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    program = start(*arguments, **options)
    try:
        output, errors = program.communicate(timeout=timeout)
    finally:
        program.kill()
    return subprocess.CompletedProcess(program.args, program.returncode, output, errors)


def printed_by(script: str, **environment: str) -> str:
    """What a program printed, errors included.

    Args:
        script: Its text.
        environment: Variables, beside those of this process.
    """
    done = run("-c", script, environment=environment)
    return f"{done.stdout}{done.stderr}"


def _text(file: Any) -> str:
    """All of it, from where the process does not see it move."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


_STAND_IN = """#!{python} -IS
import json, os, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
message = json.dumps(request).encode()
socket.send_fds(server, [len(message).to_bytes(4)], [1, 2, 0])
server.sendall(message)
status = int.from_bytes(server.recv(4, socket.MSG_WAITALL), signed=True)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextlib.contextmanager
def quick_interpreter() -> Iterator[None]:
    """``sys.executable`` is a program that runs what it is given in a fork of the server, also for what that starts.

    Commands that the package, Lightning or torchrun put together from it start as fast as :func:`start` does.
    """
    if not CAN_FORK:
        yield
        return
    _server()
    python, sys.executable = sys.executable, str(_folder() / "python")
    os.environ["DPX_TESTS_PYTHON"] = sys.executable
    try:
        yield
    finally:
        sys.executable = python
        del os.environ["DPX_TESTS_PYTHON"]


@cache
def _folder() -> Path:
    """Where the stand-in of the interpreter and its socket are; short, as names of sockets are."""
    folder = tempfile.TemporaryDirectory(prefix="dpx")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def _server() -> socket.socket:
    """The connection to the server, which ends when this process does."""
    address, stand_in = str(_folder() / "server"), _folder() / "python"
    stand_in.write_text(_STAND_IN.format(python=sys.executable, address=address))
    stand_in.chmod(0o700)
    ours, theirs = socket.socketpair()
    with theirs, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        numbers = [theirs.fileno(), listener.fileno()]
        # -P: the folder of the server is none to import from; tests/lightning would stand in for lightning there
        process = subprocess.Popen(
            [sys.executable, "-P", str(SERVER), *map(str, numbers)],
            pass_fds=numbers, cwd=REPOSITORY, env=_variables(),
        )  # fmt: skip
    atexit.register(process.wait)
    atexit.register(ours.close)  # first: that is what ends it
    return ours


def _variables() -> dict[str, str]:
    # Whose words are written at once meets other errors than a program does: argparse drops its own.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**kept, "PYTHONPATH": str(REPOSITORY)}


def _ask(request: Mapping[str, Any], files: Sequence[int]) -> int:
    connection = _server()
    message = json.dumps(request).encode()
    socket.send_fds(connection, [len(message).to_bytes(4)], list(files))
    connection.sendall(message)
    answer = connection.recv(4, socket.MSG_WAITALL)
    if not answer:
        raise RuntimeError("The server of programs has ended; its own error is above.")
    return int.from_bytes(answer, signed=True)
