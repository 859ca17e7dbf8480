"""The states of random generators that a step keeps, which no operator makes and so no dispatch mode sees."""

import threading
from collections.abc import Callable

import torch

from lightning_dpx.python_objects.overrides import Overrides


class GeneratorStateWatch:
    """Tells of the states of the host's generator that a step keeps, as ``torch.utils.checkpoint`` does.

    Such a state is a tensor of 5 KB.
    """

    def __init__(self) -> None:
        self._listeners: list[tuple[int, Callable[[torch.Tensor], None]]] = []  # each with its thread
        self._lock = threading.Lock()
        self._overrides = Overrides()
        self._get = torch.get_rng_state

    def tell(self, listener: Callable[[torch.Tensor], None]) -> None:
        """From now on ``listener`` is given those that its thread asks for."""
        with self._lock:
            if not self._listeners:
                self._get = torch.get_rng_state
                for owner in (torch, torch.random):
                    self._overrides.set(owner, "get_rng_state", self._get_and_tell)
            self._listeners.append((threading.get_ident(), listener))

    def tell_no_more(self, listener: Callable[[torch.Tensor], None]) -> None:
        """From now on ``listener`` is given no more states."""
        with self._lock:
            # Bound methods are made anew each time they are looked up: equal, but not the same.
            self._listeners = [entry for entry in self._listeners if entry[1] != listener]
            if not self._listeners:
                self._overrides.put_back()

    def _get_and_tell(self) -> torch.Tensor:
        state = self._get()
        # A copy: another thread may begin or end a trace meanwhile.
        for thread, listener in tuple(self._listeners):
            if thread == threading.get_ident():
                listener(state)
        return state


GENERATOR_STATES = GeneratorStateWatch()
