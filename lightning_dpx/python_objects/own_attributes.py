"""What an object holds in its ``__dict__``, asked of the object and of nothing that answers in its place."""

from typing import Any


def own_attributes(value: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes itself; ``None`` where it has none.

    A class with slots whose ``__getattr__`` answers every name, as wrappers of foreign libraries and remote objects
    have it, has no dict, but gives something else for it.
    """
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return held if isinstance(held, dict) else None
