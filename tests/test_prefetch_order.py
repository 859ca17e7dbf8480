"""Which offloaded values come back before backward unpacks them."""

from lightning_dpx.prefetch_order import Prefetcher


class Noting:
    """Notes what is done to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def start_fetch(self) -> None:
        self.log.append(f"fetch {self.name}")

    def release(self) -> None:
        self.log.append(f"release {self.name}")


def made(count: int, names: str) -> tuple[Prefetcher, list, list[str]]:
    log: list[str] = []
    prefetcher = Prefetcher(count)
    slots = [prefetcher.slot_for(Noting(name, log)) for name in names]
    return prefetcher, slots, log


def test_what_was_saved_just_before_is_fetched_next_and_what_was_unpacked_is_released() -> None:
    prefetcher, slots, log = made(1, "abc")
    for slot in reversed(slots):
        prefetcher.on_unpack(slot, backward=0)
    assert log == ["fetch b", "release c", "fetch a", "release b", "release a"]


def test_so_many_are_on_their_way_at_the_most_and_outside_of_backward_none() -> None:
    prefetcher, slots, log = made(2, "abcd")
    prefetcher.on_unpack(slots[3], backward=-1)
    assert log == ["release d"]
    prefetcher.on_unpack(slots[3], backward=0)
    assert log == ["release d", "fetch c", "fetch b", "release d"]
    prefetcher.cancel()
    assert log[-2:] == ["release c", "release b"]


def test_what_backward_has_unpacked_and_what_nobody_needs_any_more_is_not_fetched() -> None:
    prefetcher, slots, log = made(1, "abc")
    prefetcher.on_unpack(slots[1], backward=0)
    log.clear()
    del slots[0]
    prefetcher.on_unpack(slots[1], backward=0)
    assert log == ["release c"], "a is gone, b was used, c was unpacked now"
