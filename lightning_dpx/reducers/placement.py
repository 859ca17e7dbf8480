"""Which device holds what: balanced by size (tensorpack's LeastLoadedDeviceSetter and OverrideCachingDevice)."""

import math
from collections.abc import Sequence
from typing import TypeVar

from lightning_dpx.arguments import is_number
from lightning_dpx.errors import ConfigurationError

Device = TypeVar("Device")


def least_loaded_placement(sizes: Sequence[int], devices: Sequence[Device]) -> list[Device]:
    """A device per item; the loads of two devices differ by at most the largest item.

    The largest items are placed first, each on the device that holds least so far (Graham's LPT rule: at most 4/3 of
    the best possible maximum); equal loads go to the earlier device.

    Args:
        sizes: Elements or bytes of every item, not negative.
        devices: At least one.

    Raises:
        ConfigurationError: no devices, or a size that is negative or no finite number.

    Examples:
        >>> dpx.least_loaded_placement([5, 3, 3, 2], ["cuda:0", "cuda:1"])
        ['cuda:0', 'cuda:1', 'cuda:1', 'cuda:0']
    """
    if not devices:
        raise ConfigurationError("devices is empty; give at least one device.")
    for index, size in enumerate(sizes):
        # NaN is not negative, and would make every comparison of loads false.
        if not is_number(size) or not 0 <= size < math.inf:
            raise ConfigurationError(f"sizes[{index}]={size!r} is not allowed; sizes are numbers, not negative.")
    loads = [0] * len(devices)
    placed = [devices[0]] * len(sizes)
    # Largest first (Graham's rule): the fullest device is then at most a third above the best there is.
    for index in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        # The first of equals: every process must come to the same placement.
        least = min(range(len(devices)), key=loads.__getitem__)
        loads[least] += sizes[index]
        placed[index] = devices[least]
    return placed


def small_aside_placement(
    sizes: Sequence[int], devices: Sequence[Device], device_for_small: Device, threshold: int
) -> list[Device]:
    """Items smaller than ``threshold`` on one device, the others balanced over ``devices``.

    Many small copies cost more than their bytes; together on one device they are one.

    Args:
        sizes: Elements or bytes of every item.
        devices: For the large items.
        device_for_small: For the small ones.
        threshold: In the unit of ``sizes``.

    Raises:
        ConfigurationError: as in :func:`least_loaded_placement`.
    """
    large = [index for index, size in enumerate(sizes) if size >= threshold]
    placed = [device_for_small] * len(sizes)
    for index, device in zip(large, least_loaded_placement([sizes[index] for index in large], devices), strict=True):
        placed[index] = device
    return placed
