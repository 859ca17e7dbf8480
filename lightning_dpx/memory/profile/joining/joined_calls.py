"""The calls that can be replayed, and what autograd holds, in a step that is put together from two others."""

from dataclasses import replace
from functools import partial

from lightning_dpx.memory.call_names import call_of, path_of, paths_round
from lightning_dpx.memory.profile.data import Hold, SavedCall
from lightning_dpx.memory.profile.joining.event_map import EventMap
from lightning_dpx.memory.profile.joining.joined_values import JoinedStorages
from lightning_dpx.memory.profile.joining.splice import Splice


class JoinedCalls:
    """Calls of both steps in the order in which they begin, and what autograd holds in both.

    Attributes:
        calls: Of the joined step.
        holds: First those of the base.
        holds_of_donor: The number of each hold that is put in, by the donor's number.
    """

    def __init__(self, splice: Splice, events: EventMap, storages: JoinedStorages) -> None:
        self._splice = splice
        self._events = events
        self._storages = storages
        self._base_calls = {call.name: number for number, call in enumerate(splice.base.calls)}
        self._piece_of_call = self._find_calls_of_pieces()
        # Before they are sorted: the base's calls with their own numbers, then those of the pieces.
        self._unsorted_of_donor: dict[int, int] = {}
        # Parents are named by number, so all must be numbered before the first of them is moved.
        for number in self._piece_of_call:
            self._unsorted_of_donor[number] = len(splice.base.calls) + len(self._unsorted_of_donor)
        unsorted = [*self._moved_base_calls(), *self._moved_calls_of_pieces()]
        # The planner relies on an outer call coming before those in it.
        order = sorted(range(len(unsorted)), key=lambda number: unsorted[number].begin)
        self._sorted = {number: position for position, number in enumerate(order)}
        self._sorted[-1] = -1  # without a call
        self.calls: list[SavedCall] = []
        for number in order:
            call = unsorted[number]
            self.calls.append(replace(call, parent=self._sorted[call.parent]))
        self.holds: list[Hold] = self._moved_base_holds()
        self.holds_of_donor: dict[int, int] = {}
        for number, piece in self._find_holds_of_pieces().items():
            self.holds_of_donor[number] = len(self.holds)
            self.holds.append(self._moved_hold_of_piece(splice.donor.holds[number], piece))

    def _find_calls_of_pieces(self) -> dict[int, int]:
        """The donor's calls round values of the pieces that the base lacks, with the piece of each."""
        donor = self._splice.donor
        piece_of_module: dict[str, int] = {}  # by path
        for index, piece in self._splice.piece_of.items():
            for path in paths_round(call_of(donor.values[index].name)[0]):
                piece_of_module.setdefault(path, piece)
        found = {}
        for number, call in enumerate(donor.calls):
            path = path_of(call.name)
            if call.name not in self._base_calls and path in piece_of_module:
                found[number] = piece_of_module[path]
        return found

    def _find_holds_of_pieces(self) -> dict[int, int]:
        """What autograd holds in the pieces: its number among the donor's, with the piece."""
        donor = self._splice.donor
        piece_of_value = {donor.values[index].name: piece for index, piece in self._splice.piece_of.items()}
        found = {}
        for number, hold in enumerate(donor.holds):
            # A small tensor has no name of its own: it belongs to its call.
            piece = piece_of_value.get(hold.name) if hold.name else self._piece_of_call.get(hold.call)
            if piece is not None:
                found[number] = piece
        return found

    def _moved_base_calls(self) -> list[SavedCall]:
        moved = []
        for call in self._splice.base.calls:
            there = call.moved(self._events.of_base)
            moved.append(replace(there, end=self._events.after_base(call.end)))
        return moved

    def _moved_calls_of_pieces(self) -> list[SavedCall]:
        moved = []
        of_donor = self._storages.of_donor
        for number, piece in self._piece_of_call.items():
            call = self._splice.donor.calls[number]
            given = tuple(of_donor[storage] for storage in call.given if storage in of_donor)
            parent = self._unsorted_number(call.parent)
            there = call.moved(partial(self._events.of_piece, piece))
            moved.append(replace(there, given=given, parent=parent))
        return moved

    def _moved_base_holds(self) -> list[Hold]:
        moved = []
        for hold in self._splice.base.holds:
            moved.append(replace(hold.moved(self._events.of_base), call=self._sorted[hold.call]))
        return moved

    def _moved_hold_of_piece(self, hold: Hold, piece: int) -> Hold:
        # The call may be one that the base makes as well, within which only this value is new.
        call = self._sorted[self._unsorted_number(hold.call)]
        return replace(hold.moved(partial(self._events.of_piece, piece)), call=call)

    def _unsorted_number(self, call_of_donor: int) -> int:
        """The number before sorting of a call of the donor: of a piece, or one that both steps make; -1 without one."""
        if call_of_donor in self._unsorted_of_donor:
            return self._unsorted_of_donor[call_of_donor]
        if call_of_donor < 0:
            return -1
        return self._base_calls.get(self._splice.donor.calls[call_of_donor].name, -1)
