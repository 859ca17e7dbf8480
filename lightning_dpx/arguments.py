"""What public functions ask of their arguments, whatever they are for."""

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
