"""Whether anybody drew from Python's or NumPy's generator is seen without a copy."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from lightning_dpx.python_objects.process_generators import GeneratorWatch, ProcessGenerators

DRAWS: list[Callable[[], object]] = [
    random.random,
    lambda: random.gauss(0, 1),
    lambda: np.random.rand(1),
    lambda: random.seed(5),
    lambda: np.random.seed(5),
]


def test_without_a_draw_it_is_the_same_object() -> None:
    np.random.seed(0)  # an earlier test may have left a normal number to give out, which is looked after in another way
    watch = GeneratorWatch()
    assert watch.now() is watch.now()


@pytest.mark.parametrize("draw", DRAWS)
def test_every_draw_and_every_seed_is_seen_and_undone(draw: Callable[[], object]) -> None:
    watch = GeneratorWatch()
    before = watch.now()
    draw()
    assert watch.now() is not before
    assert watch.now() != before
    before.restore()
    assert watch.now() == before


def test_a_normal_number_that_numpy_keeps_for_the_next_call_is_not_overlooked() -> None:
    np.random.seed(0)
    np.random.randn(1)
    state = ProcessGenerators()
    assert state.holds_a_number
    watch = GeneratorWatch()
    before = watch.now()
    np.random.randn(1)
    assert watch.now() != before
