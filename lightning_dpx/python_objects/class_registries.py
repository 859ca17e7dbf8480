"""Lists of instances that classes keep: code that goes through one finds the modules that a constructor has put there.

A copy of a module is made without its constructor, so that none of its parts is in such a list.
"""

import weakref
from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import nn

from lightning_dpx.python_objects.object_graph import MUTABLE, items_of, size_of
from lightning_dpx.python_objects.origin import is_library
from lightning_dpx.python_objects.reachable import classes_of

_MOST = 10_000  # items of a list that are looked at; a vocabulary of a class has more


def class_registries(module: nn.Module) -> list[str]:
    """Where classes hold submodules of ``module``, as in ``Layer.instances``.

    The module itself does not count: what holds it may be a list of experiments, and no part of its steps.
    """
    submodules = {id(child) for child in module.modules()} - {id(module)}
    found: list[str] = []
    for kind in classes_of(module):
        if is_library(kind):
            continue
        for name, value in list(vars(kind).items()):
            if any(id(item) in submodules for item in _items(value)):
                found.append(f"{kind.__name__}.{name}")
    return found


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, MUTABLE):
        if size_of(value) <= _MOST:
            return items_of(value)
        return []
    if isinstance(value, weakref.WeakSet):
        return list(islice(value, _MOST))
    if isinstance(value, weakref.WeakValueDictionary):
        return list(islice(value.values(), _MOST))
    return []
