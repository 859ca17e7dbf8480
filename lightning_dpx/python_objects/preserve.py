"""Every random generator that a step may draw from, remembered and put back.

A run of the user's code that must leave no trace (a rehearsal, a trial, a profile) draws random numbers like any other.
PyTorch has one generator for the host and one per accelerator, NumPy and ``random`` have one each for the process; and
modules hold generators of their own, or reach for one in the file that defines them.
"""

import copy
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.devices import RandomStates
from lightning_dpx.python_objects.object_graph import may_hold
from lightning_dpx.python_objects.origin import is_library
from lightning_dpx.python_objects.process_generators import ProcessGenerators
from lightning_dpx.python_objects.reachable import reachable
from lightning_dpx.torch_compat import disable_current_modes

# A generator hides in a list or a dict of a few things; a vocabulary of 200,000 words is not searched for one.
_LARGEST_CONTAINER = 64
GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class GeneratorStates:
    """The state of every generator in reach, as it is now.

    Args:
        devices: Those whose generators count, beside the host's.
        modules: Modules whose own generators count: attributes of any submodule, items of small containers there, and
            globals of the files that define their classes.
        generators: Others that count, such as :func:`held_generators` gave earlier.
    """

    def __init__(
        self,
        devices: Iterable[torch.device] = (),
        modules: Iterable[nn.Module] = (),
        generators: Iterable[Any] = (),
    ) -> None:
        self._torch = RandomStates(devices)
        self._process = ProcessGenerators()
        self._held = [(generator, state_of(generator)) for generator in (*held_generators(modules), *generators)]

    def again(self) -> "GeneratorStates":
        """The states of the same generators, as they are now."""
        # A copy knows the held generators already, so the modules are not searched again.
        now = copy.copy(self)
        now._torch = self._torch.again()
        now._process = ProcessGenerators()
        now._held = [(generator, state_of(generator)) for generator, _ in self._held]
        return now

    def restore(self) -> None:
        """All continue as if nothing had been drawn since."""
        self._torch.restore()
        self.restore_outside_torch()

    def restore_outside_torch(self) -> None:
        """The generators of ``random`` and NumPy, and those that modules hold, continue so."""
        self._process.restore()
        for generator, state in self._held:
            put_back(generator, state)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GeneratorStates):
            return NotImplemented
        return (
            self._torch == other._torch
            and self._process == other._process
            and len(self._held) == len(other._held)
            and all(same_state(one[1], two[1]) for one, two in zip(self._held, other._held, strict=True))
        )

    __hash__: None = None  # type: ignore[assignment]

    def differs_outside_torch(self, other: "GeneratorStates") -> bool:
        """Whether something drew from NumPy, ``random`` or a generator that a module holds."""
        return not (
            self._process == other._process
            and all(same_state(one[1], two[1]) for one, two in zip(self._held, other._held, strict=False))
        )


def advance(modules: Iterable[nn.Module]) -> None:
    """Draws from every generator in reach, so that what comes next is another random number than before."""
    torch.manual_seed(torch.initial_seed() + 1)
    np.random.random()
    # The module `random` itself answers like a generator.
    held: list[Any] = [random, *held_generators(modules)]
    for generator in held:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(generator.initial_seed() + 1)
        else:
            generator.random()


@contextmanager
def preserve_rng_state(devices: Iterable[torch.device] = (), modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """All generators continue after the block as if nothing had been drawn in it; see :class:`GeneratorStates`."""
    states = GeneratorStates(devices, modules)
    try:
        yield
    finally:
        states.restore()


def held_generators(modules: Iterable[nn.Module]) -> list[Any]:
    """Generators that ``modules`` hold as attributes, or that the files of their classes hold as globals; each once."""
    found: dict[int, Any] = {}
    files: dict[str, None] = {}
    for module in modules:
        for child in module.modules():
            for value in filter(may_hold, vars(child).values()):
                found.update((id(generator), generator) for generator in _generators_in(value))
        # Beside attributes, a helper object or the code of a method may lead to one.
        found.update((id(one), one) for _, one in reachable(module, GENERATOR_TYPES) if is_generator(one))
        for child in module.modules():
            files.update((kind.__module__, None) for kind in type(child).__mro__ if not is_library(kind))
    for name in files:
        if name in sys.modules:
            for value in list(vars(sys.modules[name]).values()):
                if is_generator(value):
                    found[id(value)] = value
    return list(found.values())


def _generators_in(value: Any) -> Iterator[Any]:
    if is_generator(value):
        yield value
    elif type(value) in (list, tuple, dict) and len(value) <= _LARGEST_CONTAINER:
        for item in value.values() if isinstance(value, dict) else value:
            if is_generator(item):
                yield item


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a random generator of its own, whose state can be read."""
    kind: Any = type(value)
    # The process's own is put back with those of devices.
    return _is_of_generators(kind) and value is not torch.default_generator


@cache
def _is_of_generators(kind: Any) -> bool:
    """By type and once for each: torch answers for an instance of its own in Python, and there are very many values."""
    # SystemRandom reads from the operating system: it has no state, and raises when asked for one.
    return issubclass(kind, GENERATOR_TYPES) and not issubclass(kind, random.SystemRandom)


def state_of(generator: Any) -> Any:
    """The state of ``generator``, in the form that its own type has for it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def put_back(generator: Any, state: Any) -> None:
    """``generator`` continues from ``state``."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def same_state(one: Any, two: Any) -> bool:
    """Whether two states are equal; NumPy nests arrays in dicts and tuples."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same_state(value, two[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same_state, one, two))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two)
    if isinstance(one, torch.Tensor):
        # No operator of the step, for those who watch its operators.
        with disable_current_modes():
            return torch.equal(one, two)
    return bool(one == two)
