"""Changes of the process, such as of a setting of torch, that runs in several threads need at the same time."""

import threading
from abc import ABC, abstractmethod


class SharedPatch(ABC):
    """A change of the process while any thread is in it: the first to enter makes it, the last to leave undoes it.

    Runs in several threads begin and end in any order. If each put back what it had found, the last one could leave the
    change of another behind for good.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            # Before it is counted: a change that fails is nobody's to undo.
            if not self._users:
                self.make()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self.undo()

    @abstractmethod
    def make(self) -> None:
        """Makes the change; no one is in it yet."""

    @abstractmethod
    def undo(self) -> None:
        """Puts back what was there before."""
