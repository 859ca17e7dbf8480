"""Changes of the process, such as of a setting of torch, that runs in several threads need at the same time."""

import threading
from collections.abc import Callable

Undo = Callable[[], object]


class SharedPatch:
    """A change of the process while any thread is in it: the first to enter makes it, the last to leave undoes it.

    Runs in several threads begin and end in any order. If each put back what it had found, the last one could leave the
    change of another behind for good.

    Args:
        make: Makes the change, and returns what undoes it.
    """

    def __init__(self, make: Callable[[], Undo]) -> None:
        self._make = make
        self._undo: Undo = _nothing
        self._lock = threading.Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            # Before it is counted: a change that fails is nobody's to undo.
            if not self._users:
                self._undo = self._make()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._undo()


def _nothing() -> None:
    """Before the first change there is nothing to undo."""
