"""The generators of ``random`` and of NumPy: whether they were drawn from, without copying them each time.

Copying takes 40 us, which is much for something that is asked twice at every call of a module. What CPython and NumPy
keep of a generator lies in one piece of memory; to see that nothing was drawn it is enough to read that. Whether the
memory tells is tried on a generator of our own before it is relied on; where it does not, copies are made.
"""

import ctypes
import random
import sys
from functools import cache
from typing import Any

_MERSENNE_BYTES = 625 * 4  # of NumPy's default generator: 624 words and a position


class ProcessGenerators:
    """Both generators, as they are now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        # Not imported for this: where NumPy is not loaded, nothing has drawn from it.
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGenerators) and (self is other or self._all() == other._all())

    __hash__: None = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Both generators continue as if nothing had been drawn since."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    @property
    def holds_a_number(self) -> bool:
        """Whether NumPy keeps a normal number, whose draw changes none of the watched memory."""
        return self._numpy is not None and bool(self._numpy[3])

    def _all(self) -> list[Any]:
        numpy = () if self._numpy is None else self._numpy
        return [self._python, *(entry.tobytes() if hasattr(entry, "tobytes") else entry for entry in numpy)]


class GeneratorWatch:
    """Gives the same object again as long as nothing was drawn."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], ProcessGenerators] | None = None

    def now(self) -> ProcessGenerators:
        """The states of both generators; the same object as before if nothing was drawn."""
        seen = _memory()
        if seen is not None and self._last is not None and self._last[0] == seen:
            return self._last[1]
        state = ProcessGenerators()
        # The next normal number would be the one in store, which leaves the watched memory
        # as it is.
        self._last = None if seen is None or state.holds_a_number else (seen, state)
        return state


def _memory() -> tuple[Any, ...] | None:
    """The memory of both generators, which every draw changes; ``None`` where that is not known."""
    # `random.random` and the other functions are methods of this one generator. Where another
    # object has taken its place, nothing is known of its memory.
    python: Any = getattr(random, "_inst", None)
    if type(python) is not random.Random or not _shows_draws():
        return None
    numpy = sys.modules.get("numpy")
    if numpy is None:
        # `random.gauss` makes two numbers at once, and keeps the second in a Python attribute.
        return _bytes_of(python), getattr(python, "gauss_next", None)
    generator = numpy.random.mtrand._rand._bit_generator
    # `np.random.set_bit_generator` may have put one of another kind, and of another size, here.
    if type(generator).__name__ != "MT19937":
        return None
    return (
        _bytes_of(python),
        getattr(python, "gauss_next", None),
        # Another generator of the same kind may stand where this one did.
        id(generator),
        ctypes.string_at(_address_of(generator), _MERSENNE_BYTES),
    )


def _bytes_of(generator: random.Random) -> bytes:
    # Behind what every object begins with lies the C struct of `_random.Random`.
    head = object.__basicsize__
    return ctypes.string_at(id(generator) + head, random.Random.__base__.__basicsize__ - head)  # type: ignore[union-attr]


@cache
def _address_of(generator: Any) -> int:
    address: int = generator.ctypes.state_address
    return address


@cache
def _shows_draws() -> bool:
    """Whether a draw shows in the memory of a generator, tried on generators of our own."""
    # Elsewhere an id is no address.
    if sys.implementation.name != "cpython":
        return False
    python = random.Random(1)
    before = _bytes_of(python)
    state = python.getstate()
    python.random()
    shows = _bytes_of(python) != before
    python.setstate(state)
    shows = shows and _bytes_of(python) == before
    numpy = sys.modules.get("numpy")
    if numpy is not None and shows:
        generator = numpy.random.MT19937(1)
        address = generator.ctypes.state_address
        before = ctypes.string_at(address, _MERSENNE_BYTES)
        generator.random_raw()
        shows = ctypes.string_at(address, _MERSENNE_BYTES) != before
    return shows
