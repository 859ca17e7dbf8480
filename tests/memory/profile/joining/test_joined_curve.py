"""Bytes of a joined step, event by event."""

from lightning_dpx.memory.profile.joining.event_map import EventMap
from lightning_dpx.memory.profile.joining.joined_curve import (
    bytes_at,
    curve_without_pieces,
    joined_curve,
    kept_by_pieces,
)
from lightning_dpx.memory.profile.joining.joined_values import new_storages
from lightning_dpx.memory.profile.joining.splice import Splice
from tests.memory.profile.joining.made_up import MIB, all_values, step_of


def test_a_step_is_as_high_as_the_one_that_calls_all() -> None:
    donor = step_of([1, 2, 4])
    splice = Splice.of(step_of([1, 3]), donor, all_values(donor))
    kept = kept_by_pieces(splice, new_storages(splice))
    assert kept == [2 * MIB, 4 * MIB]
    assert list(joined_curve(splice, EventMap(splice), kept)) == list(step_of([1, 2, 3, 4]).curve)


def test_what_has_no_storage_is_kept_as_the_curve_tells() -> None:
    donor = step_of([1, 2, 3])
    splice = Splice.of(step_of([1, 3]), donor, all_values(donor))
    assert kept_by_pieces(splice, new_storages={}) == [2 * MIB]


def test_without_its_pieces_a_step_is_as_high_as_one_that_does_not_call_them() -> None:
    donor = step_of([1, 2, 3])
    splice = Splice.of(step_of([1, 3]), donor, all_values(donor))
    curve = curve_without_pieces(splice, kept_by_pieces(splice, new_storages(splice)))
    assert [size // MIB for size in curve] == [1, 1, 4, 4, 1, 1]


def test_nothing_is_there_outside_of_a_step() -> None:
    splice = Splice.of(step_of([1]), step_of([1]), wanted=())
    curve = joined_curve(splice, EventMap(splice), kept=[])
    assert [bytes_at(curve, event) for event in (-1, 0, 1, 2)] == [0, MIB, MIB, 0]
