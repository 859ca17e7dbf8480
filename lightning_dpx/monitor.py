"""Statistics of every tensor that flows through the replicas of a group (MXNet's Monitor)."""

import threading
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from lightning_dpx.errors import ConfigurationError


class Observation(NamedTuple):
    """One tensor that one submodule returned."""

    replica: int
    device: torch.device
    name: str
    value: float


def root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    """The root of the mean square of all elements; NaN and infinities show."""
    # Integers have no mean, and squares in half precision overflow beyond 255.
    return tensor.float().square().mean().sqrt()


class TensorMonitor:
    """Collects a number for the output of every submodule of a group's replicas, such as its mean magnitude.

    Give it to :meth:`ReplicaGroup.install_monitor`; :meth:`collect` hands out what it saw.

    Args:
        statistic: A tensor of any shape to one number, computed where the tensor lives.
        pattern: Only submodules whose name matches (as file names do: ``"encoder.*"``).

    Raises:
        ConfigurationError: the statistic is not callable; or, in a forward, it returns more than one number.

    Examples:
        >>> group = dpx.ReplicaGroup(nn.Linear(4, 2), ["cpu", "cpu"])
        >>> monitor = dpx.TensorMonitor(torch.amax)
        >>> group.install_monitor(monitor)
        >>> output = group.forward(torch.ones(6, 4))
        >>> len(monitor.collect()) > 0
        True
    """

    def __init__(
        self, statistic: Callable[[torch.Tensor], torch.Tensor] = root_mean_square, pattern: str = "*"
    ) -> None:
        if not callable(statistic):
            raise ConfigurationError(f"statistic={statistic!r} is not a function; give one that maps a tensor to one.")
        if not isinstance(pattern, str):
            raise ConfigurationError(f"pattern={pattern!r} is no text; give a pattern of names, such as 'encoder.*'.")
        self._statistic = statistic
        self._pattern = pattern
        self._seen: list[tuple[int, torch.device, str, torch.Tensor]] = []
        self._lock = threading.Lock()  # replicas in threads report at the same time

    def __call__(self, replica: int, name: str, tensor: torch.Tensor) -> None:
        """Notes the statistic of ``tensor``, without waiting for its device."""
        if not fnmatchcase(name, self._pattern):
            return
        # The statistic is no part of the step, and its graph would hold the tensor.
        with torch.no_grad():
            value = self._statistic(tensor.detach())
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ConfigurationError(
                f"The statistic returned a tensor of shape {list(value.shape)} for {name!r}; return one number."
            )
        with self._lock:
            self._seen.append((replica, tensor.device, name, value))

    def collect(self) -> list[Observation]:
        """All observations since the last call, by replica, each in the order of its forward."""
        with self._lock:
            # Handed out once: what comes later is for the next call.
            seen = self._seen
            self._seen = []
        # A stable sort: what one replica has reported stays in order.
        seen.sort(key=lambda entry: entry[0])
        # Only here does the host wait for the devices, not in the middle of a forward.
        return [Observation(replica, device, name, float(value)) for replica, device, name, value in seen]
