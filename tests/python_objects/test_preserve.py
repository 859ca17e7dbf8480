import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dpx.python_objects.preserve import GeneratorStates, preserve_rng_state, same_state

GLOBAL = np.random.default_rng(5)


class Noisy(nn.Module):
    """Holds a generator of every kind, also inside containers and submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.torch = torch.Generator().manual_seed(1)
        self.several = [np.random.default_rng(2), random.Random(3)]
        self.named = {"old": np.random.RandomState(4)}

    def draw(self) -> list[float]:
        return [
            torch.rand(1).item(),
            float(np.random.rand()),
            random.random(),
            torch.rand(1, generator=self.inner.torch).item(),
            float(self.several[0].random()),
            self.several[1].random(),
            float(self.named["old"].rand()),
            float(GLOBAL.random()),
        ]


def test_all_generators_continue_as_if_nothing_had_been_drawn() -> None:
    module = Noisy()
    with preserve_rng_state(modules=[module]):
        first = module.draw()
    assert module.draw() == first


@pytest.mark.parametrize("kind", range(8))
def test_states_differ_after_a_draw_from_any_of_them(kind: int) -> None:
    module = Noisy()
    draws = [
        lambda: torch.rand(1),
        np.random.rand,
        random.random,
        lambda: torch.rand(1, generator=module.inner.torch),
        lambda: module.several[0].random(),
        lambda: module.several[1].random(),
        lambda: module.named["old"].rand(),
        GLOBAL.random,
    ]
    before = GeneratorStates(modules=[module])
    assert before == GeneratorStates(modules=[module])
    draws[kind]()
    assert before != GeneratorStates(modules=[module])


def test_the_generators_of_devices_continue_too(sim) -> None:
    device = torch.device("sim:1")
    with preserve_rng_state([device]):
        first = torch.rand(3, device=device).cpu()
    assert torch.equal(torch.rand(3, device=device).cpu(), first)


class Operators(TorchDispatchMode):
    """Counts the operators that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_look_at_states_is_no_operator_of_a_step_that_is_watched() -> None:
    """A profile would take the step for another one than the one before, and know no lifetimes."""
    state = torch.Generator().manual_seed(1).get_state()
    with Operators() as operators:
        assert same_state(state, state.clone())
    assert operators.count == 1, "the copy"
