"""Values of a joined step stand in the order of forward, and are made from what they were made from."""

from dataclasses import replace

from lightning_dpx.memory.profile.joining.event_map import EventMap
from lightning_dpx.memory.profile.joining.joined_values import JoinedStorages, JoinedValues, new_storages
from lightning_dpx.memory.profile.joining.splice import Splice
from tests.memory.profile.joining.made_up import MIB, all_values, step_of


def joined(splice: Splice) -> JoinedValues:
    events = EventMap(splice)
    return JoinedValues(splice, events, JoinedStorages(splice, events))


def test_values_have_the_order_and_the_events_of_the_step_that_calls_all() -> None:
    donor = step_of([1, 2, 4])
    values = joined(Splice.of(step_of([1, 3]), donor, all_values(donor))).values
    assert [value.name for value in values] == ["layers.1:0", "layers.2:0", "layers.3:0", "layers.4:0"]
    assert [value.saved for value in values] == [0, 1, 2, 3]


def test_only_storages_that_the_base_lacks_are_new() -> None:
    donor = step_of([1, 2, 3])
    splice = Splice.of(step_of([1, 3]), donor, all_values(donor))
    assert new_storages(splice) == {1: 0}
    storages = JoinedStorages(splice, EventMap(splice))
    assert storages.of_donor == {0: 0, 1: 2, 2: 1}
    assert [storage.num_bytes // MIB for storage in storages.storages] == [1, 3, 2]


def test_a_storage_of_the_base_is_not_new_because_a_piece_uses_it_too() -> None:
    donor = step_of([1, 2, 3])
    of_first = replace(donor.values[1], storage=donor.values[0].storage)
    donor = replace(donor, values=(donor.values[0], of_first, donor.values[2]))
    assert new_storages(Splice.of(step_of([1, 3]), donor, all_values(donor))) == {}


def test_where_each_value_has_gone() -> None:
    donor = step_of([1, 2, 3])
    values = joined(Splice.of(step_of([1, 3]), donor, all_values(donor)))
    assert values.of_base == {0: 0, 1: 2}
    assert values.of_donor == {1: 1}
    assert values.values[1].inputs == (0,)
