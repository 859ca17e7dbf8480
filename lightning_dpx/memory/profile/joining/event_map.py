"""Where the events of two steps are in the one that is made of them."""

from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from lightning_dpx.memory.profile.joining.splice import Splice


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place in the base at which a part of the donor is put in.

    Attributes:
        event: Of the base, before which it is put in.
        begin: The first event of the donor that is put in.
        end: The one after the last.
        piece: The number of the piece that the events are of.
        is_backward: Whether it is the backward of the piece.
    """

    event: int
    begin: int
    end: int
    piece: int
    is_backward: bool


class EventMap:
    """The events of two steps, numbered through in the joined one.

    Attributes:
        cuts: In the order of the joined step.
        num_added: Events that it has beyond those of the base.
    """

    def __init__(self, splice: Splice) -> None:
        self._splice = splice
        self.cuts: list[Cut] = _cuts(splice)
        self.num_added: int = 0
        self._forward_starts = [0] * len(splice.pieces)  # where each piece begins in the joined step
        self._backward_starts = [0] * len(splice.pieces)
        # An event at a cut comes after what is put in there.
        self._shift = np.zeros(len(splice.base.curve) + 1, dtype=np.int64)
        for cut in self.cuts:
            # Cuts come in order, so all that was put in so far stands before this one.
            starts = self._backward_starts if cut.is_backward else self._forward_starts
            starts[cut.piece] = cut.event + self.num_added
            length = cut.end - cut.begin
            self.num_added += length
            self._shift[cut.event :] += length

    def of_base(self, event: int) -> int:
        """Where that event of the base is; -1 is none."""
        if event < 0:
            return event
        # What has not gone when backward is over goes after the last event.
        return event + int(self._shift[min(event, len(self._shift) - 1)])

    def after_base(self, event: int) -> int:
        """Where what is over at that event of the base is over: before anything that is put in there."""
        if event <= 0:
            return self.of_base(event)
        return self.of_base(event - 1) + 1

    def of_piece(self, number: int, event: int) -> int:
        """Where that event of the donor is in a piece; -1 is none."""
        if event < 0:
            return event
        piece = self._splice.pieces[number]
        # An event of the donor says by itself which of the two parts of its piece it belongs to.
        if event < self._splice.donor.forward_events:
            begin, end = piece.forward
            start = self._forward_starts[number]
        else:
            begin, end = piece.backward
            start = self._backward_starts[number]
        # What happens outside of the piece, such as a release much later, is moved to its nearer end.
        return start + min(max(event, begin), end) - begin


def _cuts(splice: Splice) -> list[Cut]:
    cuts = []
    for number, piece in enumerate(splice.pieces):
        begin, end = piece.forward
        cuts.append(Cut(event=piece.forward_cut, begin=begin, end=end, piece=number, is_backward=False))
    # What comes last in forward comes first in backward.
    for number, piece in reversed(list(enumerate(splice.pieces))):
        begin, end = piece.backward
        cuts.append(Cut(event=piece.backward_cut, begin=begin, end=end, piece=number, is_backward=True))
    # At one event the pieces keep the order from above.
    cuts.sort(key=attrgetter("event"))
    return cuts
