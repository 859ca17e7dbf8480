"""How often values are used once more, on a chain of made-up layers."""

from dataclasses import replace

from lightning_dpx.memory.plan.recomputed_values import Outline, values_of_choice
from lightning_dpx.memory.plan.use_counts import UseCounts
from lightning_dpx.memory.profile.data import Profile
from tests.memory.made_up import chain

DROPPED = [1, 2]  # of four values; the second is made from the first, which is kept, and the third from the second


def counts_of(profile: Profile) -> UseCounts:
    outline = Outline(profile)
    return UseCounts(outline, values_of_choice(outline, DROPPED, []))


def left(counts: UseCounts) -> list[int]:
    return [counts.left[index] for index in DROPPED]


def test_every_request_and_every_recomputation_is_a_use() -> None:
    assert left(counts_of(chain(4))) == [2, 1]


def test_with_the_moments_of_saving_a_use_is_known_from_then_on() -> None:
    counts = counts_of(replace(chain(4), saves=((0, 0), (1, 1), (2, 2), (3, 3))))
    assert left(counts) == [0, 0]
    counts.advance(1)
    assert left(counts) == [1, 0]
    counts.advance(3)
    assert left(counts) == [2, 1]
    assert counts.of_backward == counts.left
