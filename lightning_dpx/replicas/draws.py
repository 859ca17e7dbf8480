"""Draws from generators that all replicas share: whether there are any, and that a batch has those of one device.

What a step draws once (how far to mix, which branch to take, by ``random``, NumPy or ``torch.rand(())``), each slice
would draw for itself. Where a rehearsal has seen that the number of draws does not depend on the rows, every slice
begins where the batch began, and draws the same:

    batch begins at state s --slice 0--> t --put back--> s --slice 1--> t --> goes on at t, as on one device
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from lightning_dpx.devices import RandomStates, host_random_state
from lightning_dpx.python_objects.preserve import GeneratorStates, held_generators

# Runs between looks at Python's and NumPy's generators: a look takes some 0.1 ms.
_FIRST = 8
_EVERY = 16


@dataclass(frozen=True, slots=True)
class SeenGenerators:
    """The generators before a run: PyTorch's, and all others where they are looked at."""

    torch: torch.Tensor
    others: GeneratorStates | None

    def put_back(self) -> None:
        """They continue as if nothing had been drawn since."""
        torch.set_rng_state(self.torch)
        if self.others is not None:
            self.others.restore_outside_torch()


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
        """The generators that the module or a global holds; looked for once."""
        return held_generators([self._module])

    def begin(self, kind: Hashable, every: int = _EVERY) -> SeenGenerators:
        """The states of the generators before a run of this kind.

        Args:
            kind: Of the run.
            every: After so many runs of the kind the generators beside PyTorch's are looked at once more.
        """
        number = self._runs[kind]
        self._runs[kind] += 1
        # A stage may begin to draw later on, so it is looked at for good, but seldom.
        is_due = number < _FIRST or number % every == 0
        return SeenGenerators(host_random_state(), GeneratorStates(generators=self.generators) if is_due else None)

    def has_drawn(self, seen: SeenGenerators) -> bool:
        """Whether there were draws since :meth:`begin`."""
        if not torch.equal(seen.torch, host_random_state()):
            return True
        return seen.others is not None and seen.others != GeneratorStates(generators=self.generators)


Source = Literal["torch", "others"]  # the host's generator of PyTorch; those of Python and NumPy, and of modules


@dataclass(frozen=True, slots=True)
class StepDraws:
    """What one call of a step has drawn from generators of the host.

    Attributes:
        before: Where they were.
        after: Where it has left them.
        of_torch: How many numbers each draw from PyTorch's had.
    """

    before: GeneratorStates
    after: GeneratorStates
    of_torch: tuple[int, ...]


def drawn_once(calls: Sequence[StepDraws]) -> tuple[set[Source], set[Source]]:
    """The sources from which a step draws as often for the whole batch as for each slice, and those where it does not.

    Args:
        calls: Of one device on the whole batch, and of slices of several sizes, all from the same states.
    """
    once: set[Source] = set()
    by_rows: set[Source] = set()
    if any(call.of_torch for call in calls):
        # As many draws of as many numbers in all calls: none of them depends on the rows.
        is_once = len({call.of_torch for call in calls}) == 1
        (once if is_once else by_rows).add("torch")
    if any(call.after.differs_outside_torch(call.before) for call in calls):
        is_once = not any(call.after.differs_outside_torch(calls[0].after) for call in calls)
        (once if is_once else by_rows).add("others")
    return once, by_rows


class BatchDraws:
    """Lets every slice of a batch draw the same.

    Args:
        sources: From which.
        generators: Those that the module holds, and globals.
    """

    def __init__(self, sources: set[Source], generators: Sequence[Any]) -> None:
        self._sources = sources
        self._generators = generators
        self._put_back: list[Callable[[], None]] = []

    def begin_slice(self) -> None:
        """One slice begins, those before it are over."""
        # The first slice finds nothing to put back; it begins where the batch does.
        for put_back in self._put_back:
            put_back()
        if self._put_back:
            return
        if "torch" in self._sources:
            self._put_back.append(RandomStates(()).restore)
        if "others" in self._sources:
            self._put_back.append(GeneratorStates(generators=self._generators).restore_outside_torch)
