"""What an object holds in its ``__dict__``, asked of the object and of nothing that answers in its place."""

import copyreg
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
    if isinstance(held, dict):
        return held
    return None


def is_made_from_state(kind: type, reduced: Any) -> bool:
    """Whether an object is made by ``__new__`` alone, then given a state, with no items to append or to set.

    Args:
        kind: Its class.
        reduced: What ``__reduce_ex__(4)`` of it gives.
    """
    if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return False
    return reduced[1] == (kind,) and all(part is None for part in reduced[3:])


def reduced_unchanged(value: Any) -> Any:
    """``value.__reduce_ex__(4)``, which a copy of ``value`` is made from; its attributes are as they were.

    A ``__getstate__`` that drops what cannot be pickled (weak references, caches) may drop it from the object itself,
    which one device, where nothing is copied, would still have.
    """
    attributes = own_attributes(value)
    if attributes is None:
        return value.__reduce_ex__(4)
    before = dict(attributes)
    reduced: Any = value.__reduce_ex__(4)
    is_as_before = len(before) == len(attributes) and all(attributes.get(key, before) is before[key] for key in before)
    if not is_as_before:
        # The state may be the dict itself, and then the copy is to be made without what was dropped.
        if isinstance(reduced, tuple) and reduced[2:] and reduced[2] is attributes:
            reduced = (*reduced[:2], dict(attributes), *reduced[3:])
        attributes.clear()
        attributes.update(before)
    return reduced
