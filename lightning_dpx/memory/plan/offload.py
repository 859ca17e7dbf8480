"""Which values a plan would offload if it drops them: those that cannot be computed again, or also others.

Planners choose what to drop, each value at one price; how a dropped value comes back is decided before, in the profile.
Copies beside the computation cost next to nothing until they take longer than it, so no price per value is right:
instead, as many values as hide behind the computation are offered for that little, those first that take longest to
compute for the time of their copy. The forecast then counts what the copies of a choice cost together.

    offloaded                                 on their way at once    for
    what hides, the costliest values first    PREFETCH_DEPTH          the fastest plan
    what cannot be computed again             0                       budgets without room for the prefetch
    the costlier half                         0                       smaller ones
    everything                                0                       the smallest

Related: vDNN (Rhu et al., 2016), which offloads the inputs of layers, one layer ahead; Capuchin (Peng et al., 2020) and
POET (Patil et al., 2022), which choose between offloading and computing again.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from lightning_dpx.memory.plan.code_shares import with_shares
from lightning_dpx.memory.plan.forecast import HIDDEN_SHARE
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.plan.problem import Problem
from lightning_dpx.memory.plan.replayed_steps import replayed
from lightning_dpx.memory.profile.data import PREFETCH_DEPTH, Profile

_HIDES = 0.5  # of the computation is taken for copies: they come in bursts, and other devices use the same host


def ways_to_offload(profile: Profile) -> Iterator[Profile]:
    """The same step with the values marked that would be offloaded; on the host there is one way: none."""
    costs = _copying(profile)
    if costs and profile.hides_copies:
        # What goes out hides behind forward, and the same comes back behind backward: the shorter
        # one decides.
        beside = min(profile.forward_seconds, profile.step_seconds - profile.forward_seconds)
        chosen = _costliest(profile, costs, _HIDES * beside, least=profile.overhead.per_offload)
        hidden = _offloaded(profile, chosen, share=HIDDEN_SHARE)
        yield replace(hidden, prefetch_depth=PREFETCH_DEPTH)
    yield profile
    if costs:
        yield _offloaded(profile, _costliest(profile, costs, sum(costs.values()) / 2))
        yield _offloaded(profile, _costliest(profile, costs, float("inf")))


def as_planned(profile: Profile, plan: MemoryPlan) -> Profile:
    """The step with the shares of compiled parts, the replayed calls and the offloaded values of ``plan``."""
    profile = replayed(with_shares(profile, plan.shares), plan.replayed)
    names = plan.names("offload")
    if not names:
        return profile
    values = profile.values
    chosen = set()
    for index, value in enumerate(values):
        # What this device has no storage for may be offloaded by another one, with the same plan.
        if value.name in names and (value.copying or value.storage < 0):
            chosen.add(index)
    return replace(_offloaded(profile, chosen), prefetch_depth=plan.prefetch_depth)


def _offloaded(profile: Profile, chosen: Collection[int], share: float = 1.0) -> Profile:
    values = list(profile.values)
    for index in chosen:
        # Away and back, and no inputs: what comes back from the host is computed from nothing.
        seconds = share * 2 * values[index].copying + profile.overhead.per_offload
        values[index] = replace(values[index], offloaded=True, picked=False, inputs=(), seconds=seconds)
    return replace(profile, values=tuple(values))


def _copying(profile: Profile) -> dict[int, float]:
    """Seconds of a copy of each storage that can be offloaded, in the order of forward."""
    copying: dict[int, list[float]] = {}
    for value in profile.values:
        if value.storage >= 0:
            copying.setdefault(value.storage, []).append(value.copying)
    costs: dict[int, float] = {}
    for storage, seconds in copying.items():
        span = profile.storages[storage]
        # One value that cannot be copied keeps the memory of all.
        if all(seconds) and span.unused < span.freed:
            costs[storage] = sum(seconds)
    return costs


def _costliest(profile: Profile, costs: dict[int, float], seconds: float, *, least: float = 0.0) -> set[int]:
    """Values whose copies together take no longer than that, those first that take longest to compute for their copy.

    What cannot be computed again goes before all others, and takes nothing of the room that they have on the host.

    Args:
        profile: Of the step.
        costs: Seconds of a copy of each storage.
        seconds: Of all copies.
        least: What takes less than that to be computed again is not worth it.
    """
    again = dict.fromkeys(costs, 0.0)
    forced = {value.storage for value in profile.values if value.offloaded}
    for value in profile.values:
        if value.storage in again:
            again[value.storage] += float("inf") if value.offloaded else value.seconds
    room = profile.offloading_room
    chosen = set[int]()
    # A knapsack by the greedy rule: the most seconds of recomputation spared for each second of
    # copies.
    for storage in sorted(costs, key=lambda storage: again[storage] / costs[storage], reverse=True):
        size = 0 if storage in forced else profile.storages[storage].num_bytes
        if size and profile.pins_offloaded:
            # torch takes pinned memory in blocks of powers of two, and keeps them for later.
            size = 1 << (size - 1).bit_length()
        if costs[storage] <= seconds and size <= room and again[storage] >= least:
            seconds -= costs[storage]
            room -= size
            chosen.add(storage)
    return {index for index, value in enumerate(profile.values) if value.storage in chosen}


def least_seconds_with_offloading(problem: Problem, budget: int) -> float:
    """What any choice within ``budget`` costs at least.

    At the moment of the unplanned peak some units must be missing; the cheapest, in parts if need be, and each without
    what it is computed from, would do. Real choices also pay for the way there, and for peaks at other moments. What
    leaves for the host while forward runs costs nothing, and the rest of what is offloaded one copy.
    """
    profile = problem.profile
    # Any event gives a bound; at that of the peak most is missing.
    moment = max(range(len(profile.curve)), key=profile.curve.__getitem__, default=0)
    lacking = float(profile.peak - budget)
    seconds = 0.0
    rates = []
    copies = [float("inf")]
    for unit in problem.units:
        storage = profile.storages[profile.values[unit.values[0]].storage]
        if unit.droppable and unit.num_bytes > 0 and storage.unused < moment < storage.freed:
            values = [profile.values[index] for index in unit.values]
            seconds_back = sum(value.seconds for value in values)
            copying = [value.copying for value in values]
            if all(copying):
                # Away and back, where nothing hides the way there.
                ways = 1 if profile.hides_copies else 2
                seconds_back = min(seconds_back, ways * sum(copying))
                copies.append(sum(copying) / unit.num_bytes)
            rates.append((seconds_back / unit.num_bytes, unit.num_bytes))
    # As many bytes as the fastest copies could take out while forward runs go for nothing.
    if profile.hides_copies:
        lacking -= profile.forward_seconds / min(copies)
    for rate, size in sorted(rates):
        if lacking <= 0:
            break
        seconds += rate * min(size, lacking)
        lacking -= size
    return seconds
