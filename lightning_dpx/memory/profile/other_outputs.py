"""A step beside what other slices of its batch have returned: micro-batches before it, or replicas of other devices."""

from dataclasses import replace

from lightning_dpx.memory.profile.data import Profile


def beside_earlier_outputs(profile: Profile, number: int, parts: float | None = None) -> Profile:
    """The last of ``number`` micro-batches of a device, beside what those before it have returned.

    Args:
        profile: Of the largest.
        number: Of them on the device.
        parts: Times its rows that all outputs have which are merged on this device, once they are there; 0 where none
            are, and as many as micro-batches unless given.
    """
    if number == 1 or not profile.returned:
        return profile
    parts = number if parts is None else parts
    curve = [num_bytes + (number - 1) * profile.returned for num_bytes in profile.curve]
    # Those of other devices come in parts, and the whole is made beside all of them.
    merging = round(max(parts - number, 0) * profile.merged + parts * profile.merged)
    curve[-1] = max(curve[-1], number * profile.returned + merging)
    return replace(profile, curve=tuple(curve))


def beside_merged_outputs(profile: Profile, parts: float) -> Profile:
    """A step on a slice, whose backward has what all slices have returned beside it, merged.

    Args:
        profile: Of a step whose own output goes when it is merged.
        parts: Times the rows of the slice that are merged.
    """
    if not profile.merged:
        return profile
    merged = round(parts * profile.merged)
    first = profile.forward_events
    curve = list(profile.curve)
    for event in range(first, len(curve)):
        curve[event] += merged
    # The profile has this event for it: what other slices have returned has come to this device, in parts.
    curve[first] += max(merged - profile.merged, 0)
    return replace(profile, curve=tuple(curve))
