"""Forks itself for every program that ``programs.py`` asks for: ``program_server.py SOCKET``.

It imports what programs need, but runs no operator, no backward and no thread: a fork would not take those along. A
program is executed by the last lines of this file, in the module ``__main__``, and its interpreter ends as any other's.
"""

import gc
import json
import os
import runpy
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


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """In a new process: what it shall run, and its output and errors; ``None`` when no more programs will come."""
    while True:
        header, files, _, _ = socket.recv_fds(connection, 4, 2)
        if not header:
            return None
        size = int.from_bytes(header)
        request = json.loads(connection.recv(size, socket.MSG_WAITALL))
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                return request, files
        connection.sendall(answer.to_bytes(4, signed=True))
        for file in files:
            os.close(file)


def become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Takes over the program's environment, folder, output and errors; returns its arguments."""
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # TMPDIR may be another
    arguments: list[str] = request["arguments"]
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
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
    connection = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()  # what all programs share stays shared
    job = serve(connection)
    connection.close()
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
