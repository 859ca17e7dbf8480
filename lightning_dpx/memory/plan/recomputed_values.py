"""What a choice of values to drop means for each value of a profile, before anything is played through.

values of the profile     has memory and a name     has neither: a view, or on the way to what is saved ("virtual")
------------------------  ------------------------  ---------------------------------------------------------------
dropped                   lazy: made when asked     lazy as well
kept                      there all the time        lazy if it has inputs, otherwise there all the time

lazy and uncached: made again for every use.   uncached and nested: made from others that are uncached; they stay
until what is made from them is there.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from lightning_dpx.memory.profile.data import Profile, most_with


class Outline:
    """A profile as a forecast reads it: what is the same for all choices is looked up once.

    V values, E events.

    Args:
        profile: Of a step.

    Attributes:
        profile: The same.
        curve: Bytes at every event, if all is kept (E).
        virtual: For each value, whether it has no memory and no name of its own (V).
        sizes: For each value, the bytes that it takes when it is computed again (V).
        beside: For each value, bytes that come and go meanwhile; the generators' states of now are kept, too (V).
        inputs: For each value (V).
        seconds_again: For each value, seconds of every time but the first that it is made (V).
        storages: For each value, the number of its storage, or -1 (V).
        requests: Event, value and end of each request.
        until: For each value, the event up to which autograd itself asks for it (V).
        compact: For each storage, the bytes of its compressed masks.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.curve: np.ndarray = np.array(profile.curve, dtype=np.int64)
        # Autograd does not save these: they are made on the way to something else.
        self.virtual: list[bool] = [value.storage < 0 and not value.name for value in profile.values]
        # What is picked lies in the memory that its call takes as a whole.
        self.sizes: list[int] = [0 if value.picked else value.num_bytes for value in profile.values]
        self.beside: list[int] = [value.beside + value.state for value in profile.values]
        self.inputs: list[tuple[int, ...]] = [value.inputs for value in profile.values]
        self.seconds_again: list[float] = [profile.seconds_again(index) for index in range(len(profile.values))]
        self.storages: list[int] = [value.storage for value in profile.values]
        self.requests: list[tuple[int, int, int]] = [
            (request.event, request.value, request.released) for request in profile.requests
        ]
        self.until: list[int] = [0] * len(profile.values)
        for _, asked, released in self.requests:
            self.until[asked] = max(self.until[asked], released)
        self.compact: list[int] = [0] * len(profile.storages)
        for value in profile.values:
            if value.compact:
                self.compact[value.storage] += value.compact


@dataclass(frozen=True, slots=True)
class RecomputedValues:
    """For each value of a profile, what the choice makes of it (V).

    Attributes:
        dropped: Indices of the values that the choice drops.
        live: Indices of the values that will be computed again at some time: those, and what leads to them.
        lazy: Whether it is made when it is asked for.
        uncached: Whether it is forgotten after every use.
        nested: Whether it is uncached and made from others that are.
        inputs: Those that are lazy, of a lazy value: the others are there all the time.
        sizes: Bytes that it takes when it is there again; a call that is made again takes those of what is picked.
        beside: Bytes that come and go while it is made.
        drawn_from: By the index of a call that draws random numbers, the event from which its generators' states are
            kept.
    """

    dropped: frozenset[int]
    live: tuple[int, ...]
    lazy: list[bool]
    uncached: list[bool]
    nested: list[bool]
    inputs: list[tuple[int, ...]]
    sizes: list[int]
    beside: list[int]
    drawn_from: dict[int, int]


def values_of_choice(outline: Outline, dropped: Collection[int], uncached: Collection[int]) -> RecomputedValues:
    """What it means to drop the values with these indices, some of them after every use."""
    lazy = [virtual and bool(inputs) for virtual, inputs in zip(outline.virtual, outline.inputs, strict=True)]
    for index in dropped:
        lazy[index] = True
    is_uncached = [False] * len(lazy)
    nested = [False] * len(lazy)
    # Inputs have smaller numbers: whether a value is nested depends on what they are.
    for index in sorted(uncached):
        _make_uncached(outline, index, lazy, is_uncached, nested)
    live = _live_values(outline, dropped, lazy)
    # Only what is computed anew asks for inputs, and only those that are not there count.
    lazy_inputs: list[tuple[int, ...]] = [()] * len(lazy)
    for index, sources in enumerate(outline.inputs):
        if lazy[index]:
            lazy_inputs[index] = tuple([source for source in sources if lazy[source]])
    sizes = outline.sizes.copy()
    beside = outline.beside.copy()
    drawn_from = _size_calls(outline.profile, live, sizes, beside)
    return RecomputedValues(frozenset(dropped), live, lazy, is_uncached, nested, lazy_inputs, sizes, beside, drawn_from)


def _make_uncached(outline: Outline, index: int, lazy: list[bool], uncached: list[bool], nested: list[bool]) -> None:
    """The value is forgotten after every use, and so is what only leads to it."""
    values = outline.profile.values
    on_the_way = [index]
    stack = list(values[index].inputs)
    is_nested = False
    while stack:
        source = stack.pop()
        if uncached[source]:
            is_nested = is_nested or bool(values[source].inputs)  # a mask is made from nothing else
        elif outline.virtual[source] and lazy[source]:
            on_the_way.append(source)
            stack += values[source].inputs
    for source in on_the_way:
        uncached[source] = True
        nested[source] = is_nested


def _live_values(outline: Outline, dropped: Collection[int], lazy: list[bool]) -> tuple[int, ...]:
    """The dropped values, and what leads to them."""
    stack = list(dropped)
    seen = set(dropped)
    while stack:
        for source in outline.inputs[stack.pop()]:
            if outline.virtual[source] and lazy[source] and source not in seen:
                seen.add(source)
                stack.append(source)
    return tuple(seen)


def _size_calls(profile: Profile, live: Collection[int], sizes: list[int], beside: list[int]) -> dict[int, int]:
    """Calls that are made again take the bytes of what is picked from them, and of what comes and goes meanwhile.

    Args:
        profile: Of the step.
        live: Values that will be computed again.
        sizes: Of each value; changed.
        beside: Of each value; changed.

    Returns:
        ``drawn_from``, see :class:`RecomputedValues`.
    """
    values = profile.values
    picked_from = dict[int, list[tuple[int, int]]]()  # by call: (stretch, bytes) of each value
    drawn_from = dict[int, int]()
    for index in live:
        value = values[index]
        if not value.picked:
            continue
        for call in value.inputs:
            picked_from.setdefault(call, []).append((value.gone, value.num_bytes))
            # The states are kept from the first moment at which something of the call is dropped.
            if values[call].state:
                drawn_from[call] = min(value.saved, drawn_from.get(call, len(profile.curve)))
    for call, picked in picked_from.items():
        sizes[call] = sum(num_bytes for _, num_bytes in picked)
        stretches = values[call].stretches
        if stretches:
            # What comes and goes in a call depends on what is picked from it.
            most = most_with(stretches, picked) + values[call].state
            beside[call] = max(0, most - sizes[call])
    return drawn_from
