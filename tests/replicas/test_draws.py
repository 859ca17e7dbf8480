"""Draws from generators that all replicas share are noticed, whoever they belong to."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dpx.replicas.draws import DrawWatch


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()


def drawn(watch: DrawWatch, draw: Callable[[], object], kind: str = "step") -> bool:
    seen = watch.begin(kind)
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


def test_generators_of_others_are_looked_at_now_and_then_and_those_of_torch_always() -> None:
    watch = DrawWatch(Draws())
    others = [drawn(watch, random.random) for _ in range(33)]
    assert all(others[:8])
    assert [number for number, seen in enumerate(others) if seen and number >= 8] == [16, 32]
    assert drawn(watch, lambda: torch.rand(1))
    assert drawn(watch, random.random, kind="validation"), "another kind of run has first runs of its own"
