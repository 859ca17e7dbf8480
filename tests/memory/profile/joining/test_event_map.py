"""Events of two steps keep their order in the joined one."""

from lightning_dpx.memory.profile.joining.event_map import EventMap
from lightning_dpx.memory.profile.joining.splice import Splice
from tests.memory.profile.joining.made_up import all_values, step_of


def test_each_event_of_the_base_is_later_by_what_is_put_in_before_it() -> None:
    donor = step_of([1, 2, 3])
    events = EventMap(Splice.of(step_of([1, 3]), donor, all_values(donor)))
    # base:   0  .  1 | 2  .  3      (the end is event 4)
    # joined: 0 [1] 2 | 3 [4] 5
    assert [events.of_base(event) for event in range(5)] == [0, 2, 3, 5, 6]
    assert events.of_base(-1) == -1
    assert events.of_base(99) == 101
    assert events.num_added == 2


def test_events_outside_of_a_piece_are_at_its_nearer_end() -> None:
    donor = step_of([1, 2, 3])
    events = EventMap(Splice.of(step_of([1, 3]), donor, all_values(donor)))
    assert [events.of_piece(0, event) for event in (-1, 0, 1, 2)] == [-1, 1, 1, 2]
    assert [events.of_piece(0, event) for event in (3, 4, 5, 6)] == [4, 4, 5, 5]


def test_pieces_at_one_cut_come_in_the_order_of_forward_and_go_back_in_the_other() -> None:
    donor = step_of([1, 2])
    events = EventMap(Splice.of(step_of([3]), donor, all_values(donor)))
    assert [(cut.piece, cut.is_backward) for cut in events.cuts] == [(0, False), (1, False), (1, True), (0, True)]
