"""An iterator that a module holds advances once for all replicas, and gives a step that is only tried nothing away."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.replicas import shared_iterators
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank, as_rank
from lightning_dpx.replicas.shared_iterators import IteratorsOfStep, IteratorTaken, SharedIterator

CPU = torch.device("cpu")


class Holds(nn.Module):
    """A generator in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = (torch.tensor(float(number)) for number in range(9))


def rank(index: int) -> Any:
    return as_rank(ReplicaRank(index, 2, RendezvousSlot()))


def step_of(replicas: list[Holds]) -> IteratorsOfStep:
    step = IteratorsOfStep(CPU)
    step.note((0, "noise"), replicas[0].noise)
    step.begin([[replica] for replica in replicas])
    return step


def test_replicas_take_the_same_items_each_from_the_first() -> None:
    module = Holds()
    real = module.noise
    step = step_of([module, module])
    assert isinstance(module.noise, Iterator)
    assert type(module.noise) is SharedIterator
    taken = []
    for index in range(2):
        with rank(index):
            taken.append([next(module.noise), next(module.noise)])
    step.end()
    assert taken == [[0, 1], [0, 1]]
    assert taken[0][0] is not taken[1][0], "a replica may write what it took"
    assert module.noise is real
    assert next(module.noise) == 2


def test_a_step_that_is_undone_takes_its_items_again() -> None:
    module = Holds()
    step = step_of([module])
    next(module.noise).add_(100)
    step.end(undone=True)
    step.begin([[module]])
    assert [next(module.noise).item(), next(module.noise).item()] == [0, 1]
    step.end()


def test_a_step_in_slices_that_takes_more_than_the_whole_one_is_an_error() -> None:
    module = Holds()
    step = step_of([module])
    next(module.noise)
    step.rewind()
    assert next(module.noise) == 0
    with pytest.raises(RuntimeError, match="takes more items"):
        next(module.noise)
    step.end()


def test_all_replicas_come_to_the_end() -> None:
    module = Holds()
    module.noise = iter(())
    step = step_of([module])
    for index in range(2):
        with rank(index), pytest.raises(StopIteration):
            next(module.noise)
    step.end()


def test_iterators_are_found_in_attributes_small_containers_and_own_objects() -> None:
    class Own:
        def __init__(self) -> None:
            self.inner = iter([1])

    namespace = {"a": iter([1]), "b": [iter([2])], "c": {"d": Own()}, "e": [iter([3])] * 65, "f": {"g": [Own()]}}
    found = [
        path for name, value in namespace.items() for path, _, _ in shared_iterators.places_in(name, namespace, value)
    ]
    assert found == ["a", "b.0", "c.d.inner"], "long lists and what lies deeper are not searched"


def test_what_has_no_copy_is_refused_to_a_shadow_by_name() -> None:
    module = nn.Sequential(Holds())
    [iterator] = shared_iterators.iterators_that_cannot_be_copied(module)
    asked: list[str] = []
    shared_iterators.guard_iterators(module, [iterator], asked)
    with pytest.raises(IteratorTaken):
        next(module[0].noise)
    assert asked == ["self.0.noise"]
    module[0].noise = iter([1, 2])  # of a list, which copies have their own place in
    assert shared_iterators.iterators_that_cannot_be_copied(module) == []


def test_a_trial_gives_its_items_to_the_next_real_step() -> None:
    module = Holds()
    real = module.noise
    with shared_iterators.iterators_peeked(module) as peeked:
        for _ in range(2):
            for iterator in peeked:
                iterator.rewind(is_tried=True)
            assert [next(module.noise).item(), next(module.noise).item()] == [0, 1]
    assert [next(module.noise).item() for _ in range(3)] == [0, 1, 2]
    shared_iterators.put_iterators_back(module)
    assert module.noise is real


def test_a_trial_that_takes_nothing_leaves_nothing() -> None:
    module = Holds()
    real = module.noise
    with shared_iterators.iterators_peeked(module):
        pass
    assert module.noise is real


class Settings:
    """Of a model, which every module of it holds; counts how often its attributes are listed."""

    listed = 0

    def __init__(self) -> None:
        self.sizes = [1, 2, 3]

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            Settings.listed += 1
        return super().__getattribute__(name)


def test_settings_that_all_modules_hold_are_looked_through_once_in_a_step() -> None:
    settings = Settings()
    replicas = [[Holds() for _ in range(20)] for _ in range(2)]
    step = IteratorsOfStep(CPU)
    for index in range(20):
        for modules in replicas:
            vars(modules[index])["settings"] = settings
        step.note((index, "settings"), settings)
    step.note((3, "noise"), replicas[0][3].noise)
    Settings.listed = 0
    step.begin(replicas)
    assert 1 <= Settings.listed <= 4
    assert isinstance(replicas[0][3].noise, SharedIterator), "what holds one is found all the same"
