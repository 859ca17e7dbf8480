"""Copies of objects in two steps, as ``copy.deepcopy`` makes them: an empty object, and then its state.

In between, what refers to the object can be led to its copy already.
"""

import copyreg
import types
from typing import Any

from lightning_dpx.python_objects.own_attributes import is_made_from_state, reduced_unchanged


def is_copied_by_state(value: Any) -> bool:
    """Whether ``copy.deepcopy`` makes an empty object and gives it a copy of its state, and does no more."""
    kind = type(value)
    if hasattr(kind, "__deepcopy__") or kind in copyreg.dispatch_table or isinstance(value, type | types.FunctionType):
        return False
    return is_made_from_state(kind, reduced_unchanged(value))


def empty(kind: Any) -> Any:
    """An object without a state; past the ``__new__`` of its class, which may want what the constructor was given."""
    try:
        return object.__new__(kind)
    except TypeError:  # a class in C makes its objects itself
        return kind.__new__(kind)


def set_state(value: Any, state: Any) -> None:
    """Sets the state of a copy, as ``copy.deepcopy`` does."""
    if state is None:
        return
    if hasattr(value, "__setstate__"):
        value.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        vars(value).update(attributes)
    for name, content in (slots or {}).items():
        setattr(value, name, content)
