"""What a choice of values to drop would do to a profiled step: its peak, and the time to compute them again.

The forecast plays the step through: forward without what is dropped, then every request of backward, with the same
rules of sharing and forgetting as :mod:`lightning_dpx.memory.execute.values`, and the same prefetching of what
is offloaded.

The time of offloaded values. Copies run beside the computation, in a queue for each direction, so of all copies out
only what is longer than forward counts, and of those back what is longer than backward with its recomputations; but
nothing hides the last copy out and the first one back, for each of which the longest counts. A copy that hides is not
free: it takes some of the memory's bandwidth and of the host's time, for which :data:`HIDDEN_SHARE` of it counts. That
a queue may run dry at one time and be too long at another is left out, and so is that other devices may copy from and
to the same host at that time. Where no copy may be on its way beside the computation, all of them count.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from lightning_dpx.memory.plan.recomputed_values import Outline, values_of_choice
from lightning_dpx.memory.plan.step_simulation import BeyondLimitsError, Limits, StepSimulation
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.drop_sites import seconds_of_places

_OUT_OF_QUESTION = 2**62  # bytes
HIDDEN_SHARE = 0.02  # of the time of a copy beside the computation: an assumption, a link over a memory's bandwidth


@dataclass(frozen=True, slots=True)
class Forecast:
    """The cost of a choice.

    Attributes:
        peak: Bytes of activations at the most.
        kept: Bytes that are kept from forward to backward.
        seconds: Extra time of a step.
    """

    peak: int
    kept: int
    seconds: float

    def rank(self, budget: int | None) -> tuple[bool, float, float]:
        """Lower is better: the fastest within the budget, then the smallest."""
        if budget is None or self.peak > budget:
            # What is not within the budget comes after all that is, the nearest first.
            return True, self.peak, self.seconds
        return False, self.seconds, self.peak


def forecast(
    profile: Profile, dropped: Collection[int], uncached: Collection[int] = (), *, most_times: int | None = None
) -> Forecast:
    """The step of ``profile`` if the values with these indices are dropped, some of them after every use.

    Args:
        profile: The step.
        dropped: Indices of values.
        uncached: Those of them that are forgotten after every use.
        most_times: How often values may be computed, on average. A choice that takes more is out of the question, and
            not played to its end: its time is infinite, and so is its peak, as far as a number can be.
    """
    return Forecaster(profile, most_times).forecast(dropped, uncached)


def with_overheads(profile: Profile, result: Forecast, dropped: Collection[int]) -> Forecast:
    """``result`` with the time that no planner decides about: of the calls that are replayed as a whole, of the
    places at which values are ``dropped``, and of following a step."""
    more = profile.replaying + seconds_of_places(profile, dropped)
    if dropped:
        more += profile.overhead.per_step
    if more:
        return replace(result, seconds=result.seconds + more)
    return result


def timeline(profile: Profile, dropped: Collection[int], uncached: Collection[int] = ()) -> list[int]:
    """Bytes of activations at every event of such a step: the most that is there between it and the next."""
    curve: list[int] = Forecaster(profile).timeline(dropped, uncached)[1].tolist()
    return curve


class Forecaster:
    """Forecasts of one profile, which is looked through once.

    Args:
        profile: Of a step.
        most_times: See :func:`forecast`.

    Attributes:
        work: Events, values and computations that were gone through so far. It counts in the place of time, because a
            plan must not depend on how busy the machine is.
    """

    def __init__(self, profile: Profile, most_times: int | None = None) -> None:
        self._profile = profile
        self._outline = Outline(profile)
        self._most_computed = float("inf") if most_times is None else most_times * len(profile.values)
        self.work: int = 0

    def forecast(
        self,
        dropped: Collection[int],
        uncached: Collection[int] = (),
        *,
        most_bytes: float = float("inf"),
        most_seconds: float = float("inf"),
    ) -> Forecast:
        """The step if the values with these indices are dropped, some of them after every use.

        Args:
            dropped: Indices of values.
            uncached: Those of them that are forgotten after every use.
            most_bytes: A choice that takes more is out of the question; to find that out takes less work.
            most_seconds: One that takes longer is out of the question, too.
        """
        simulation = self._simulation(dropped, uncached, Limits(self._most_computed, most_bytes, most_seconds))
        try:
            return self._run(simulation)
        except BeyondLimitsError:
            # A peak that no budget allows, so that no planner need ask whether the step was played
            # to its end.
            return Forecast(_OUT_OF_QUESTION, 0, float("inf"))

    def timeline(self, dropped: Collection[int], uncached: Collection[int] = ()) -> tuple[Forecast, np.ndarray]:
        """The forecast, and bytes of activations at every event of such a step (E)."""
        simulation = self._simulation(dropped, uncached, Limits(self._most_computed))
        try:
            return self._run(simulation), simulation.curve.most()
        except BeyondLimitsError:
            return Forecast(_OUT_OF_QUESTION, 0, float("inf")), np.full_like(self._outline.curve, _OUT_OF_QUESTION)

    def _simulation(self, dropped: Collection[int], uncached: Collection[int], limits: Limits) -> StepSimulation:
        return StepSimulation(self._outline, values_of_choice(self._outline, dropped, uncached), limits)

    def _run(self, simulation: StepSimulation) -> Forecast:
        try:
            peak, kept = simulation.run()
        finally:
            # Also of a step that was given up: that has taken its time as well.
            self.work += len(self._profile.curve) + len(self._profile.values) + simulation.work.computations
        return Forecast(peak, kept.num_bytes, simulation.work.seconds + _exposed(self._profile, simulation))


def _exposed(profile: Profile, simulation: StepSimulation) -> float:
    """Seconds of the copies that no computation hides."""
    out = [profile.values[index].copying for index in simulation.offloaded.order]
    back = simulation.work.fetches
    # Streams, events and pinned memory: nothing hides that where the device waits for the host.
    by_host = profile.overhead.per_offload * len(out)
    # The device waits for every copy, so nothing hides any of them.
    if not profile.prefetch_depth:
        return sum(out) + sum(back) + by_host
    forward = profile.forward_seconds
    # Copies back hide behind recomputation as well.
    backward = profile.step_seconds - forward + simulation.work.seconds
    exposed_out = max(sum(out) - forward, max(out, default=0.0))
    exposed_back = max(sum(back) - backward, max(back, default=0.0))
    return exposed_out + exposed_back + HIDDEN_SHARE * (sum(out) + sum(back)) + by_host
