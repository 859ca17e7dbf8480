"""Which modules a profiled step calls, and how often: what tells apart the steps of one module."""

from collections.abc import Mapping, Sequence

from lightning_dpx.memory.call_names import call_of
from lightning_dpx.memory.profile.data import Profile


def calls_in(profile: Profile) -> dict[str, int]:
    """How often each module is called in a step, by path: as it was counted, and as its values tell."""
    calls = dict(profile.called)
    for value in profile.values:
        if value.name:
            path, number = call_of(value.name)
            calls[path] = max(calls.get(path, 0), number)
    return calls


def varying_paths(profiles: Sequence[Profile]) -> list[str]:
    """The modules that are called more often in some of these steps than in others."""
    counts = [calls_in(profile) for profile in profiles]
    saving: set[str] = set()  # paths of modules that save anything
    for profile in profiles:
        saving |= {call_of(value.name)[0] for value in profile.values if value.name}
    varying = []
    # The module itself, with an empty path, is called once in every step.
    for path in sorted(saving):
        if path and len({calls.get(path, 0) for calls in counts}) > 1:
            varying.append(path)
    return varying


def has_calls(profile: Profile, calls: Mapping[str, int]) -> bool:
    """Whether a step makes at least these calls: so many of each path."""
    mine = calls_in(profile)
    return all(mine.get(path, 0) >= number for path, number in calls.items())
