"""How much larger the values of forwards are than the planned ones."""

import pytest

from lightning_dpx.memory.execute.grown_values import GrownValues


def forward(grown: GrownValues, **sizes: tuple[int, bool]) -> float:
    """The growth so far, after a forward with these values: bytes, and whether they stay."""
    grown.begin()
    for name, (num_bytes, is_kept) in sizes.items():
        grown.add(name, num_bytes, is_kept=is_kept)
    grown.end()
    return grown.most


def test_the_most_that_was_seen_counts() -> None:
    grown = GrownValues({"a": 100, "b": 100})
    assert forward(grown, a=(100, True), b=(100, False)) == 1.0
    assert forward(grown, a=(110, True), b=(110, False)) == pytest.approx(1.1)
    assert forward(grown, a=(50, True), b=(50, False)) == pytest.approx(1.1)
    assert grown.num_forwards == 3


def test_what_stays_may_grow_while_what_is_dropped_shrinks() -> None:
    grown = GrownValues({"a": 100, "b": 100})
    assert forward(grown, a=(130, True), b=(70, False)) == pytest.approx(1.3)


def test_unknown_values_and_a_few_of_many_tell_nothing() -> None:
    grown = GrownValues({"a": 10, "b": 990})
    assert forward(grown, a=(40, True), other=(5000, True)) == 1.0
