"""Attributes of objects that are others for a while, and are put back as they were."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Overrides:
    """Attributes that instances have instead of their own, until they are put back.

    Only what an instance holds itself is looked at: in front of a method or an attribute of its class, an override is
    taken away in the end, and the class's own shows again.
    """

    def __init__(self) -> None:
        # The dict and not its owner, whose `__setattr__` is passed by in both directions.
        self._before: list[tuple[dict[str, Any], str, bool, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """From now on ``owner.name`` is ``value``."""
        attributes = vars(owner)
        self._before.append((attributes, name, name in attributes, attributes.get(name)))
        # Not by setattr: modules would register what they are given, and a class may refuse it.
        attributes[name] = value

    def put_back(self) -> None:
        """All attributes are what they were, the last override first."""
        while self._before:
            attributes, name, was_there, value = self._before.pop()
            if was_there:
                attributes[name] = value
            else:
                attributes.pop(name, None)


@contextmanager
def overridden(owner: Any, **attributes: Any) -> Iterator[None]:
    """``owner`` has these attributes for a while; see :class:`Overrides`."""
    overrides = Overrides()
    try:
        for name, value in attributes.items():
            overrides.set(owner, name, value)
        yield
    finally:
        overrides.put_back()


@contextmanager
def preserve_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards each module is in the mode, train or eval, that it was in: ``train()`` would set all alike."""
    before = {module: module.training for module in modules}
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
