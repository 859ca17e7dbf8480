"""Which values of one profiled step another one lacks, and where in it they belong."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lightning_dpx.memory.call_names import call_of, path_of, paths_round
from lightning_dpx.memory.profile.data import Profile, SavedValue

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Values that follow each other in the donor, of calls that the base lacks.

    All but the cuts is counted as in the donor; an event range is from its first event to the one after its last.

    Attributes:
        values: Their indices, in the order in which they are saved.
        next_value: The index of the value that comes after them; -1 without one.
        forward: The events of forward in which their calls begin and are over.
        backward: The same of backward.
        forward_cut: The event of the base before which the piece is put in, in forward.
        backward_cut: The same in backward.
        value_cut: The index of the value of the base before which its values stand.
    """

    values: tuple[int, ...]
    next_value: int
    forward: tuple[int, int]
    backward: tuple[int, int]
    forward_cut: int
    backward_cut: int
    value_cut: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Splice:
    """Two profiled steps, and what of the second is put into the first.

    Attributes:
        base: The step that lacks calls.
        donor: The step that has them.
        pieces: Of the donor, in the order of forward.
        base_values: Indices of the values of the base, by name.
        piece_of: The number of the piece that a value of the donor belongs to, by the value's index.
    """

    base: Profile
    donor: Profile
    pieces: tuple[Piece, ...]
    base_values: dict[str, int]
    piece_of: dict[int, int]

    @staticmethod
    def of(base: Profile, donor: Profile, wanted: Collection[int]) -> "Splice":
        """Finds the pieces.

        Args:
            base: The step that lacks calls.
            donor: The step that has them.
            wanted: Indices of the donor's values that are put in, where the base has none of the same name.
        """
        finder = _PieceFinder(base, donor)
        pieces = tuple(finder.find(wanted))
        piece_of: dict[int, int] = {}
        for number, piece in enumerate(pieces):
            piece_of.update(dict.fromkeys(piece.values, number))
        return Splice(base=base, donor=donor, pieces=pieces, base_values=finder.base_values, piece_of=piece_of)


class _PieceFinder:
    """Cuts the donor where the base lacks its calls.

    Attributes:
        base_values: Indices of the values of the base, by name.
    """

    def __init__(self, base: Profile, donor: Profile) -> None:
        self._base = base
        self._donor = donor
        self.base_values: dict[str, int] = {}
        self._base_modules: set[str] = set()  # paths of the modules that save anything, and of those round them
        for index, value in enumerate(base.values):
            if value.name:
                # Values of two profiles have other indices in each: only names say which of them are the same.
                self.base_values[value.name] = index
                self._base_modules.update(paths_round(call_of(value.name)[0]))

    def find(self, wanted: Collection[int]) -> list[Piece]:
        """The pieces, in the order of forward."""
        donor = self._donor.values
        order = [index for index, value in enumerate(donor) if value.name]
        # A profile lists values as they became known, and one may be saved long after that.
        order.sort(key=lambda index: (donor[index].saved, index))
        pieces = []
        members: list[int] = []  # of the piece that is being collected
        unit = ""  # the outermost module of the piece
        for at, index in enumerate(order):
            unit_here = ""
            if index in wanted and donor[index].name not in self.base_values:
                unit_here = self._outermost_unknown(donor[index])
            # Each unit is a piece of its own, as calls of the base may stand between two of them.
            if members and unit_here != unit:
                pieces.append(self._piece(members, order[: at - len(members)], order[at:]))
                members = []
            unit = unit_here
            if unit:
                members.append(index)
        if members:
            pieces.append(self._piece(members, order[: -len(members)], []))
        return pieces

    def _outermost_unknown(self, value: SavedValue) -> str:
        """The outermost module round ``value`` in which the base saves nothing."""
        call = value.name.rpartition(":")[0]
        parts = path_of(call).split(".")
        for depth in range(1, len(parts)):
            path = ".".join(parts[:depth])
            if path not in self._base_modules:
                return path
        return call

    def _piece(self, members: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Piece:
        """The piece of these values, which others come before and after in the donor."""
        base, donor = self._base, self._donor
        begin = donor.values[members[0]].saved
        end = donor.values[after[0]].saved if after else donor.forward_events
        value_cut = self._value_cut(members, before, after)
        # Behind all values of the base there is no event of its own: the piece is the end of forward.
        forward_cut = base.forward_events
        if value_cut < len(base.values):
            forward_cut = base.values[value_cut].saved
        earlier = {index for index in range(value_cut) if base.values[index].name}
        return Piece(
            values=tuple(members),
            next_value=after[0] if after else -1,
            forward=(begin, max(begin, end)),
            backward=_events_of_backward(donor, set(members), before=set(before), after=set(after)),
            forward_cut=forward_cut,
            backward_cut=_first_request(base, earlier, otherwise=len(base.curve)),
            value_cut=value_cut,
        )

    def _value_cut(self, members: Sequence[int], before: Sequence[int], after: Sequence[int]) -> int:
        """The index of the value of the base before which the members stand."""
        donor = self._donor.values
        last_before = self._first_of_base(reversed(before), otherwise=-1)
        first_after = self._first_of_base(after, otherwise=len(self._base.values))
        # Neither step shows which of the calls between the two comes first: layers of a list are called
        # in the order of their numbers.
        numbers = {_kind(donor[index]): _layer_numbers(donor[index]) for index in reversed(members)}
        for index in range(last_before + 1, first_after):
            value = self._base.values[index]
            theirs = _layer_numbers(value)
            if value.name and numbers.get(_kind(value), theirs) < theirs:
                return index
        return first_after

    def _first_of_base(self, indices: Iterable[int], *, otherwise: int) -> int:
        """Where the first of these values of the donor that the base has as well is in the base."""
        for index in indices:
            name = self._donor.values[index].name
            if name in self.base_values:
                return self.base_values[name]
        return otherwise


def _kind(value: SavedValue) -> str:
    """What values of equal modules in different places have in common: the name without the numbers of layers."""
    call, _, number = value.name.rpartition(":")
    return f"{_NUMBER.sub('', call)}:{number}"


def _layer_numbers(value: SavedValue) -> list[int]:
    """The numbers in the path of a call."""
    return [int(number) for number in _NUMBER.findall(value.name.rpartition(":")[0])]


def _first_request(profile: Profile, values: Collection[int], *, otherwise: int) -> int:
    """The first event of backward at which one of these values is asked for."""
    events = [one.event for one in profile.requests if one.value in values and one.event >= profile.forward_events]
    return min(events, default=otherwise)


def _events_of_backward(
    profile: Profile, values: Collection[int], *, before: Collection[int], after: Collection[int]
) -> tuple[int, int]:
    """The events of backward that belong to ``values``.

    They begin where the values ``after`` them in forward are released, and end where those ``before`` are asked for.
    """
    # Not from the first request on: a recurrent layer goes back through many small tensors before it
    # asks for its input.
    asked = _first_request(profile, values, otherwise=len(profile.curve))
    begin = min(profile.forward_events, asked)
    end = len(profile.curve)
    for one in profile.requests:
        if one.value in after and begin < one.released <= asked:
            begin = one.released
        if one.event > asked and one.value in before:
            end = min(end, one.event)
    return begin, end
