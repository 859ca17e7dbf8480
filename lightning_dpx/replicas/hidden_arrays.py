"""NumPy arrays of modules that a module holds in lists or dicts: all replicas share them.

Such a module has a copy on every device, and an array is on none: nothing counts what is written into it, so that the
copies would not follow it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn

from lightning_dpx.python_objects.object_contents import own_values
from lightning_dpx.python_objects.object_graph import items_of


def arrays_of_hidden(
    module: nn.Module, is_boundary: Callable[[Any], bool] = lambda value: False
) -> Iterator[tuple[str, Any]]:
    """The arrays of all modules in containers of ``module`` that are no submodules, with a name of each.

    Args:
        module: Whose attributes are looked at.
        is_boundary: Where the search ends.
    """
    registered = set(map(id, module.modules()))
    # Where one hidden module holds another in a list, that is looked into as well.
    waiting: list[nn.Module] = []
    for child in module.modules():
        waiting += _kept(child, nn.Module, is_boundary)
    seen: set[int] = set()
    place = 0
    while waiting:
        hidden = waiting.pop(0)
        if id(hidden) in registered or id(hidden) in seen or is_boundary(hidden):
            continue
        seen.add(id(hidden))
        # By number: copies of the module are searched in the same order.
        for number, array in enumerate(arrays_of(hidden, is_boundary)):
            yield f"{type(hidden).__name__}[{place}].arrays[{number}]", array
        place += 1
        for child in hidden.modules():
            waiting += _kept(child, nn.Module, is_boundary)


def arrays_of(module: nn.Module, is_boundary: Callable[[Any], bool] = lambda value: False) -> list[Any]:
    """The arrays of numbers that ``module`` and its submodules hold in attributes, or in containers there.

    Args:
        module: What is searched.
        is_boundary: Where the search ends.
    """
    found: dict[int, Any] = {}
    for child in module.modules():
        for array in _kept(child, np.ndarray, is_boundary):
            # One that holds objects may hold tensors, of which each device has its own.
            if not array.dtype.hasobject:
                found[id(array)] = array
    return list(found.values())


def _kept(module: nn.Module, kind: type, is_boundary: Callable[[Any], bool]) -> list[Any]:
    """What of this kind the attributes of one module lead to, through containers."""
    own = (value for _, value in own_values(module))
    return found_in(own, kind, is_boundary)


def found_in(values: Iterable[Any], kind: type, is_boundary: Callable[[Any], bool] = lambda value: False) -> list[Any]:
    """What of a kind is among ``values``, or in lists, tuples and dicts of them.

    Args:
        values: What is searched.
        kind: A class.
        is_boundary: Where the search ends.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = list(values)
    # It is popped from the end.
    waiting.reverse()
    while waiting:
        value = waiting.pop()
        if isinstance(value, kind):
            found.append(value)
        children = _items(value)
        # Containers may hold each other in a circle.
        if children and id(value) not in seen and not is_boundary(value):
            seen.add(id(value))
            waiting.extend(reversed(children))
    return found


def _items(value: Any) -> Sequence[Any]:
    if not isinstance(value, dict | list | tuple | deque):
        return ()
    # Past methods of its own: a mapping of a library may import all of its models.
    items = items_of(value)
    # A long list of text or numbers leads nowhere, and is not walked through.
    if set(map(type, items)) <= {str, int, float, bool, bytes, type(None)}:
        return ()
    return items
