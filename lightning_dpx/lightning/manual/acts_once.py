"""Optimizers, schedulers and scalers as a replica sees them inside a step: what they do, they do once for all replicas.

User code reaches the same optimizer in many ways: ``self.optimizers()``, ``trainer.optimizers``, an attribute, a
closure. So it is the objects themselves that know who is asking: for the time of a step their class is exchanged for a
subclass of it (``isinstance`` holds), which asks the calling replica's view for every attribute. Outside of a
replica's code, as in the meeting where the real step is taken, they are what they were.
"""

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakSet

from torch.nn import Module
from torch.optim import Optimizer

from lightning_dpx.lightning.lightning_api import LightningOptimizer
from lightning_dpx.python_objects.object_graph import ATOMS
from lightning_dpx.replicas import current_rank


class View(Protocol):
    """What the attributes of shared objects are to one replica."""

    def attribute(self, owner: Any, name: str) -> Any:
        """The value of ``owner.name``."""

    def assign(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name = value``."""


_MOST_ITEMS = 64  # of a container: a vocabulary holds no optimizers, and this is asked in every step
_VIEW: ContextVar[View | None] = ContextVar("lightning_dpx_view", default=None)
# One for each block of `viewed` that is open anywhere in the process. While there is none, no caller need ask for the
# current view: Lightning asks a strategy for its module 40 times a step, and a context variable costs 40 ns each time.
OPEN_VIEWS: list[View | None] = []
_EXCHANGED: WeakSet[type] = WeakSet()  # the subclasses that ask a view


def current_view() -> Any:
    """The view of the replica that the calling code runs in; ``None`` outside of manual steps of several replicas."""
    view = _VIEW.get()
    # What runs once for all, in a meeting or in the thread of an optimizer, may have inherited a
    # view, but it is no replica's code.
    if view is None or current_rank() is None:
        return None
    return view


@contextmanager
def viewed(view: View | None) -> Iterator[None]:
    """Shared objects are seen like this by the calling code, for a while."""
    token = _VIEW.set(view)
    OPEN_VIEWS.append(view)
    try:
        yield
    finally:
        # Which entry goes does not matter, since only their number is asked for.
        OPEN_VIEWS.pop()
        _VIEW.reset(token)


def plain_attribute(owner: Any, name: str) -> Any:
    """The attribute as it is outside of a step."""
    # The attribute of the object itself, even where a replica's code asks.
    with viewed(None):
        return getattr(owner, name)


def unwrapped_optimizer(owner: Any) -> Any:
    """The optimizer in Lightning's wrapper of it; anything else as it is."""
    if isinstance(owner, LightningOptimizer):
        return plain_attribute(owner, "_optimizer")
    return owner


def held_optimizers(module: Module) -> list[Any]:
    """Optimizers that a module keeps as attributes, or in a list, tuple or dict of its own."""
    found = []
    # Most attributes are atoms, and this is asked in every step: they are left out before anything is looked at.
    others = [value for value in vars(module).values() if type(value) not in ATOMS]
    for value in others:
        kind = type(value)
        if isinstance(value, Optimizer):
            found.append(value)
        elif kind in (list, tuple, dict) and 0 < len(value) <= _MOST_ITEMS:
            items = value.values() if kind is dict else value
            found += [item for item in items if isinstance(item, Optimizer)]
    return found


class Exchanged:
    """Objects whose classes are exchanged for the time of a step."""

    def __init__(self) -> None:
        self._classes: list[tuple[Any, type]] = []
        self._subclasses: dict[type, type] = {}

    def add(self, owners: Iterable[Any]) -> None:
        """Has these objects, too, ask the view of the calling replica from here on."""
        for owner in owners:
            # An object is met more than once: by itself, in its wrapper, or in the middle
            # of a step.
            if not acts_once(owner):
                self._classes.append((owner, type(owner)))
                owner.__class__ = self._subclass_of(type(owner))

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Gives all objects their own classes back for a while, in which no replica's code may run.

        For what happens once for all: a compiled ``step`` cannot be traced through a class that intercepts attributes.
        """
        for owner, original in self._classes:
            owner.__class__ = original
        try:
            yield
        finally:
            for owner, original in self._classes:
                owner.__class__ = self._subclass_of(original)

    def restore(self) -> None:
        """Gives all objects their own classes back."""
        for owner, original in reversed(self._classes):
            owner.__class__ = original
        self._classes = []

    def _subclass_of(self, kind: type) -> type:
        if kind not in self._subclasses:
            self._subclasses[kind] = _make_subclass(kind)
            _EXCHANGED.add(self._subclasses[kind])
        return self._subclasses[kind]


def acts_once(owner: Any) -> bool:
    """Whether the class of ``owner`` is exchanged at present."""
    return type(owner) in _EXCHANGED


def _make_subclass(kind: Any) -> type:
    """A class of the same name, a subclass of ``kind`` that asks the calling replica's view for attributes."""

    def get(self: Any, name: str) -> Any:
        # Python asks for special attributes by itself, as in isinstance(), and the class must answer.
        view = None if name.startswith("__") else current_view()
        if view is None:
            return kind.__getattribute__(self, name)
        return view.attribute(self, name)

    def put(self: Any, name: str, value: Any) -> None:
        view = None if name.startswith("__") else current_view()
        if view is None:
            kind.__setattr__(self, name, value)
        else:
            view.assign(self, name, value)

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__getattribute__"] = get
        namespace["__setattr__"] = put
        # Code that looks at the name of an optimizer's class finds the one that it knows.
        for name in ("__qualname__", "__module__", "__doc__"):
            namespace[name] = getattr(kind, name)

    # No other base: before a class with an abstract one its objects would have another layout, and Python refuses to
    # exchange the class of an object for one of another layout.
    return types.new_class(kind.__name__, (kind,), exec_body=fill)
