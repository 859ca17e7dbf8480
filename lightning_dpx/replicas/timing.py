"""How long every replica works in a step, for callbacks that watch it."""

from collections.abc import Sequence

import torch

from lightning_dpx.devices import Stopwatch, synchronize


class StepTimes:
    """Times one step; the steps without one are not touched.

    Args:
        devices: K devices.

    Attributes:
        devices: The same.
        rows: n_i, the rows of every replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices: tuple[torch.device, ...] = tuple(devices)
        self.rows: tuple[int, ...] = (0,) * len(devices)
        self._watches: list[tuple[int, str, Stopwatch]] = []
        self._alone: list[tuple[str, Stopwatch]] = []

    def begin(self, rows: Sequence[int]) -> None:
        """The batch is cut into these rows per replica."""
        self.rows = tuple(rows)

    def watch(self, replica: int, stage: str) -> Stopwatch:
        """A stopwatch for a stage that ``replica`` is about to run."""
        watch = Stopwatch(self.devices[replica])
        self._watches.append((replica, stage, watch))
        return watch

    def watch_alone(self, stage: str) -> Stopwatch:
        """A stopwatch for the whole step; it counts if no replica is watched more closely."""
        watch = Stopwatch(self.devices[0])
        self._alone.append((stage, watch))
        return watch

    def seconds(self, stage: str) -> list[float]:
        """Seconds that every replica spent on ``stage``; waits for the devices."""
        totals = [0.0] * len(self.devices)
        seen = [(replica, watch) for replica, name, watch in self._watches if name == stage]
        # The step ran as one device's, in one of the replicas.
        if not self._watches:
            active = next((index for index, rows in enumerate(self.rows) if rows), 0)
            seen = [(active, watch) for name, watch in self._alone if name == stage]
        for replica, watch in seen:
            synchronize(self.devices[replica])
            totals[replica] += watch.seconds()
        return totals
