"""What was measured on a step in this process is known of equal steps: of further runs, devices and shapes.

To measure what planned steps spend beside their operators takes as long as all the rest of a small model's profile. It
depends on what the step saves, and how much: a step with the same names, operators and sizes spends the same.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import nn

from lightning_dpx.memory.profile.bookkeeping import Bookkeeping
from lightning_dpx.memory.profile.data import Profile


class KnownSteps:
    """What planned steps spend beside their operators, by what they save.

    Args:
        most: Steps that are remembered, the last ones: a process may profile any number of them.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Bookkeeping] = OrderedDict()

    def measured_once(
        self, profile: Profile, module: nn.Module, device: torch.device, measure: Callable[[], Bookkeeping]
    ) -> Bookkeeping:
        """What ``measure`` gives for the step of ``module``, or gave for an equal one.

        Args:
            profile: Of the step.
            module: The model; of another class it runs other Python.
            device: Where it runs; another one, also of its type, waits for Python more or less than it.
            measure: Runs planned steps.
        """
        key = device, _identity(profile, module)
        bookkeeping = self._known.get(key)
        if bookkeeping is None:
            bookkeeping = measure()
            self._known[key] = bookkeeping
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return bookkeeping

    def forget(self) -> None:
        """Forgets all measured steps, as in a new process."""
        self._known.clear()


KNOWN_STEPS = KnownSteps()  # of this process


def _identity(profile: Profile, module: nn.Module) -> Hashable:
    """Equal for steps that save the same; the class is named, not held."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    # Without times: those are measured, and never the same twice.
    saved = tuple((value.name, value.operator, value.num_bytes, value.refused) for value in profile.values)
    calls = tuple((call.name, call.tensors) for call in profile.calls)
    return kind, torch.get_num_threads(), saved, calls
