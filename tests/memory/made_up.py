"""Profiles of made-up numbers: what planners see of a step needs no step."""

from lightning_dpx.memory.profile.data import Profile, Request, SavedStorage, SavedValue

SIZE = 1 << 20  # bytes of each value


def chain(length: int, *, refused: str = "", seconds: float = 1.0) -> Profile:
    """The step of a chain of equal layers, each of which saves what it computes from the one before.

    Args:
        length: Layers.
        refused: Why the middle one cannot be computed again, if it cannot.
        seconds: That each layer takes.
    """
    values = []
    storages = []
    for index in range(length):
        inputs = (index - 1,) if index else ()
        why = refused if index == length // 2 else ""
        values.append(SavedValue(f"{index}:0", "Layer", SIZE, index, inputs, seconds, why, saved=index))
        storages.append(SavedStorage(SIZE, unused=index + 2, freed=2 * length - index))
    backward = reversed(range(length))
    requests = tuple(Request(2 * length - 1 - index, index, 2 * length - index) for index in backward)
    rising = [SIZE * (index + 1) for index in range(length)]
    return Profile(
        values=tuple(values),
        storages=tuple(storages),
        requests=requests,
        curve=tuple(rising + rising[::-1]),
        forward_events=length,
        step_seconds=3 * length * seconds,
        forward_seconds=length * seconds,
    )
