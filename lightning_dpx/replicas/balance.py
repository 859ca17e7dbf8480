"""``workload="auto"``: shares of the batch in proportion to the measured speed of the devices.

Every decision rests on the medians of a window of full steps. The new shares are the geometric mean of the old ones and
of those that the measured rates (rows per second) ask for: with a fixed cost per step the rates depend on the shares,
and undamped steps would oscillate. Shares change only where the slowest device is predicted to gain at least 3%.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from lightning_dpx.devices import Stopwatch

WARM_UP = 3  # steps that allocate, compile and autotune
WINDOW = 5
LEAST_GAIN = 0.03
SMALLEST_SHARE = 1 / 16  # of an even one, so that a device that only stumbled can come back
LONGEST_PAUSE = 512


class WorkloadBalancer:
    """Watches training steps and moves rows from slow devices to fast ones.

    Args:
        devices: K devices; replicas on one device get equal shares.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self.shares: tuple[float, ...] = (1 / len(devices),) * len(devices)
        self._open: dict[int, list[Stopwatch]] = {}
        self._rows: tuple[int, ...] = ()
        self._ended: list[tuple[tuple[int, ...], dict[int, list[Stopwatch]]]] = []
        self._window: list[tuple[tuple[int, ...], list[float]]] = []
        self._num_others = 0  # steps of other sizes since the last one that counted
        self._pause = WARM_UP
        self._next_pause = WINDOW

    def begin(self, rows: Sequence[int]) -> None:
        """A training step with these rows per replica begins; the one before has ended."""
        if self._open:
            self._ended.append((self._rows, self._open))
        self._open = {}
        self._rows = tuple(rows)
        # Only of steps whose work is over: to wait for a device here would keep the next step from being queued.
        while self._ended and _are_done(self._ended[0][1]):
            rows_then, watches = self._ended.pop(0)
            if len(watches) == len(self._devices):
                seconds = []
                for index in range(len(self._devices)):
                    seconds.append(sum(watch.seconds() for watch in watches[index]))
                self.observe(rows_then, seconds)
        self._pause -= 1

    def watch(self, replica: int) -> Stopwatch | None:
        """A stopwatch for a stage of the step that ``replica`` is about to run; ``None`` in a pause."""
        if self._pause > 0:
            return None
        watch = Stopwatch(self._devices[replica])
        self._open.setdefault(replica, []).append(watch)
        return watch

    def observe(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Takes the measured seconds of a step in; full steps only, where every replica had rows."""
        if min(rows) == 0 or min(seconds) <= 0:
            return
        # A batch of another size would be compared with another amount of work.
        if self._window and sum(rows) != sum(self._window[-1][0]):
            self._num_others += 1
            # The short one may be that which the window began with, or those before have come to an end.
            if sum(rows) < sum(self._window[-1][0]) and self._num_others < WINDOW:
                return
            self._window = []
        self._num_others = 0
        self._window.append((tuple(rows), list(seconds)))
        if len(self._window) == WINDOW:
            self._decide()

    def _decide(self) -> None:
        rows = self._window[-1][0]
        # The median: a single slow step (the loader, another process) says nothing of a device.
        times = []
        for index in range(len(rows)):
            times.append(statistics.median(seconds[index] for _, seconds in self._window))
        self._window = []
        # Replicas of one device share it: only their mean says how fast it is.
        rates = self._per_device([count / time for count, time in zip(rows, times, strict=True)])
        total = sum(rates)
        wanted = [(share * rate / total) ** 0.5 for share, rate in zip(self.shares, rates, strict=True)]
        # Never nothing: a device without rows is measured no more, and could not come back.
        least = max(SMALLEST_SHARE / len(rows), min(2 / sum(rows), 1 / len(rows)))
        proposal = _at_least(wanted, least)
        now = max(times)
        # The slowest device decides about a step.
        then = max(sum(rows) * share / rate for share, rate in zip(proposal, rates, strict=True))
        if then < now * (1 - LEAST_GAIN):
            self.shares = proposal
            self._next_pause = WINDOW
            self._pause = 1
        else:
            # Nothing to gain, so the next look comes later, and later each time: stopwatches cost
            # time.
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)

    def _per_device(self, rates: Sequence[float]) -> list[float]:
        by_device: dict[torch.device, list[float]] = {}
        for device, rate in zip(self._devices, rates, strict=True):
            by_device.setdefault(device, []).append(rate)
        return [statistics.mean(by_device[device]) for device in self._devices]


def _are_done(watches: Mapping[int, Sequence[Stopwatch]]) -> bool:
    """Whether all devices have passed what was watched."""
    return all(watch.done for watch in chain.from_iterable(watches.values()))


def _at_least(weights: Sequence[float], least: float) -> tuple[float, ...]:
    """Shares in proportion to ``weights``, none below ``least``, with sum 1."""
    low: set[int] = set()
    while True:
        # What is raised to the least takes from the others, which may then fall below it in their turn.
        rest = sum(weight for index, weight in enumerate(weights) if index not in low)
        left = 1 - least * len(low)
        shares = []
        for index, weight in enumerate(weights):
            shares.append(least if index in low else weight / rest * left)
        below = {index for index, share in enumerate(shares) if share < least}
        if below <= low:
            return tuple(shares)
        low |= below
