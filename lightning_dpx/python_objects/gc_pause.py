"""Python's collector of cyclic garbage: it rests while a planned forward runs, and looks at little after a trial.

Python looks for cycles whenever 700 more objects were made than freed. A forward makes several for every saved tensor,
and all of them live until backward: so they would be looked at again and again, then be taken for long-lived, which
brings a search of everything in the process, 0.2 s of it, every few dozen steps. Nothing of it would ever be found:
values point upstream only. What the model itself leaves behind in cycles is found right after the forward.

A trial of a step (a profile, a rehearsal) leaves modules and gradients that hold each other, and the step itself needs
their memory. There are ten trials before the first step of a run: to search everything after each was a fifth of the
time that it took to begin.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_dpx.devices import free_garbage


class _Collector:
    """The collector of this process; replicas in several threads may ask it to rest at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resting = 0
        self._was_enabled = False
        self._trials = 0
        self._sets_aside = False

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

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What is made in here, and held by nothing but itself in the end, is freed; what was there is not searched."""
        with self._lock:
            # Whoever has set objects aside himself has made searches short, and wants them to stay there.
            if not self._trials and not gc.get_freeze_count():
                self._sets_aside = True
                gc.collect(1)  # all that is set aside is taken for long-lived afterwards
                gc.freeze()
            self._trials += 1
        try:
            yield
        finally:
            free_garbage()
            with self._lock:
                self._trials -= 1
                if not self._trials and self._sets_aside:
                    self._sets_aside = False
                    gc.unfreeze()

    def collect_young(self) -> None:
        """Finds what a run in :meth:`resting` has left in cycles, unless that is switched off."""
        # Without the oldest generation, in which all that lives in the process would be searched.
        if self._was_enabled:
            gc.collect(1)


COLLECTOR = _Collector()
