"""What the program ``dpx`` says of what ends it while the package is imported, which takes seconds with torch.

The package's own ``__init__`` runs before any other module of it, so that :mod:`lightning_dpx.cli`, which says such
things otherwise, is not there yet. Programs of another name are left alone. Nothing is imported here but Python's own.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType, TracebackType

_PROGRAM = "dpx"


def tell_in_one_line() -> None:
    """Where this process is the program, Ctrl-C and errors of the package are a line from now on, and no traceback."""
    if _is_program():
        sys.excepthook = _tell
        # Not where Ctrl-C is ignored, as shells have it of what runs in the background.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _INTERRUPT)


def imports_are_done() -> None:
    """Ctrl-C is Python's own again, which Trainers and commands catch.

    Raises:
        KeyboardInterrupt: it came while modules were imported, and one of them has swallowed it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Interrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if handler.has_come:
            raise KeyboardInterrupt


class _Interrupt:
    """Ctrl-C, as Python's own; remembered, as modules in C make another error of it while they are imported."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.has_come = True
        signal.default_int_handler(signum, frame)


_INTERRUPT = _Interrupt()


def _is_program() -> bool:
    started = sys.argv[0] if sys.argv else ""
    # What `python -m` puts there until it has found the module.
    if started == "-m":
        return __package__ in sys.orig_argv
    return Path(started).stem == _PROGRAM


def _tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        # Python itself ends the process by the signal then, which shells call status 130.
        sys.stderr.write(f"{_PROGRAM}: interrupted\n")
    elif _INTERRUPT.has_come:
        sys.stderr.write(f"{_PROGRAM}: interrupted\n")
        # So the status is that of a KeyboardInterrupt, which this error stands for.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    elif _is_of_the_package(kind):
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
    else:
        sys.__excepthook__(kind, error, traceback)


def _is_of_the_package(kind: type[BaseException]) -> bool:
    # Asked of the modules that are there: the errors' own module imports torch.
    errors = sys.modules.get(f"{__package__}.errors")
    base = getattr(errors, "DPXError", None)
    return base is not None and issubclass(kind, base)
