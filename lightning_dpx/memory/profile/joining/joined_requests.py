"""What autograd saves and backward asks for, in a step that is put together from two others."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter

from lightning_dpx.memory.profile.data import Request
from lightning_dpx.memory.profile.joining.event_map import EventMap
from lightning_dpx.memory.profile.joining.joined_values import JoinedValues
from lightning_dpx.memory.profile.joining.splice import Splice


def joined_requests(
    splice: Splice, events: EventMap, values: JoinedValues, holds_of_donor: Mapping[int, int]
) -> list[Request]:
    """The requests of both steps, in order.

    Args:
        splice: What the step is made of.
        events: Where the events of both are in it.
        values: Its values.
        holds_of_donor: The number there of what autograd holds in the pieces, by the donor's number.
    """
    requests = []
    for one in splice.base.requests:
        # A profile in which nothing can be replayed has no holds, though its requests tell of some.
        hold = one.hold if one.hold < len(splice.base.holds) else -1
        requests.append(replace(one.moved(events.of_base), value=values.of_base[one.value], hold=hold))
    # Of the donor only what the pieces ask for: the rest of its backward is that of the base.
    for one in splice.donor.requests:
        if one.value in splice.piece_of:
            there = one.moved(partial(events.of_piece, splice.piece_of[one.value]))
            hold = holds_of_donor.get(one.hold, -1)
            requests.append(replace(there, value=values.of_donor[one.value], hold=hold))
    requests.sort(key=attrgetter("event"))
    return requests


def joined_saves(splice: Splice, events: EventMap, values: JoinedValues) -> list[tuple[int, int]]:
    """Event and value of all that autograd saves in both steps, in order."""
    # Without those of one of them it is not known how often each value is asked for.
    if not (splice.base.saves and splice.donor.saves):
        return []
    saves = [(events.of_base(event), values.of_base[value]) for event, value in splice.base.saves]
    for event, value in splice.donor.saves:
        if value in splice.piece_of:
            saves.append((events.of_piece(splice.piece_of[value], event), values.of_donor[value]))
    return sorted(saves)
