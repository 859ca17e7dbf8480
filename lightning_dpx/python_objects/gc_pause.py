"""Python's collector of cyclic garbage rests while a planned forward runs, and while a plan is made.

Python looks for cycles whenever 700 more objects were made than freed. A forward makes several for every saved tensor,
and all of them live until backward: so they would be looked at again and again, then be taken for long-lived, which
brings a search of everything in the process, 0.2 s of it, every few dozen steps. Nothing of it would ever be found:
values point upstream only. What the model itself leaves behind in cycles is found right after the forward.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector:
    """The collector of this process; replicas in several threads may ask it to rest at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resting = 0
        self._was_enabled = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """No collection by itself in here; ``gc.collect()`` works as ever."""
        with self._lock:
            # Whoever has it off wants it off, also afterwards.
            if not self._resting:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._resting += 1
        try:
            yield
        finally:
            with self._lock:
                self._resting -= 1
                if not self._resting and self._was_enabled:
                    gc.enable()

    def collect_young(self) -> None:
        """Finds what a run in :meth:`resting` has left in cycles, unless that is switched off."""
        # Without the oldest generation, in which all that lives in the process would be searched.
        if self._was_enabled:
            gc.collect(1)


COLLECTOR = _Collector()
