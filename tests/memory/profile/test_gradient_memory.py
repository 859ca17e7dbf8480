"""Gradients of parameters are told from activations by the memory that they take, also those that a step forgets."""

import torch
from torch import nn

from lightning_dpx.memory import MemoryTrace
from lightning_dpx.memory.profile.gradient_memory import GradientMemory

CPU = torch.device("cpu")
WIDTH = 256
WEIGHT = WIDTH * WIDTH * 4  # bytes


class Seen:
    """A step of two layers, and what its gradients took."""

    def __init__(self, module: nn.Module, *, forgets: bool = False) -> None:
        x = torch.randn(4, WIDTH)
        self.trace = MemoryTrace(CPU)
        self.gradients = GradientMemory(module, self.trace)
        with self.trace, self.gradients:
            module(x).sum().backward()
            if forgets:
                module.zero_grad(set_to_none=True)
            self.end = self.trace.now
        self.activations = self.trace.passing(self.gradients.allocations)[: self.end]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def test_gradients_that_are_there_at_the_end_count_from_when_they_come() -> None:
    seen = Seen(layers())
    counted = seen.gradients.counted(seen.end, CPU)
    # The layer behind gets its gradient first, and the one in front of it last.
    assert counted[0] < WEIGHT
    assert counted[-1] >= 2 * WEIGHT
    assert max(seen.activations) < WEIGHT, "activations of four rows"


def test_those_that_the_step_forgets_are_no_activations_either() -> None:
    seen = Seen(layers(), forgets=True)
    assert max(seen.trace.passing()[: seen.end]) >= 2 * WEIGHT, "they are gone by its end, as activations are"
    assert max(seen.activations) < WEIGHT


def test_frozen_parameters_have_none() -> None:
    module = layers()
    module[0].weight.requires_grad_(False)
    seen = Seen(module)
    counted = seen.gradients.counted(seen.end, CPU)
    assert WEIGHT <= counted[-1] < 2 * WEIGHT


def test_a_parameter_that_the_step_does_not_use_may_get_one_at_any_time() -> None:
    module = layers()
    module.unused = nn.Linear(WIDTH, WIDTH, bias=False)
    module.forward = lambda x: module[1](module[0](x))  # type: ignore[method-assign]
    seen = Seen(module)
    counted = seen.gradients.counted(seen.end, CPU)
    assert min(counted) >= 2 * WEIGHT, "of the two layers that are left out"


def test_gradients_that_are_there_already_are_added_to_and_not_counted_again() -> None:
    module = layers()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    seen = Seen(module)
    assert max(seen.gradients.counted(seen.end, CPU)) < 2 * WEIGHT


def test_where_they_are_added_to_others_a_new_one_is_there_beside_them_for_a_while() -> None:
    seen = Seen(layers())
    adding = dict(seen.gradients.adding(seen.activations))
    assert adding
    assert WEIGHT in adding.values()
    assert max(adding.values()) < 2 * WEIGHT, "one after the other"
