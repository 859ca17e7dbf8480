"""The order in which resting tensors come back."""

import pytest

from lightning_dpx.prefetch_order import Prefetcher, Slot


class Noted:
    """Says what is done to it."""

    def __init__(self, name: int, timeline: list[str]) -> None:
        self.name, self.timeline = name, timeline

    def start(self) -> None:
        self.timeline.append(f"start {self.name}")

    def drop(self) -> None:
        self.timeline.append(f"drop {self.name}")


def rested(count: int, number: int) -> tuple[Prefetcher[Noted], list[Slot[Noted]], list[str]]:
    timeline: list[str] = []
    ahead: Prefetcher[Noted] = Prefetcher(count)
    return ahead, [ahead.slot_for(Noted(name, timeline)) for name in range(number)], timeline


def test_the_ones_before_it_come_next() -> None:
    ahead, slots, timeline = rested(2, 4)
    for number in (3, 2, 1, 0):
        timeline.append(f"ask {number}")
        ahead.asked(slots[number], backward=0)
    assert timeline == [
        "ask 3", "start 2", "start 1", "drop 3", "ask 2", "start 0", "drop 2", "ask 1", "drop 1", "ask 0", "drop 0",
    ]  # fmt: skip


def test_the_rest_of_an_operator_comes_first() -> None:
    """Backward asks for what one operator keeps in the order of forward."""
    ahead, slots, timeline = rested(2, 10)
    ahead.asked(slots[5], backward=0)
    assert timeline == ["start 6", "start 7", "drop 5"]


def test_what_backward_went_by_is_forgotten_and_the_rest_when_it_is_over() -> None:
    ahead, slots, timeline = rested(1, 20)
    ahead.asked(slots[19], backward=0)
    timeline.clear()
    ahead.asked(slots[5], backward=0)
    assert timeline == ["drop 18", "start 6", "drop 5"]
    timeline.clear()
    ahead.forget()
    ahead.forget()
    assert timeline == ["drop 6"]


def test_what_several_slots_share_is_kept_for_the_other_one() -> None:
    ahead, slots, timeline = rested(1, 1)
    again = ahead.slot_for(slots[0].resting)
    ahead.asked(again, backward=0)
    assert timeline == ["start 0"]
    ahead.asked(slots[0], backward=0)
    assert timeline == ["start 0", "drop 0"]


@pytest.mark.parametrize(("count", "backward"), [(0, 0), (2, -1)], ids=["no look-ahead", "outside of a backward"])
def test_nothing_comes_ahead(count: int, backward: int) -> None:
    ahead, slots, timeline = rested(count, 3)
    ahead.asked(slots[2], backward)
    assert timeline == ["drop 2"]


def test_what_is_gone_is_not_fetched() -> None:
    ahead, slots, timeline = rested(1, 3)
    del slots[1]
    ahead.asked(slots[1], backward=0)
    assert timeline == ["start 0", "drop 2"]
