"""The order in which offloaded tensors come back."""

import pytest

from lightning_dpx.prefetch_order import Prefetcher, PrefetchSlot


class Noted:
    """Says what is done to it."""

    def __init__(self, name: int, timeline: list[str]) -> None:
        self.name, self.timeline = name, timeline

    def start_fetch(self) -> None:
        self.timeline.append(f"start {self.name}")

    def release(self) -> None:
        self.timeline.append(f"release {self.name}")


def offloaded(count: int, number: int) -> tuple[Prefetcher[Noted], list[PrefetchSlot[Noted]], list[str]]:
    timeline: list[str] = []
    ahead: Prefetcher[Noted] = Prefetcher(count)
    return ahead, [ahead.slot_for(Noted(name, timeline)) for name in range(number)], timeline


def test_the_ones_before_it_come_next() -> None:
    ahead, slots, timeline = offloaded(2, 4)
    for number in (3, 2, 1, 0):
        timeline.append(f"ask {number}")
        ahead.on_unpack(slots[number], backward=0)
    assert timeline == [
        "ask 3", "start 2", "start 1", "release 3", "ask 2", "start 0", "release 2", "ask 1",
        "release 1", "ask 0", "release 0",
    ]  # fmt: skip


def test_the_rest_of_an_operator_comes_first() -> None:
    """Backward asks for what one operator keeps in the order of forward."""
    ahead, slots, timeline = offloaded(2, 10)
    ahead.on_unpack(slots[5], backward=0)
    assert timeline == ["start 6", "start 7", "release 5"]


def test_what_backward_went_by_is_forgotten_and_the_rest_when_it_is_over() -> None:
    ahead, slots, timeline = offloaded(1, 20)
    ahead.on_unpack(slots[19], backward=0)
    timeline.clear()
    ahead.on_unpack(slots[5], backward=0)
    assert timeline == ["release 18", "start 6", "release 5"]
    timeline.clear()
    ahead.cancel()
    ahead.cancel()
    assert timeline == ["release 6"]


def test_what_several_slots_share_is_kept_for_the_other_one() -> None:
    ahead, slots, timeline = offloaded(1, 1)
    again = ahead.slot_for(slots[0].offloaded)
    ahead.on_unpack(again, backward=0)
    assert timeline == ["start 0"]
    ahead.on_unpack(slots[0], backward=0)
    assert timeline == ["start 0", "release 0"]


@pytest.mark.parametrize(("count", "backward"), [(0, 0), (2, -1)], ids=["prefetch_depth 0", "outside of a backward"])
def test_nothing_comes_ahead(count: int, backward: int) -> None:
    ahead, slots, timeline = offloaded(count, 3)
    ahead.on_unpack(slots[2], backward)
    assert timeline == ["release 2"]


def test_what_is_gone_is_not_fetched() -> None:
    ahead, slots, timeline = offloaded(1, 3)
    del slots[1]
    ahead.on_unpack(slots[1], backward=0)
    assert timeline == ["start 0", "release 2"]
