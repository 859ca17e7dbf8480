"""Notices that a run of the replicas drew from a generator that all of them share."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import host_random_state
from lightning_dpx.python_objects.preserve import GeneratorStates, held_generators

# Runs between looks at Python's and NumPy's generators: a look takes some 0.1 ms.
_FIRST = 8
_EVERY = 16


@dataclass(frozen=True, slots=True)
class _Seen:
    """The generators before a run: PyTorch's, and all others where they are looked at."""

    torch: torch.Tensor
    others: GeneratorStates | None


class DrawWatch:
    """Compares the generators before and after a run.

    PyTorch's is looked at in every run, the others (Python's, NumPy's, and those that the module or a global holds) in
    the first runs of a kind and now and then.

    Args:
        module: The module whose code draws.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._runs: Counter[Hashable] = Counter()

    @cached_property
    def generators(self) -> list[Any]:
        """Those that the module or a global holds; found once."""
        return held_generators([self._module])

    def begin(self, kind: Hashable) -> _Seen:
        """Before a run of this kind."""
        number = self._runs[kind]
        self._runs[kind] += 1
        is_due = number < _FIRST or number % _EVERY == 0
        return _Seen(host_random_state(), GeneratorStates(generators=self.generators) if is_due else None)

    def has_drawn(self, seen: _Seen) -> bool:
        """Whether there were draws since :meth:`begin`."""
        if not torch.equal(seen.torch, host_random_state()):
            return True
        return seen.others is not None and seen.others != GeneratorStates(generators=self.generators)
