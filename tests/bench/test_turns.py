"""Every turn of a comparison begins with another contestant."""

from lightning_dpx.bench.turns import rotated


def test_every_turn_begins_with_the_next_one() -> None:
    items = ("plain", "own", "ours")
    assert rotated(items, 0) == ["plain", "own", "ours"]
    assert rotated(items, 1) == ["own", "ours", "plain"]
    assert rotated(items, 5) == ["ours", "plain", "own"]
