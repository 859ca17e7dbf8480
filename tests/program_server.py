"""Forks itself for every program that ``programs.py`` asks for: ``program_server.py SOCKET LISTENER``.

It imports what programs need, but runs no operator, no backward and no thread: a fork would not take those along. A
program is executed by the last lines of this file, in the module ``__main__``, and its interpreter ends as any other's.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import types
import warnings
from typing import Any

import torch
import torch.distributed.elastic  # noqa: F401
import torchmetrics  # noqa: F401
from lightning.pytorch.cli import LightningCLI  # noqa: F401

import lightning_dpx.cli  # noqa: F401

Job = tuple[dict[str, Any], list[int]]  # what a new process shall run, and its output, its errors and its input, if any


def receive(connection: socket.socket) -> Job | None:
    """What is asked for next; ``None`` when nothing more will come."""
    header, files, _, _ = socket.recv_fds(connection, 4, 3)
    if not header:
        return None
    return json.loads(connection.recv(int.from_bytes(header), socket.MSG_WAITALL)), files


def serve(connection: socket.socket, listener: socket.socket) -> Job | None:
    """In a new process: its job; ``None`` when no more programs will come.

    Args:
        connection: To the tests, which ask for programs and for how those ended.
        listener: Where stand-ins of the interpreter ask (see :func:`programs.interpreter`).
    """
    supervisors: list[int] = []
    while True:
        ready, _, _ = select.select([connection, listener], [], [])
        if listener in ready:
            guest, _ = listener.accept()
            supervisors = [pid for pid in supervisors if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            pid = os.fork()
            if pid == 0:
                connection.close()
                return supervised(guest)
            supervisors.append(pid)
            guest.close()
        if connection in ready:
            job = receive(connection)
            if job is None:
                return None
            request, files = job
            if "wait" in request:
                _, status = os.waitpid(request["wait"], 0)
                answer = os.waitstatus_to_exitcode(status)
            else:
                answer = os.fork()
                if answer == 0:
                    listener.close()
                    return job
            connection.sendall(answer.to_bytes(4, signed=True))
            for file in files:
                os.close(file)


def supervised(guest: socket.socket) -> Job:
    """In a new process: its job, for a stand-in that learns how it ended, and without which it ends."""
    job = receive(guest)
    assert job is not None
    pid = os.fork()
    if pid == 0:
        guest.close()
        os.setsid()  # what it starts ends with it
        return job
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, guest], [], [])
    if guest in ready:  # it says no more: it is gone
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if guest not in ready:
        guest.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, signed=True))
    os._exit(0)


def become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Takes over the program's environment, folder, output and errors; returns its arguments."""
    for file, target in zip(files, (1, 2, 0), strict=False):
        os.dup2(file, target)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # TMPDIR may be another
    sys.executable = os.environ.get("DPX_TESTS_PYTHON", sys.executable)
    arguments: list[str] = request["arguments"]
    while arguments[0] in ("-u", "-W"):
        if arguments[0] == "-W":
            warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[1 if arguments[0] == "-u" else 2 :]
    return arguments


def program_of(arguments: list[str]) -> tuple[types.CodeType, str | None]:
    """The code that ``arguments`` ask for, and its file, if it is in one."""
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path[0] = ""
        return compile(arguments[1], "<string>", "exec"), None
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    with open(arguments[0]) as file:
        return compile(file.read(), arguments[0], "exec"), arguments[0]


def main() -> None:
    """Serves; in a forked process, runs the program."""
    # For the folder of a program. That of this file is left out by python -P, as it has a "lightning" of its own.
    sys.path.insert(0, "")
    connection, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    gc.collect()
    gc.freeze()  # what all programs share stays shared
    job = serve(connection, listener)
    connection.close()
    listener.close()
    if job is None:
        return
    arguments = become(*job)
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    code, name = program_of(arguments)
    namespace = sys.modules["__main__"].__dict__
    namespace.pop("__file__")
    namespace.update({"__doc__": None} if name is None else {"__doc__": None, "__file__": name})
    exec(code, namespace)


if __name__ == "__main__":
    main()
