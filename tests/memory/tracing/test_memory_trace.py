"""What tensors that are made of others hold (jagged ones, and further traceable wrappers) counts as memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import profile_module
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace

OFFSETS = torch.tensor([0, 100, 400, 450, 1024])


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


class Jagged(nn.Module):
    """All of it on one jagged tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(x, OFFSETS)
        for layer in self.layers:
            jagged = jagged + layer(jagged)
        return jagged.values().sin().mean()


class JaggedWithin(Jagged):
    """Plain layers before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Sequential(_mlp(), _mlp()), nn.Sequential(_mlp(), _mlp())

    def forward(self, x: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(self.before(x), OFFSETS)
        for layer in self.layers:
            jagged = jagged + layer(jagged)
        return self.after(jagged.values()).sin().mean()


class JaggedInBlock(nn.Module):
    """A block that takes plain tensors and gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), _mlp()

    def forward(self, x: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor_from_jagged(torch.tanh(self.norm(x)), OFFSETS)
        out: Tensor = x + self.mlp(jagged).values()
        return out


class Pairs(nn.Module):
    """Another wrapper, as a parameter; of a layout with strides."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(TwoTensor(torch.randn(64, 64), torch.randn(64, 64))) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(torch.exp(0.01 * (x @ weight)))
        return x.sin().mean()


def _blocks() -> nn.Module:
    return nn.Sequential(*(JaggedInBlock() for _ in range(4)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "jagged": Jagged,
    "jagged within": JaggedWithin,
    "jagged in blocks": _blocks,
    "pairs": Pairs,
}


def _peak(module: nn.Module, x: Tensor) -> int:
    module.zero_grad()
    return peak_of_passing(lambda: module(x).sum().backward())


@pytest.mark.parametrize("name", MODULES)
def test_the_peak_is_the_measured_one(name: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(1024, 64)
    _peak(module, x)
    assert profile_module(module, x).peak == pytest.approx(_peak(module, x), rel=0.01)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
@pytest.mark.parametrize("name", MODULES)
def test_a_budget_holds_or_is_refused_with_one_that_can_be_met(name: str, share: float) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(1024, 64)
    _peak(module, x)
    budget = int(share * _peak(module, x))
    try:
        plan = dpx.search_plan(module, x, budget=budget)
    except dpx.BudgetError as error:
        budget = error.smallest or 0
        plan = dpx.search_plan(module, x, budget=budget)
    dpx.apply_plan(module, plan)
    _peak(module, x)
    assert _peak(module, x) <= 1.002 * budget


def test_what_a_tensor_of_tensors_is_made_of_is_there_until_it_goes() -> None:
    x = torch.rand(1024, 64)
    with MemoryTrace(torch.device("cpu")) as trace:
        pair = TwoTensor(x, x.clone())
        assert trace.live == x.nbytes
        twice = pair * 2
        assert trace.live == 3 * x.nbytes
        view = twice.view(-1)
        del pair
        assert trace.live == 2 * x.nbytes
        del twice, view
        assert trace.live == 0


class CheckpointsItself(nn.Module):
    """Layers that are checkpointed by hand: each keeps the state of the generator, 5 KB on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.host
def test_states_of_the_generator_that_a_step_keeps_are_counted() -> None:
    torch.manual_seed(0)
    module, x = CheckpointsItself(), torch.randn(128, 16)
    get = torch.get_rng_state
    profile = profile_module(module, x)
    assert torch.get_rng_state is get
    module.zero_grad(set_to_none=True)
    measured = peak_of_passing(lambda: module(x).sum().backward())
    assert measured > 12 * (5056 + x.nbytes)
    assert profile.peak == pytest.approx(measured, rel=0.005)


@pytest.mark.host
@pytest.mark.parametrize(("rows", "size"), [(1, 24), (4, 12), (2, 24)])
def test_a_gradient_of_an_input_as_large_as_that_of_a_weight_is_not_taken_for_it(rows: int, size: int) -> None:
    """Two of the three inputs have the bytes of a weight; the third is another size."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)))
    x = torch.randn(rows, 64, size, size)
    module(x).sum().backward()
    module.zero_grad(set_to_none=True)
    profile = profile_module(module, x)
    measured = peak_of_passing(lambda: module(x).sum().backward())
    assert profile.peak == pytest.approx(measured, rel=0.001)


def test_torch_wraps_no_call_of_a_trace() -> None:
    """It would for the compiler's sake, of every operator, which took a tenth of the time."""
    assert Path(MemoryTrace.__torch_dispatch__.__code__.co_filename).name == "memory_trace.py"
