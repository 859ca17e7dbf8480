"""One strategy object in several Trainers, one after the other.

Lightning gives a strategy object the accelerator, devices and plugins of its Trainer. A second Trainer would find them
there and take them for what the user gave to the strategy: it refuses some, and quietly follows others. So what was
given at first comes back as soon as another Trainer asks.
"""

import sys
import weakref
from typing import Any

from lightning_dpx.lightning.lightning_compat import CODE_THAT_ASKS


def asking_connector() -> Any:
    """The part of a new Trainer that looks at what its strategy was given, if it is the caller's caller."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_code is CODE_THAT_ASKS else None


class Adoption:
    """Which Trainer a strategy object belongs to, and what the strategy had before it belonged to any.

    Args:
        names: Attributes of the strategy that a Trainer sets.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._given: dict[str, Any] | None = None  # until the first Trainer asks, the user may set them
        self._connector: weakref.ref[Any] | None = None

    def is_by(self, connector: Any) -> bool:
        """Whether ``connector`` is that of the Trainer that the strategy belongs to, or none was seen."""
        return self._connector is None or self._connector() is connector

    def begin(self, strategy: Any, connector: Any) -> None:
        """``strategy`` is as it was given, and belongs to the Trainer of ``connector`` from now on."""
        if self._given is None:
            self._given = {name: getattr(strategy, name) for name in self._names}
        for name, value in self._given.items():
            setattr(strategy, name, value)
        self._connector = weakref.ref(connector)
