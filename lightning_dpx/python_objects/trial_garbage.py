"""What a trial of a step leaves in cycles is freed after it, without a search of all that was there before.

A trial (a profile, a rehearsal) leaves modules and gradients that hold each other, and the step itself needs their
memory. There are ten trials before the first step of a run, and a search of everything takes a quarter of a second
where half a million objects are loaded, as those of a library of models are.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_dpx.devices import free_garbage


class TrialGarbage:
    """That of this process; replicas in several threads may be tried at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_trials = 0
        self._sets_aside = False
        self._leaves_aside = False

    @contextmanager
    def freed(self) -> Iterator[None]:
        """What is made in here, and held by nothing but itself in the end, is freed."""
        with self._lock:
            if not self._num_trials and not self._is_left_aside():
                self._sets_aside = True
                gc.collect(1)  # all that is set aside is taken for long-lived afterwards
                gc.freeze()
            self._num_trials += 1
        try:
            yield
        finally:
            try:
                free_garbage()
            finally:  # also where Ctrl-C ends the search, or nothing older would ever be searched again
                self._end()

    def _is_left_aside(self) -> bool:
        """Whether another library has frozen objects (``gc.freeze``), which then must stay frozen."""
        # They are counted one by one, for as long as a search would take; so that is asked until there are some.
        self._leaves_aside = self._leaves_aside or gc.get_freeze_count() > 0
        return self._leaves_aside

    def _end(self) -> None:
        with self._lock:
            self._num_trials -= 1
            if not self._num_trials and self._sets_aside:
                self._sets_aside = False
                gc.unfreeze()


TRIAL_GARBAGE = TrialGarbage()
