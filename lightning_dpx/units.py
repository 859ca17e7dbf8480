"""Bytes, rates and times, as people write and read them."""

import re

from lightning_dpx.arguments import is_whole_number
from lightning_dpx.errors import ConfigurationError

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}

# A letter in front, in decimal as data sheets write rates; binary ones as bytes have them.
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


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
    if not is_whole_number(value) or value <= 0:
        raise ConfigurationError(f"{name}={size!r} is not allowed; give positive bytes or a text such as '8GiB'.")
    return int(value)


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


def parse_byte_rate(name: str, text: str) -> float:
    """Bytes per second from a text such as ``"50GB/s"``; ``"400Gb/s"`` and ``"400Gbit/s"`` count bits, as networks do.

    Raises:
        ConfigurationError: names the argument ``name`` and says what is required.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kKMGT]i?|)(B|b|bit)/s\s*", text)
    prefixes = _PREFIXES | _BINARY
    rate = float(match[1]) * prefixes.get(match[2], 0.0) if match else 0.0
    if match and match[3] != "B":
        rate /= 8
    if not 0 < rate < float("inf"):
        raise ConfigurationError(
            f"{name}={text!r} is not allowed; give a positive number with a unit per second: 50GB/s in bytes, or "
            "400Gb/s in bits."
        )
    return rate


def parse_flops(name: str, text: str) -> float:
    """Floating point operations per second from a text such as ``"100TF/s"`` or ``"100 TFLOP/s"``.

    Raises:
        ConfigurationError: names the argument ``name`` and says what is required.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kKMGTP]?)(?:F/s|FLOPs?/s|FLOPS)\s*", text)
    rate = float(match[1]) * _PREFIXES[match[2]] if match else 0.0
    if not 0 < rate < float("inf"):
        raise ConfigurationError(
            f"{name}={text!r} is not allowed; give a positive number with a unit per second, such as 100TF/s."
        )
    return rate


def parse_seconds(name: str, text: str) -> float:
    """Seconds from a text such as ``"5us"``, ``"0.1 ms"`` or ``"0s"``.

    Raises:
        ConfigurationError: names the argument ``name`` and says what is required.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(s|ms|us|ns)\s*", text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigurationError(f"{name}={text!r} is not allowed; give a number with a unit, such as 5us or 0.1ms.")
    return seconds


def format_mib(size: float, digits: int = 1) -> str:
    """Bytes as MiB, as in all of the package's messages: ``"6.3 MiB"``; below one, as KiB.

    Args:
        size: In bytes.
        digits: Behind the point; none where sizes are those of devices, two in tables of small ones.
    """
    # Small models are what people try first, and all of their sizes would be nothing.
    if 0 < size < MIB:
        return f"{size / KIB:.{digits}f} KiB"
    return f"{size / MIB:.{digits}f} MiB"


def unit_of_table(largest: float, digits: int = 1) -> tuple[str, int]:
    """The unit of all sizes in a table, by name and in bytes, that shows also what is far below the largest.

    Args:
        largest: In bytes.
        digits: Of the table, behind the point.
    """
    # Two digits show a hundredth of the largest, as one digit does of ten times as much.
    if largest < 10 ** (2 - digits) * MIB:
        return "KiB", KIB
    return "MiB", MIB


def format_part(part: float, whole: float) -> str:
    """A part of some bytes beside the whole, in one unit: ``"1.48 of 1.50 GiB"``."""
    if whole >= GIB:
        return f"{part / GIB:.2f} of {whole / GIB:.2f} GiB"
    if whole < MIB:
        return f"{part / KIB:.1f} of {whole / KIB:.1f} KiB"
    return f"{part / MIB:.1f} of {whole / MIB:.1f} MiB"


def format_bytes(size: float) -> str:
    """Bytes in the unit that shows them: ``"512 bytes"``, ``"1.50 KiB"``, ``"6.30 MiB"``."""
    if size < KIB:
        return f"{size:.0f} bytes"
    if size < MIB:
        return f"{size / KIB:.2f} KiB"
    return format_mib(size, 2)


def format_least(size: int) -> str:
    """Bytes that are needed, as :func:`format_bytes` shows them but rounded up: what is shown is enough."""
    unit = 1
    for larger in (KIB, MIB):
        if size >= larger:
            unit = larger
    hundredths = -(-size * 100 // unit)
    return format_bytes(hundredths * unit / 100)


def format_seconds(seconds: float) -> str:
    """A time in the unit that shows it: ``"2.50 s"``, ``"18.3 ms"``, ``"5.0 us"``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"
