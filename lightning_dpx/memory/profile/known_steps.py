"""What was measured on a step in this process is known of equal steps: of further runs, devices and shapes.

To measure what planned steps spend beside their operators takes as long as all the rest of a small model's profile. It
depends on what the step saves, and how much: a step with the same names, operators and sizes spends the same. And so
does nearly one that calls the same modules as often on a few times fewer rows: its Python is the same, and what is
measured of it is a difference of two times of a step, which differs more from one try to the next. So of the profiles
on all, a half and a quarter of the rows one runs planned steps.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.profile.bookkeeping import Bookkeeping
from lightning_dpx.memory.profile.data import Profile

# Times as many bytes as in another step. Far smaller ones find code and tensors in the processor's caches, and spend a
# half to a third.
_MUCH_LARGER = 4


class KnownSteps:
    """What planned steps spend beside their operators, by what they save.

    Args:
        most: Steps that are remembered, the last ones: a process may profile any number of them.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Bookkeeping] = OrderedDict()
        # Of steps that differ in their sizes alone: the bytes of one that was measured, and what it spends.
        self._alike: OrderedDict[Hashable, tuple[int, Bookkeeping]] = OrderedDict()

    def measured_once(self, profile: Profile, module: nn.Module, measure: Callable[[], Bookkeeping]) -> Bookkeeping:
        """What ``measure`` gives for the step of ``module``, or gave for an equal one.

        Args:
            profile: Of the step.
            module: The model; of another class it runs other Python.
            measure: Runs planned steps.
        """
        key = _identity(profile, module)
        bookkeeping = self._known.get(key) or self._of_alike(profile, module)
        if bookkeeping is None:
            bookkeeping = measure()
            _remember(self._known, key, bookkeeping, self._most)
            # What was too little to be seen in a long step may be seen in a short one.
            if bookkeeping.step_seconds:
                _remember(self._alike, _calls(profile, module), (profile.peak, bookkeeping), self._most)
        return bookkeeping

    def _of_alike(self, profile: Profile, module: nn.Module) -> Bookkeeping | None:
        """That of a step of another size."""
        num_bytes, bookkeeping = self._alike.get(_calls(profile, module), (0, None))
        sizes = sorted((num_bytes, profile.peak))
        if bookkeeping is None or sizes[1] > _MUCH_LARGER * sizes[0]:
            return None
        # The time of the step itself is that of its rows.
        return replace(bookkeeping, step_seconds=0.0)

    def forget(self) -> None:
        """Forgets all measured steps, as in a new process."""
        self._known.clear()
        self._alike.clear()


KNOWN_STEPS = KnownSteps()  # of this process


def _remember(known: OrderedDict[Hashable, Any], key: Hashable, found: Any, most: int) -> None:
    known[key] = found
    if len(known) > most:
        known.popitem(last=False)


def _identity(profile: Profile, module: nn.Module) -> Hashable:
    """Equal for steps that save the same."""
    # Without times: those are measured, and never the same twice.
    saved = tuple((value.name, value.operator, value.num_bytes, value.refused) for value in profile.values)
    calls = tuple((call.name, call.tensors) for call in profile.calls)
    return *_surroundings(module), saved, calls


def _calls(profile: Profile, module: nn.Module) -> Hashable:
    """Equal for steps of one model that call the same modules as often."""
    # Small tensors get names from some size on, so lists of values differ where the calls are the same.
    sizes = tuple(parameter.shape for parameter in module.parameters())
    return *_surroundings(module), sizes, bool(profile.saves), profile.called


def _surroundings(module: nn.Module) -> tuple[Hashable, ...]:
    # The class is named, not held.
    return f"{type(module).__module__}.{type(module).__qualname__}", torch.get_num_threads()
