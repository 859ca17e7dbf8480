"""What an object that is no container keeps from one call to the next, wherever it keeps it, by name.

An object with attributes may be called as well, a class may have slots instead, and a function keeps what it has
captured, its default values and its own attributes; a method has all that its object keeps.
"""

import array
import ctypes
import functools
import types
from typing import Any

from lightning_dpx.python_objects.object_contents import slot_contents
from lightning_dpx.python_objects.object_graph import content_of
from lightning_dpx.python_objects.own_attributes import own_attributes

_WITHOUT_STATE = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType)
# The class that all numbers of ctypes have in common has no public name.
_NUMBERS_IN_C: Any = (ctypes.c_int.__mro__[1], ctypes.Array, ctypes.Structure, ctypes.Union)

# What torch.compile notes on functions, such as an address, is another one in each copy of the same module.
_OF_COMPILER = "_torchdynamo_"


def kept_values(value: Any) -> dict[str, Any] | None:
    """The values by name; ``None`` for an object that keeps none, or none that Python shows."""
    if isinstance(value, _WITHOUT_STATE):
        return None
    if isinstance(value, types.FunctionType):
        return _kept_by_function(value)
    if isinstance(value, types.MethodType):
        return {"__self__": value.__self__, **_kept_by(value.__func__)}
    found = _kept_in_c(value)
    own = own_attributes(value)
    if found is None:
        # A class with slots may have a base without, whose attributes are in a dict.
        found = dict(slot_contents(value))
        if own is None and not found:
            return None
    return {**found, **(own or {})}


def _kept_in_c(value: Any) -> dict[str, Any] | None:
    """What an object keeps beside its attributes; ``None`` if it is of no kind that does."""
    if isinstance(value, functools.partial):
        return {**_kept_by(value.func), "args": value.args, **value.keywords}
    if isinstance(value, array.array | bytearray):
        return {"items": list(value)}
    if isinstance(value, _NUMBERS_IN_C):
        return {"bytes": bytes(value)}
    return None


def _kept_by(function: Any) -> dict[str, Any]:
    return kept_values(function) or {}


def _kept_by_function(function: types.FunctionType) -> dict[str, Any]:
    code = function.__code__
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        captured = content_of(cell)
        # A function that names itself has captured itself.
        if captured is not function:
            found[name] = captured
    # Default values belong to the last of the arguments.
    given = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    if given:
        found.update(zip(arguments[-len(given) :], given, strict=True))
    own = {name: value for name, value in vars(function).items() if not name.startswith(_OF_COMPILER)}
    return {**found, **(function.__kwdefaults__ or {}), **own}
