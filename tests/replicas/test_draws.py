"""Draws from generators that all replicas share are noticed, whoever they belong to."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dpx.python_objects.preserve import GeneratorStates
from lightning_dpx.replicas.draws import (
    BatchDraws,
    DrawWatch,
    StepDraws,
    ThreadDraws,
    drawn_on_devices,
    drawn_once,
    draws_both_ways,
)
from lightning_dpx.replicas.same_draws import Draw


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()


def drawn(watch: DrawWatch, draw: Callable[[], object]) -> bool:
    seen = watch.now()
    draw()
    return watch.has_drawn(seen)


@pytest.mark.parametrize("source", ["torch", "python", "numpy", "own"])
def test_a_draw_is_noticed_whatever_it_came_from(source: str) -> None:
    module = Draws()
    draws = {
        "torch": lambda: torch.rand(1),
        "python": random.random,
        "numpy": lambda: np.random.rand(1),
        "own": lambda: torch.rand(1, generator=module.generator),
    }
    assert drawn(DrawWatch(module), draws[source])


def test_a_run_without_draws_is_none() -> None:
    assert not drawn(DrawWatch(Draws()), lambda: torch.ones(1))


def test_draws_are_noticed_in_every_run_and_taken_back() -> None:
    module = Draws()
    watch = DrawWatch(module)
    draws = [random.random, lambda: np.random.rand(), lambda: np.random.randn(), lambda: float(torch.rand(()))]
    draws.append(lambda: float(torch.rand((), generator=module.generator)))
    for _ in range(33):
        for draw in draws:
            before = watch.now()
            drawn_number = draw()
            assert watch.has_drawn(before)
            before.put_back()
            assert draw() == drawn_number


@torch.library.custom_op("dpx_tests::add_noise", mutates_args=())
def add_noise(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x + scale * torch.randn_like(x) if scale else x.clone()


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_an_operator_of_a_library_is_seen_to_draw(scale: float) -> None:
    with ThreadDraws() as own:
        add_noise(torch.ones(2), scale).sum()
    assert own.seen == bool(scale)


def call(draw: Callable[[], object], *of_torch: int) -> StepDraws:
    before = GeneratorStates()
    draw()
    seen = StepDraws(before, before.again(), tuple(map(Draw, of_torch)))
    before.restore()
    return seen


def test_what_is_drawn_for_a_batch_is_told_from_what_is_drawn_for_rows() -> None:
    whole, sliced = call(random.random, 5), call(random.random, 2)
    assert drawn_once([whole, sliced]) == ({"others"}, {"torch"})
    assert drawn_once([call(lambda: np.random.random(5)), call(lambda: np.random.random(2))]) == (set(), {"others"})
    assert drawn_once([call(lambda: None, 1), call(lambda: None, 1)]) == ({"torch"}, set())
    assert drawn_once([call(lambda: None), call(lambda: None)]) == (set(), set())


def test_draws_of_devices_are_told_apart_from_those_of_the_host() -> None:
    def of_devices(*numbers: int) -> StepDraws:
        return StepDraws(GeneratorStates(), GeneratorStates(), (), tuple(map(Draw, numbers)))

    assert drawn_on_devices([of_devices(1, 4), of_devices(1, 4)]) == ({"devices"}, set())
    assert drawn_on_devices([of_devices(1, 20), of_devices(1, 12)]) == (set(), {"devices"})
    assert drawn_on_devices([of_devices(), of_devices()]) == (set(), set())
    assert drawn_once([of_devices(1), of_devices(1)]) == (set(), set())
    assert draws_both_ways([of_devices(1, 20), of_devices(1, 12)])
    assert not draws_both_ways([of_devices(20), of_devices(12)])


def test_slices_have_masks_of_their_own_also_for_what_belongs_to_the_batch() -> None:
    def of_masks(*masks: int, drawn: tuple[int, ...] = ()) -> StepDraws:
        draws = [*map(Draw, drawn), *(Draw(numbers, is_mask=True) for numbers in masks)]
        return StepDraws(GeneratorStates(), GeneratorStates(), (), tuple(draws))

    # Embeddings of positions, and rows.
    calls = [of_masks(8, 20), of_masks(8, 12)]
    assert drawn_on_devices(calls) == (set(), {"devices"})
    assert not draws_both_ways(calls)
    # Beside a number for the batch they leave the generator elsewhere on each slice.
    assert draws_both_ways([of_masks(20, drawn=(1,)), of_masks(12, drawn=(1,))])
    assert not draws_both_ways([of_masks(8, drawn=(1,)), of_masks(8, drawn=(1,))])
    assert drawn_on_devices([of_masks(8, drawn=(1,))] * 2) == ({"devices"}, set())


def test_so_they_have_on_the_host() -> None:
    def of_host(*numbers: int, masks: tuple[bool, ...]) -> StepDraws:
        return StepDraws(GeneratorStates(), GeneratorStates(), tuple(map(Draw, numbers, masks)))

    assert not draws_both_ways([of_host(8, rows, masks=(True, True)) for rows in (20, 12)])
    assert draws_both_ways([of_host(8, rows, masks=(False, True)) for rows in (20, 12)])
    assert draws_both_ways([of_host(8, rows, masks=(False, False)) for rows in (20, 12)])


def test_every_slice_draws_the_same_and_the_next_batch_goes_on() -> None:
    random.seed(3)
    torch.manual_seed(3)
    expected = [(random.random(), float(torch.rand(()))) for _ in range(2)]
    random.seed(3)
    torch.manual_seed(3)
    for numbers in expected:
        batch = BatchDraws({"torch", "others"}, [], torch.device("cpu"))
        for _ in range(3):
            batch.begin_slice(torch.device("cpu"))
            assert (random.random(), float(torch.rand(()))) == numbers
