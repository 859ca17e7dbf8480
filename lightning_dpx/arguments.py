"""What public functions ask of their arguments, whatever they are for."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeGuard

from torch import nn

from lightning_dpx.errors import ConfigurationError


def is_whole_number(value: object) -> TypeGuard[int]:
    """Whether it is an int, or stands for one as NumPy's integers do; True, to Python the number one, is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, NumPy's among them; True is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_is_module(module: object) -> None:
    """Refuses what is no module before anything looks into it.

    Raises:
        ConfigurationError: says what was given, and for a class that an instance is asked for.
    """
    if isinstance(module, nn.Module):
        return
    way_out = "give an instance of torch.nn.Module"
    if isinstance(module, type) and issubclass(module, nn.Module):
        way_out = f"give an instance of the class: {module.__name__}(...)"
    raise ConfigurationError(f"module={module!r} is not allowed; {way_out}.")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Refuses a value that is not among ``allowed``.

    Raises:
        ConfigurationError: names the argument, the value and what is allowed.
    """
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not allowed; choose one of {', '.join(map(repr, allowed))}.")
