"""Where in a step values are dropped, and what the bookkeeping of these places takes.

Between the operators of a model our code and what it works on leave the processor's caches. The first dropped value
after a few that are kept pays for getting them back, and the next ones do not: on models with steps of 10 ms the first
took about three times as long. So what a value takes depends on its neighbors, and a plan that drops few values all
over a step takes longer for each than one that drops most of them.
"""

from collections.abc import Collection

from lightning_dpx.memory.profile.data import Profile

_APART = 2  # values that are kept: with so many in between, hooks go off and on again; see routine.py


def count_places(profile: Profile, dropped: Collection[int]) -> int:
    """The places at which something is dropped.

    Args:
        profile: Of the step.
        dropped: Indices of values.
    """
    names = {profile.values[index].name for index in dropped}
    # Hooks are called for every tensor that autograd saves, also where a value is saved once more;
    # a profile in which that was not noted has each value once.
    held = profile.holds or profile.values
    in_order = [entry.name for entry in held if entry.name]
    num_places = 0
    kept = _APART  # whatever is dropped first begins a place
    for name in in_order:
        if name not in names:
            kept += 1
            continue
        if kept >= _APART:
            num_places += 1
        kept = 0
    return num_places


def made_again(profile: Profile, dropped: Collection[int]) -> set[int]:
    """The values recomputed for these: themselves, and unsaved values they are made from."""
    made = set(dropped)
    stack = list(dropped)
    while stack:
        for source in profile.values[stack.pop()].inputs:
            value = profile.values[source]
            if source not in made and value.storage < 0 and not value.name and value.inputs:
                made.add(source)
                stack.append(source)
    return made


def seconds_of_places(profile: Profile, dropped: Collection[int]) -> float:
    """Seconds to add to the values' own, for the number of sites; negative if there are fewer than usual.

    Args:
        profile: Of the step.
        dropped: Indices of values.
    """
    overhead = profile.overhead
    if not overhead.per_place:
        return 0.0
    # What is offloaded comes back by a copy, and has no bookkeeping in its seconds either.
    here = [index for index in dropped if not profile.values[index].offloaded]
    # Nor has what is made again in no time, or by a call: without a share to take off for each of these
    # the sum with the values' own seconds is never below zero.
    usual = 0.0
    for index in made_again(profile, here):
        value = profile.values[index]
        if value.seconds and not value.call:
            usual += overhead.usual_places
    return overhead.per_place * (count_places(profile, here) - usual)
