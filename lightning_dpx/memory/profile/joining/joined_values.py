"""The storages and values of a step that is put together from two others."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from lightning_dpx.memory.profile.data import SavedStorage, SavedValue
from lightning_dpx.memory.profile.joining.event_map import EventMap
from lightning_dpx.memory.profile.joining.splice import Splice


def new_storages(splice: Splice) -> dict[int, int]:
    """The donor's storages that the base lacks, with the number of the first piece that each is saved in."""
    known = set(_storages_of_both(splice))
    new: dict[int, int] = {}
    for number, piece in enumerate(splice.pieces):
        for index in piece.values:
            storage = splice.donor.values[index].storage
            if storage >= 0 and storage not in known:
                new.setdefault(storage, number)
    return new


class JoinedStorages:
    """The storages of both steps: first those of the base.

    Attributes:
        storages: Of the joined step.
        of_donor: The number there of each of the donor's storages that it has, by the donor's number.
    """

    def __init__(self, splice: Splice, events: EventMap) -> None:
        self.storages: list[SavedStorage] = []
        for one in splice.base.storages:
            self.storages.append(one.moved(events.of_base))
        self.of_donor: dict[int, int] = _storages_of_both(splice)
        for storage, number in new_storages(splice).items():
            self.of_donor[storage] = len(self.storages)
            one = splice.donor.storages[storage]
            kept = replace(one, freed=max(one.freed, splice.donor.forward_events))
            self.storages.append(kept.moved(partial(events.of_piece, number)))


class JoinedValues:
    """The values of both steps in the order of forward, with what they are made from.

    Attributes:
        values: Of the joined step.
        of_base: The index there of each value of the base, by the base's index.
        of_donor: The same of the values that are put in, by the donor's index.
    """

    def __init__(self, splice: Splice, events: EventMap, storages: JoinedStorages) -> None:
        self._splice = splice
        self._events = events
        self._storages = storages
        self.values: list[SavedValue] = []
        self.of_base: dict[int, int] = {}
        self.of_donor: dict[int, int] = {}
        self._lay_out()

    def _lay_out(self) -> None:
        pieces = self._splice.pieces
        # Two pieces at one cut stay in the order of forward: sorting is stable.
        waiting = sorted(range(len(pieces)), key=lambda number: pieces[number].value_cut)
        # After the last value of the base there may be pieces, too.
        for index, value in enumerate([*self._splice.base.values, None]):
            following = None if value is None else self._moved_base_value(value)
            while waiting and pieces[waiting[0]].value_cut <= index:
                following = self._put_in(waiting.pop(0), following)
            if following is not None:
                self.of_base[index] = len(self.values)
                self.values.append(following)

    def _moved_base_value(self, value: SavedValue) -> SavedValue:
        inputs = tuple(self.of_base[source] for source in value.inputs)
        return replace(value, inputs=inputs, saved=self._events.of_base(value.saved))

    def _put_in(self, number: int, following: SavedValue | None) -> SavedValue | None:
        """Adds the values of a piece; returns what follows it.

        Layers in a row take what the one before has made: the first value of the piece is made as ``following`` was,
        and ``following`` as what came after the piece in the donor.
        """
        donor = self._splice.donor
        piece = self._splice.pieces[number]
        own = self._with_unsaved_inputs(piece.values if piece.next_value < 0 else [*piece.values, piece.next_value])
        # In the donor's order each value comes after what it is made from.
        for index in sorted(own):
            value = donor.values[index]
            inputs = tuple(self._inputs_of(index))
            if index == piece.next_value:
                is_made_from_piece = any(source in own for source in value.inputs)
                if following is not None and is_made_from_piece and following.num_bytes == value.num_bytes:
                    following = _made_like(following, replace(value, inputs=inputs))
                continue
            storage = self._storages.of_donor.get(value.storage, -1) if value.name else -1
            saved = self._events.of_piece(number, min(value.saved, donor.forward_events - 1))
            value = replace(value, inputs=inputs, storage=storage, saved=saved)
            if index == piece.values[0] and following is not None and following.num_bytes == value.num_bytes:
                value = _made_like(value, following)
            self.of_donor[index] = len(self.values)
            self.values.append(value)
        return following

    def _inputs_of(self, index: int) -> Iterator[int]:
        """What a value of the donor is made from, of what is there."""
        known = self._splice.base_values
        for source in self._splice.donor.values[index].inputs:
            name = self._splice.donor.values[source].name
            if source in self.of_donor:
                yield self.of_donor[source]
            # What stands later in the base cannot be what this one was made from.
            elif name in known and known[name] in self.of_base:
                yield self.of_base[known[name]]

    def _with_unsaved_inputs(self, members: Sequence[int]) -> set[int]:
        """These values of the donor, and those on the way to them that nothing saves."""
        donor = self._splice.donor
        found = set(members)
        stack = list(members)
        while stack:
            for source in donor.values[stack.pop()].inputs:
                value = donor.values[source]
                is_unsaved = not value.name and value.storage < 0
                if is_unsaved and source not in found and source not in self.of_donor:
                    found.add(source)
                    stack.append(source)
        return found


def _storages_of_both(splice: Splice) -> dict[int, int]:
    """The donor's storages that the base has as well, by the base's number."""
    # A storage that the base has is no new one because a call of a piece uses it, too.
    both: dict[int, int] = {}
    for value in splice.donor.values:
        if value.storage >= 0 and value.name in splice.base_values:
            both.setdefault(value.storage, splice.base.values[splice.base_values[value.name]].storage)
    return both


def _made_like(value: SavedValue, other: SavedValue) -> SavedValue:
    """The value, made as ``other`` is."""
    return replace(
        value,
        operator=other.operator,
        inputs=other.inputs,
        seconds=other.seconds,
        refused=other.refused,
        call=other.call,
        beside=other.beside,
        picked=other.picked,
        stretches=other.stretches,
        gone=other.gone,
        state=other.state,
    )
