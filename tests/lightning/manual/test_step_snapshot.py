"""A step that must never have happened: everything that it changed is put back, in place."""

import random
from collections import OrderedDict, deque
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dpx.lightning.manual.step_snapshot import StepSnapshot, StepStart
from lightning_dpx.replicas import GeneratorStates


class Own:
    def __init__(self) -> None:
        self.count = 0


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("steps", torch.zeros(1))
        self.seen = [1]
        self.recent = deque([1], 3)
        self.table = {"a": {1}}
        self.array = np.zeros(2)
        self.own = Own()


def draws() -> list[float]:
    return [torch.rand(1).item(), random.random(), np.random.rand()]


def test_tensors_gradients_containers_objects_and_generators_are_what_they_were() -> None:
    module = Module()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module.linear(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    held = (module.seen, module.recent, module.table["a"], module.array, module.own)
    weight, gradient = module.linear.weight.detach().clone(), module.linear.weight.grad.clone()
    momentum = optimizer.state[module.linear.weight]["exp_avg"].clone()
    snapshot = StepSnapshot(module, [optimizer], GeneratorStates())
    first = draws()

    optimizer.zero_grad()
    module.linear(torch.full((1, 1), 3.0)).sum().backward()
    optimizer.step()
    module.steps.add_(1)
    module.seen.append(2)
    module.recent.clear()
    module.table["a"].add(2)
    module.table["b"] = set()
    module.array += 1
    module.own.count = 5
    module.extra = 1
    module.seen = []

    snapshot.restore()
    assert draws() == first
    assert torch.equal(module.linear.weight, weight)
    assert torch.equal(module.linear.weight.grad, gradient)
    assert torch.equal(optimizer.state[module.linear.weight]["exp_avg"], momentum)
    assert module.steps.item() == 0
    assert (module.seen, list(module.recent), module.table, module.own.count) == ([1], [1], {"a": {1}}, 0)
    assert module.array.tolist() == [0, 0]
    assert not hasattr(module, "extra")
    found = (module.seen, module.recent, module.table["a"], module.array, module.own)
    assert all(one is other for one, other in zip(held, found, strict=True)), "in place"


def test_parameters_may_be_left_to_somebody_else() -> None:
    module = Module()
    snapshot = StepSnapshot(module, [], GeneratorStates(), parameters=False)
    with torch.no_grad():
        module.linear.weight.fill_(7)
    module.steps.add_(1)
    snapshot.restore()
    assert module.linear.weight.item() == 7
    assert module.steps.item() == 0


def test_an_ordered_dict_keeps_its_order() -> None:
    module = Module()
    module.seen = OrderedDict(b=1, a=2)  # type: ignore[assignment]
    snapshot = StepSnapshot(module, [], GeneratorStates())
    module.seen["c"] = 3  # type: ignore[operator]
    module.seen.pop("b")  # type: ignore[operator]
    snapshot.restore()
    assert list(module.seen.items()) == [("b", 1), ("a", 2)]  # type: ignore[operator]


class Counted(deque[int]):
    """Keeps more than its items."""

    total = 0

    def append(self, value: int) -> None:
        self.total += 1
        super().append(value)


class InSlots:
    __slots__ = ("count", "seen")

    def __init__(self) -> None:
        self.count = 0
        self.seen = [0]


class NoisySGD(torch.optim.SGD):
    """Draws in its steps, from a generator of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.generator = torch.Generator().manual_seed(0)
        self.host = random.Random(0)
        self.system = random.SystemRandom()  # has no state


def test_generators_of_an_optimizer_go_on_from_where_they_were() -> None:
    module = Module()
    optimizer = NoisySGD(module.parameters())
    snapshot = StepSnapshot(module, [optimizer], GeneratorStates())
    first = (torch.rand(1, generator=optimizer.generator).item(), optimizer.host.random())
    snapshot.restore()
    assert (torch.rand(1, generator=optimizer.generator).item(), optimizer.host.random()) == first


def test_what_containers_keep_beside_their_items_and_what_is_in_slots_is_put_back() -> None:
    module = Module()
    module.counted = Counted([1], 3)
    module.in_slots = InSlots()
    module.partial = partial(int, "1")  # its members look like slots, and cannot be set
    snapshot = StepSnapshot(module, [], GeneratorStates())
    module.counted.append(2)
    module.in_slots.count += 1
    module.in_slots.seen.append(1)
    snapshot.restore()
    assert (list(module.counted), module.counted.total) == ([1], 0)
    assert (module.in_slots.count, module.in_slots.seen) == (0, [0])


def test_what_cannot_be_written_stays() -> None:
    """A step cannot have written it either."""
    module = Module()
    module.register_buffer("expanded", torch.arange(3.0).expand(2, 3))
    module.array.flags.writeable = False
    snapshot = StepSnapshot(module, [], GeneratorStates())
    module.steps.add_(1)
    snapshot.restore()
    assert module.steps.item() == 0
    assert module.expanded.tolist() == [[0.0, 1.0, 2.0]] * 2


def test_buffers_that_a_step_has_registered_or_exchanged_are_put_back() -> None:
    module = Module()
    steps = module.steps
    snapshot = StepSnapshot(module, [], GeneratorStates())
    module.register_buffer("more", torch.ones(1))
    module.steps = torch.ones(2)
    snapshot.restore()
    assert module.steps is steps
    assert not hasattr(module, "more")


class InSlotsOfC(partial[int]):
    """Has slots, and members of a class that is written in C."""

    __slots__ = ("count",)


def test_read_only_members_of_classes_in_c_are_left_alone() -> None:
    module = Module()
    own = module.own
    module.weak = WeakValueDictionary({"own": own})  # whose references have a slot, and a read-only member
    module.called = InSlotsOfC(int, "1")
    module.called.count = 0
    snapshot = StepSnapshot(module, [], GeneratorStates())
    module.called.count = 1
    module.weak["more"] = module.called
    snapshot.restore()
    assert dict(module.weak) == {"own": own}
    assert (module.called(), module.called.count) == (1, 0)


def test_tensors_of_inference_mode_and_without_numbers_are_no_hindrance() -> None:
    module = Module()
    with torch.inference_mode():
        module.features = torch.zeros(2)
    module.outline = torch.empty(2, device="meta")
    snapshot = StepSnapshot(module, [], GeneratorStates())
    with torch.inference_mode():
        module.features.add_(1)
    snapshot.restore()
    assert module.features.tolist() == [0, 0]


@pytest.mark.parametrize("of_every_step", [False, True])
def test_what_was_frozen_and_put_into_another_mode_is_as_it_was(of_every_step: bool) -> None:
    module = Module()
    module.linear.bias.requires_grad_(False)
    module.linear.eval()
    start: Any = StepSnapshot(module, [], GeneratorStates())
    if of_every_step:
        start = StepStart(module, list(module.parameters()), GeneratorStates())
    module.linear.weight.requires_grad_(False)
    module.linear.bias.requires_grad_(True)
    module.linear.train()
    module.eval()
    start.restore()
    assert (module.linear.weight.requires_grad, module.linear.bias.requires_grad) == (True, False)
    assert (module.training, module.linear.training) == (True, False)
