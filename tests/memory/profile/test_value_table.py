"""Values of a step are numbered, and so are their storages."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpx.memory import profile_module
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.profile.data import SavedValue
from lightning_dpx.memory.profile.value_table import DeadValue, FoundValues
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace


def test_values_of_one_storage_get_its_number_and_the_first_ones_name() -> None:
    found = FoundValues()
    trace = MemoryTrace(torch.device("cpu"))
    with trace:
        one = torch.ones(4)
        two = torch.ones(4)
    first = trace.allocation_of(one.untyped_storage())
    second = trace.allocation_of(two.untyped_storage())
    assert [found.storage_of("a", first), found.storage_of("b", first), found.storage_of("c", second)] == [0, 0, 1]
    assert [name for name, _ in found.memories] == ["a", "c"]


def test_what_forward_let_go_is_dropped_for_nothing() -> None:
    found = FoundValues()
    trace = MemoryTrace(torch.device("cpu"))
    with trace:
        tensor = torch.ones(4)
    source = Value("source", "relu")
    value = Value("dead", "exp")
    value.keep(tensor)
    value.learn(None, (source,))
    found.saved["dead"] = 5
    found.dead.append(DeadValue(value, trace.allocation_of(tensor.untyped_storage()), ""))
    found.add_dead({source: 2})
    (dead,) = found.values
    assert (dead.name, dead.num_bytes, dead.inputs, dead.seconds, dead.saved) == ("dead", 16, (2,), 0.0, 5)
    assert dead.refused == "it does not come from the graph"


def test_what_forward_let_go_depends_on_what_was_saved_before_it() -> None:
    """A call that is replayed may be one of those that have saved it."""
    found = FoundValues()
    trace = MemoryTrace(torch.device("cpu"))
    with trace:
        tensor = torch.ones(4)
    source, on_the_way, value = Value("source", "relu"), Value("", "add"), Value("dead", "exp")
    value.keep(tensor)
    on_the_way.learn(None, (source,))
    value.learn(None, (on_the_way,))
    found.saved["dead"] = 5
    found.dead.append(DeadValue(value, trace.allocation_of(tensor.untyped_storage()), ""))
    found.add_dead({source: 2})
    assert found.values[0].inputs == (2,)


class Cube(torch.autograd.Function):
    """Has no recipe, so only a call of its module gives it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 3 * x * x


class Cubes(nn.Module):
    """Calls a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.layer(x))  # type: ignore[no-any-return]


class LooksOnce(nn.Module):
    """Saves what its part gives for something that leads to no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Cubes(), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        y.exp().mul(y)
        del y
        head: Tensor = self.head(x)
        return head.tanh().sum()


def test_no_call_is_made_again_for_what_forward_let_go() -> None:
    """A plan that dropped it would not name the call: it was kept then, and took more than was said."""
    profile = profile_module(LooksOnce(), torch.randn(64, 64))
    refused = {value.operator: value.refused for value in profile.values if "Cube" in value.operator}
    assert refused["CubeBackward"].startswith("it goes in the forward")


def test_where_nothing_is_offloaded_what_only_that_could_drop_is_refused() -> None:
    found = FoundValues()
    offloaded = SavedValue("a", "exp", 16, 0, (), 0.1, "", offloaded=True, copying=0.1)
    remade = SavedValue("b", "exp", 16, 0, (), 0.1, "", copying=0.1)
    found.values = [offloaded, remade]
    found.offload_nothing()
    assert [value.copying for value in found.values] == [0.0, 0.0]
    assert "offloads nothing" in found.values[0].refused
    assert found.values[1].refused == ""
