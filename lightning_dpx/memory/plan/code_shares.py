"""How much compiled parts may save: a share for each of them, with which the step fits.

What a part saves with some share, and takes in forward, in backward and in time, was tried (see
:mod:`lightning_dpx.memory.profile.compiled_code`). At the moment of the peak the part gives way that makes most room
there for a second more; what turns out to have been too much is taken back. What is left is a step like any other, in
which planners decide about the rest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from lightning_dpx.memory.profile.code_runs import curve_of_runs, run_of
from lightning_dpx.memory.profile.data import CodeRun, Profile

_LEAST_SECONDS = 1e-9
_JITTER = 0.01  # of the time of a call: less than that a clock cannot tell, and more work is taken to take more


def with_shares(profile: Profile, shares: Mapping[str, float]) -> Profile:
    """The step of ``profile`` with these shares, by the paths of parts.

    No call of it is replayed: one of a part that saves less would be another call.
    """
    calls = profile.codes
    if not any(call.path in shares for call in calls):
        return profile
    runs = [run_of(call, shares) for call in calls]
    curve = _curve(profile, runs)
    more = sum(max(0.0, run.seconds - call.runs[0].seconds) for call, run in zip(calls, runs, strict=True))
    return replace(
        profile,
        curve=tuple(curve.tolist()),
        replaying=profile.replaying + more,
        calls=(),
        holds=(),
        codes=(),
    )


def bytes_and_seconds(profile: Profile, path: str, share: float) -> tuple[int, float]:
    """What the part saves less with this share, and the seconds that it takes more."""
    num_bytes = 0
    seconds = 0.0
    for call in profile.codes:
        if call.path == path:
            run = run_of(call, {path: share})
            num_bytes += call.runs[0].stays - run.stays
            seconds += run.seconds - call.runs[0].seconds
    return max(0, num_bytes), max(0.0, seconds)


def shares_for(profile: Profile, budget: int | None) -> dict[str, float]:
    """Shares with which the step fits, or comes as near as it can; without a budget, as small as it can be."""
    search = _Search(profile)
    search.give_way(budget or 0)
    search.take_back(max(budget or 0, search.peak))
    return search.shares


def _curve(profile: Profile, runs: list[CodeRun]) -> np.ndarray:
    stayed = [call.runs[0].stays for call in profile.codes]
    return curve_of_runs(np.array(profile.curve, dtype=np.int64), profile.codes, runs, stayed)


class _Search:
    """Parts of a step and what each of them may save; at first, all that it would."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._calls: dict[str, list[int]] = {}
        for number, call in enumerate(profile.codes):
            self._calls.setdefault(call.path, []).append(number)
        self._chosen = [0] * len(profile.codes)  # of each call the number of its run
        self._curve = np.array(profile.curve, dtype=np.int64)

    @property
    def peak(self) -> int:
        """Bytes at the most."""
        return int(self._curve.max(initial=0))

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the parts that save less than they would."""
        found: dict[str, float] = {}
        for path, numbers in self._calls.items():
            share = min(self._profile.codes[at].runs[self._chosen[at]].share for at in numbers)
            if share < 1:
                found[path] = share
        return found

    def give_way(self, budget: int) -> None:
        """One part after the other saves less, until the step fits or none makes room at its peak."""
        while self.peak > budget:
            moment = int(self._curve.argmax())
            excess = self.peak - budget
            rates = []
            for path, level in self._steps():
                # More than the excess is of no use: else a large part would go first where a small one does.
                gain = min(excess, self._gain(path, level, moment))
                if gain > 0:
                    rates.append((-gain / self._price(path, level), path, level))
            if not any(self._takes_no_more(path, level) for _, path, level in sorted(rates)):
                return

    def _takes_no_more(self, path: str, level: int) -> bool:
        """Tries that, and leaves it so unless the peak has become a higher one at another moment."""
        before, peak = self._chosen[self._calls[path][0]], self.peak
        self._take(path, level)
        if self.peak <= peak:
            return True
        self._take(path, before)
        return False

    def take_back(self, budget: int) -> None:
        """Has parts save more again, those first that this makes fastest, as long as the step fits."""
        numbers = sorted(self._calls, key=lambda path: -self._spent(path))
        for path in numbers:
            now = self._chosen[self._calls[path][0]]
            for level in range(now):
                self._take(path, level)
                if self.peak <= budget:
                    break
                self._take(path, now)

    def _steps(self) -> Iterator[tuple[str, int]]:
        """Every part with every smaller share."""
        for path, numbers in self._calls.items():
            first = numbers[0]
            for level in range(self._chosen[first] + 1, len(self._profile.codes[first].runs)):
                yield path, level

    def _take(self, path: str, level: int) -> None:
        for at in self._calls[path]:
            # Calls of one part may have been tried with fewer shares than its first one.
            self._chosen[at] = min(level, len(self._profile.codes[at].runs) - 1)
        runs = [call.runs[level] for call, level in zip(self._profile.codes, self._chosen, strict=True)]
        self._curve = _curve(self._profile, runs)

    def _gain(self, path: str, level: int, moment: int) -> int:
        """Bytes that it makes free at that event."""
        gain = 0
        for at in self._calls[path]:
            call = self._profile.codes[at]
            now, then = call.runs[self._chosen[at]], call.runs[min(level, len(call.runs) - 1)]
            # Within its forward, between that and its backward, or within its backward.
            if call.begin < moment < call.end:
                gain += now.forward - then.forward
            elif call.end <= moment <= call.asked:
                gain += now.stays - then.stays
            elif call.asked < moment < call.over:
                gain += now.stays + now.backward - then.stays - then.backward
        return gain

    def _price(self, path: str, level: int) -> float:
        """Seconds that it takes more."""
        seconds = 0.0
        for at in self._calls[path]:
            runs = self._profile.codes[at].runs
            now, then = runs[self._chosen[at]], runs[min(level, len(runs) - 1)]
            # A clock that jitters may show no more time for more work, which is then priced by the share.
            seconds += max(then.seconds - now.seconds, (now.share - then.share) * _JITTER * now.seconds)
        return max(seconds, _LEAST_SECONDS)

    def _spent(self, path: str) -> float:
        seconds = 0.0
        for at in self._calls[path]:
            runs = self._profile.codes[at].runs
            seconds += runs[self._chosen[at]].seconds - runs[0].seconds
        return seconds
