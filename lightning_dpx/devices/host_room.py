"""A step that does not fit into the host's memory ends with an error, and not with the process.

Most hosts promise more memory than they have: no allocation fails, and the system ends a process that writes to more
than there is. So what is left is looked at while a step allocates. After each eighth of it is enough, as nothing can
have used up the rest in between, except an operator that alone takes more.
"""

from collections.abc import Callable

import torch

from lightning_dpx.devices.memory import NO_LIMIT, free_bytes
from lightning_dpx.units import format_bytes

_LOOKS_PER_ROOM = 8
_KEPT = 64  # one part in so many stays free, for what is not allocated by operators
_OPERATORS_AHEAD = 2  # as large as the largest so far: a result, and what the operator takes inside for it


def _left_on_host() -> int:
    try:
        return free_bytes(torch.device("cpu"))
    except (AttributeError, OSError, ValueError):  # macOS and Windows do not tell
        return NO_LIMIT


class HostFullError(torch.OutOfMemoryError):
    """A step was stopped before the host had no memory left: whatever it was doing then, the whole does not fit."""


class HostRoom:
    """Stops a step before the host has no memory left.

    Args:
        left: Bytes that can still be allocated.
    """

    def __init__(self, left: Callable[[], int] = _left_on_host) -> None:
        self._left = left
        self._at_first = left()
        self._largest = 0  # bytes of the results of one operator
        self._until_look = self._at_first // _LOOKS_PER_ROOM

    def take(self, num_bytes: int) -> None:
        """Called with the bytes of an operator's results.

        Raises:
            HostFullError: another one of that size would not fit.
        """
        self._largest = max(self._largest, num_bytes)
        self._until_look -= num_bytes
        # What was freed since is not known here, so a look may come too early but never too late.
        if self._until_look < 0:
            self._look()

    def _look(self) -> None:
        left = self._left()
        self._until_look = left // _LOOKS_PER_ROOM
        needed = max(_OPERATORS_AHEAD * self._largest, self._at_first // _KEPT)
        if left < needed:
            raise HostFullError(
                f"The host has {format_bytes(left)} left of {format_bytes(self._at_first)} when this step began, and "
                f"an operator of it takes {format_bytes(self._largest)}: the step is stopped here, before the system "
                "would end the process."
            )
