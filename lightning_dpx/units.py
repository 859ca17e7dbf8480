"""Bytes, as people write and read them."""

import re

from lightning_dpx.errors import ConfigurationError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_bytes(name: str, size: int | str) -> int:
    """Bytes from a number or a text such as ``"8GiB"``, ``"512 MiB"`` or ``"2GB"``.

    Raises:
        ConfigurationError: names the argument ``name`` and says what is allowed.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*((?:[KMGT]i?)?B?)\s*", size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2]) if match else None
    try:
        # The pattern lets "1.2.3" through; float refuses it, and the message below tells
        # what is allowed.
        value = int(float(match[1]) * unit) if match and unit else size
    except (ValueError, OverflowError):
        value = size
    # To Python True is an integer.
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{name}={size!r} is not allowed; give positive bytes or a text such as '8GiB'.")
    return value


def parse_share(name: str, text: str) -> float:
    """A share from a text such as ``"60%"``.

    Raises:
        ConfigurationError: names the argument ``name`` and says what is allowed.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", text)
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share <= 1:
        raise ConfigurationError(f"{name}={text!r} is not allowed; give more than 0% and at most 100%.")
    return share


def format_mib(size: float, digits: int = 1) -> str:
    """Bytes as MiB, as in all of the package's messages: ``"6.3 MiB"``.

    Args:
        size: In bytes.
        digits: Behind the point; none where sizes are those of devices, two in tables of small ones.
    """
    return f"{size / MIB:.{digits}f} MiB"


def format_part(part: float, whole: float) -> str:
    """A part of some bytes beside the whole, in one unit: ``"1.48 of 1.50 GiB"``."""
    if whole >= GIB:
        return f"{part / GIB:.2f} of {whole / GIB:.2f} GiB"
    return f"{part / MIB:.1f} of {whole / MIB:.1f} MiB"


def format_bytes(size: float) -> str:
    """Bytes in the unit that shows them: ``"512 bytes"``, ``"1.50 KiB"``, ``"6.30 MiB"``."""
    if size < KIB:
        return f"{size:.0f} bytes"
    return f"{size / KIB:.2f} KiB" if size < MIB else format_mib(size, 2)
