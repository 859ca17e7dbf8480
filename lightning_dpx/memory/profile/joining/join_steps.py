"""A step that no profile shows, put together from profiles of steps that show parts of it each."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lightning_dpx.memory.call_names import call_of
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.joining.call_counts import calls_in
from lightning_dpx.memory.profile.joining.event_map import EventMap
from lightning_dpx.memory.profile.joining.joined_calls import JoinedCalls
from lightning_dpx.memory.profile.joining.joined_curve import curve_without_pieces, joined_curve, kept_by_pieces
from lightning_dpx.memory.profile.joining.joined_requests import joined_requests, joined_saves
from lightning_dpx.memory.profile.joining.joined_values import JoinedStorages, JoinedValues, new_storages
from lightning_dpx.memory.profile.joining.splice import Splice
from lightning_dpx.memory.profile.scaling import scaled

_NOT_CALLED = "its call is not made"


def join_steps(profiles: Sequence[Profile], calls: Mapping[str, int]) -> Profile:
    """The step that makes ``calls``, and besides what all of the profiled steps do.

    Args:
        profiles: Of steps, which make all of these calls among them.
        calls: How often it calls each of the modules that not all steps call as often.
    """
    # What is not called by chance is taken from the profile that is most alike.
    most_alike = max(range(len(profiles)), key=lambda index: _likeness(profiles[index], calls))
    joined = _without_values(profiles[most_alike], _not_made(profiles[most_alike], calls))
    for index, profile in enumerate(profiles):
        if index != most_alike:
            donor = _with_rows_of(joined, profile)
            joined = _insert(joined, donor, _made_by_chance(donor, calls))
    return replace(joined, called=tuple(sorted((calls_in(joined) | dict(calls)).items())))


# ---- which values ----


def _not_made(profile: Profile, calls: Mapping[str, int]) -> set[int]:
    """Indices of the values of calls that ``calls`` does not make; a module that it does not name is always called."""
    missing = set()
    for index, value in enumerate(profile.values):
        path, number = call_of(value.name)
        if value.name and number > calls.get(path, number):
            missing.add(index)
    return missing


def _made_by_chance(profile: Profile, calls: Mapping[str, int]) -> set[int]:
    """Indices of the values of calls that are among ``calls``."""
    made = set()
    for index, value in enumerate(profile.values):
        path, number = call_of(value.name)
        if value.name and number <= calls.get(path, 0):
            made.add(index)
    return made


def _likeness(profile: Profile, calls: Mapping[str, int]) -> int:
    """Bytes of the values that a step with these calls has as well, less those of the others."""
    missing = _not_made(profile, calls)
    bytes_alike = 0
    for index, value in enumerate(profile.values):
        if value.name:
            bytes_alike += -value.num_bytes if index in missing else value.num_bytes
    return bytes_alike


def _with_rows_of(other: Profile, profile: Profile) -> Profile:
    """The profile, of as many rows as ``other``, if that has more: judged by the values that both have."""
    sizes = {value.name: value.num_bytes for value in other.values if value.name}
    mine = 0
    theirs = 0
    for value in profile.values:
        if value.name in sizes:
            mine += value.num_bytes
            theirs += sizes[value.name]
    # To make it smaller could leave out what its calls take; rather too much is counted.
    if 0 < mine < theirs:
        return scaled(profile, theirs / mine)
    return profile


# ---- cut out, and put in ----


def _without_values(profile: Profile, missing: Collection[int]) -> Profile:
    """The step without these values, whose calls are not made."""
    if not missing:
        return profile
    values = list(profile.values)
    for index in missing:
        # Others may be computed from it, so it keeps its number.
        values[index] = replace(values[index], name="", refused=_NOT_CALLED, compact=0)
    # A storage stays as long as one of its values is saved by a call that is made.
    present = {value.storage for index, value in enumerate(profile.values) if index not in missing}
    storages = list(profile.storages)
    for index in missing:
        number = profile.values[index].storage
        if number >= 0 and number not in present:
            storages[number] = replace(storages[number], num_bytes=0)
    # Seen from the step without them, these values are the pieces that it lacks.
    rest = replace(profile, values=tuple(values))
    splice = Splice.of(rest, profile, missing)
    curve = curve_without_pieces(splice, kept_by_pieces(splice, new_storages(splice)))
    return replace(
        rest,
        storages=tuple(storages),
        curve=tuple(map(int, curve)),
        requests=tuple(request for request in profile.requests if request.value not in missing),
        saves=tuple((event, value) for event, value in profile.saves if value not in missing),
    )


def _insert(base: Profile, donor: Profile, wanted: Collection[int]) -> Profile:
    """The base, and in it those of the ``wanted`` values of the donor that it lacks, with their calls."""
    # Each joins one more profile, so the base may have got some of these calls from an earlier donor.
    splice = Splice.of(base, donor, wanted)
    if not splice.pieces:
        return base
    events = EventMap(splice)
    storages = JoinedStorages(splice, events)
    values = JoinedValues(splice, events, storages)
    calls = JoinedCalls(splice, events, storages)
    curve = joined_curve(splice, events, kept_by_pieces(splice, new_storages(splice)))
    forward_added = sum(piece.forward[1] - piece.forward[0] for piece in splice.pieces)
    # By the share of its events: what single calls take is timed in trials only.
    share_added = events.num_added / max(1, len(donor.curve))
    return replace(
        base,
        values=tuple(values.values),
        storages=tuple(storages.storages),
        curve=tuple(map(int, curve)),
        requests=tuple(joined_requests(splice, events, values, calls.holds_of_donor)),
        saves=tuple(joined_saves(splice, events, values)),
        calls=tuple(calls.calls),
        holds=tuple(calls.holds),
        forward_events=base.forward_events + forward_added,
        step_seconds=base.step_seconds + share_added * donor.step_seconds,
        forward_seconds=base.forward_seconds + share_added * donor.forward_seconds,
        operators=tuple((events.of_base(event), name) for event, name in base.operators),
        adding=tuple((events.of_base(event), size) for event, size in base.adding),
        codes=tuple(code.moved(events.of_base) for code in base.codes),
    )
