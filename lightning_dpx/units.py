"""Bytes, as people write them."""

import re

from lightning_dpx.errors import ConfigurationError

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
        value = int(float(match[1]) * unit) if match and unit else size
    except ValueError:
        value = size
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{name}={size!r} is not allowed; give positive bytes or a text such as '8GiB'.")
    return value
