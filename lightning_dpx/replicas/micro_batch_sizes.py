"""A replica's slice in M micro-batches, each by a replica of its own that shares the parameters of the first.

    slice of a device --largest_rows--> rows of M micro-batches --one after the other--> the same parameters
                                                                                          and their gradients

A micro-batch is a replica like any other: logs, metrics, Python state, buffers and collectives know nothing new. What
it has for itself are its buffers and its submodules; parameters, and so gradients, are the very objects of the first
replica of its device, in which they accumulate.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from lightning_dpx.arguments import is_whole_number
from lightning_dpx.errors import ConfigurationError

MicroBatches = int | Sequence[int]
_MOST = 4096  # of a device: each is a replica, made before the rows of any batch are known


def check_micro_batches(micro_batches: object, others: str = "") -> None:
    """What can be said before the devices are known.

    Args:
        micro_batches: What was given.
        others: What else may be given instead, for the message.

    Raises:
        ConfigurationError: neither a positive integer nor a list of them.
    """
    for name, number in _named(micro_batches):
        _check_number(name, number, others)
        # Of what a user names: what is chosen, or doubled in need of memory, knows how many rows there are.
        if number > _MOST:
            raise ConfigurationError(
                f"{name}={number} is not allowed; give at most {_MOST}, and no more than a device has rows{others}: "
                "each micro-batch is a replica with submodules of its own."
            )


def _named(micro_batches: object) -> list[tuple[str, Any]]:
    """The numbers in what was given, with their names for messages."""
    if isinstance(micro_batches, list | tuple):
        return [(f"micro_batches[{index}]", number) for index, number in enumerate(micro_batches)]
    return [("micro_batches", micro_batches)]


def _check_number(name: str, number: object, others: str) -> None:
    if not is_whole_number(number) or number < 1:
        raise ConfigurationError(
            f"{name}={number!r} is not allowed; give a positive integer, or one for each device, for example 4 or "
            f"[4, 2]{others}. 1 runs every slice as it is."
        )


def parse_micro_batches(micro_batches: MicroBatches, num_devices: int) -> tuple[int, ...]:
    """One positive number for each device.

    Raises:
        ConfigurationError: another number of entries, or one that is no positive integer.
    """
    for name, number in _named(micro_batches):
        _check_number(name, number, "")
    if not isinstance(micro_batches, Sequence):
        return (int(micro_batches),) * num_devices
    if len(micro_batches) != num_devices:
        raise ConfigurationError(
            f"micro_batches has {len(micro_batches)} entries {list(micro_batches)} for {num_devices} devices; give one "
            "per device, or one number for all."
        )
    return tuple(map(int, micro_batches))


def cut_into_micro_batches(
    sizes: Sequence[int], usual: Sequence[int], micro_batches: Sequence[int], places: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Rows of every micro-batch, those of the first device first; 0 for one that has nothing to do.

    A shorter batch is cut into fewer: memory is enough for as many rows as the largest usual micro-batch has. None has
    a single row where two are usual, on which batch norm would fail; then some have three.

    Args:
        sizes: Rows of K devices.
        usual: The same, of a full batch.
        micro_batches: K numbers of micro-batches, M.
        places: K numbers of replicas, at least as many; those beyond M have nothing to do.
    """
    rows: list[int] = []
    for size, full, number, place in zip(sizes, usual, micro_batches, places or micro_batches, strict=True):
        # Rounded up: M pieces of this size hold a full batch.
        largest = max(1, -(-max(size, full) // number))
        active = min(number, -(-size // largest))
        # Some would have a single row where two are usual: fewer micro-batches have more.
        if largest > 1 and size // max(1, active) == 1 < max(size, full) // number:
            active = max(1, size // 2)
        # As even as can be: the first ones have a row more, and those that are left over none.
        least, more = divmod(size, max(1, active))
        rows += [least + 1] * more + [least] * (active - more) + [0] * (place - active)
    return tuple(rows)


def sum_by_device(rows: Sequence[int], micro_batches: Sequence[int]) -> tuple[int, ...]:
    """What :func:`cut_into_micro_batches` was given: rows of K devices."""
    ends = list(itertools.accumulate(micro_batches))
    return tuple(sum(rows[end - number : end]) for end, number in zip(ends, micro_batches, strict=True))
