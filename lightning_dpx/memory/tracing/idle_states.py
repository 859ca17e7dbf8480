"""Random states that an operator returns without having drawn from them.

Fused attention returns for its backward the state from which its dropout has started. Where nothing is dropped nobody
reads that state, and nobody has written it either: it is whatever the memory held before, and another one each time.
"""

import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from lightning_dpx.torch_compat import key_of, schema_of

_PROBABILITY = "dropout_p"
_STATES = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})  # as torch's schemas call them


class _Drawing(NamedTuple):
    """An operator that may drop something.

    Attributes:
        place: Of the probability among its arguments.
        default: The probability if none is given.
        states: The places of random states among its results.
    """

    place: int
    default: Any
    states: tuple[int, ...]


@cache
def _drawing(func: Any) -> _Drawing | None:
    """What is known of an operator that may drop something and returns the state from which it starts."""
    # What results of other libraries mean cannot be told by their names: one may round at random whatever it drops.
    if func.namespace != "aten":
        return None
    schema = schema_of(func)
    states = tuple(place for place, result in enumerate(schema.returns) if result.name in _STATES)
    if not states:
        return None
    for place, argument in enumerate(schema.arguments):
        if argument.name == _PROBABILITY:
            return _Drawing(place, argument.default_value, states)
    return None


class IdleStates:
    """The random states among the results of operators that drop nothing."""

    def __init__(self) -> None:
        # Weakly: a storage that comes later may have the key of one that is gone.
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def note(self, func: Any, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """An operator has run."""
        drawing = _drawing(func)
        if drawing is None:
            return
        # Torch's operators get it by its place as a rule, and by its name from whoever calls them so.
        probability = args[drawing.place] if drawing.place < len(args) else drawing.default
        if (kwargs or {}).get(_PROBABILITY, probability):
            return
        for place in drawing.states:
            state = out[place]
            if isinstance(state, torch.Tensor):
                storage = state.untyped_storage()
                self._known[key_of(storage)] = weakref.ref(storage)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of them."""
        if not self._known or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        known = self._known.get(key_of(storage))
        return known is not None and known() is storage
