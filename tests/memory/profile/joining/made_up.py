"""Profiles of made-up chains of calls, of which some are left out."""

from collections.abc import Sequence

from lightning_dpx.memory.profile.data import Profile, Request, SavedStorage, SavedValue

MIB = 1 << 20


def step_of(layers: Sequence[int]) -> Profile:
    """A step that calls these of the layers, each of which saves one value of as many MiB as its number.

    Each layer is one event of forward and one of backward, in which what it keeps is there still.
    """
    length = len(layers)
    values = []
    storages = []
    requests = []
    rising = []
    for at, layer in enumerate(layers):
        inputs = (at - 1,) if at else ()
        values.append(SavedValue(f"layers.{layer}:0", "Layer", layer * MIB, at, inputs, 1.0, "", saved=at))
        storages.append(SavedStorage(layer * MIB, unused=at + 1, freed=2 * length - at))
        requests.append(Request(2 * length - 1 - at, at, 2 * length - at))
        rising.append(sum(layers[: at + 1]) * MIB)
    return Profile(
        values=tuple(values),
        storages=tuple(storages),
        requests=tuple(reversed(requests)),
        curve=tuple(rising + rising[::-1]),
        forward_events=length,
        step_seconds=3.0 * length,
        forward_seconds=1.0 * length,
    )


def all_values(profile: Profile) -> range:
    """The indices of its values."""
    return range(len(profile.values))
