"""Kinds of models that are in no library's zoo: predicted by the allocator's account, and nothing kept in silence."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.activations import Inputs
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import MemoryTrace, forecast_plan, plan_profile, profile_module
from lightning_dpx.memory.module_step import run_to_loss
from tests.memory.models import Swing
from tests.memory.steps import DropsEverything, train


def measured(module: nn.Module, x: Tensor) -> int:
    """Bytes of a step at the most, by the allocator's account."""
    module.zero_grad(set_to_none=True)
    return peak_of_passing(lambda: run_to_loss(module, Inputs((x,), {}))().backward())


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda h: (h * 2).sum() + (h * 3).sum(),
    "a view comes first": lambda h: (h * 2).sum() + (h.view(-1) * 3).sum(),
    "a view comes second": lambda h: (h.view(-1) * 2).sum() + (h * 3).sum(),
    "two views": lambda h: (h.view(-1) * 2).sum() + (h.view(-1) * 3).sum(),
    "three": lambda h: (h * 2).sum() + (h.view(-1) * 3).sum() + (h * 4).sum(),
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_summed_where_autograd_does(name: str) -> None:
    """In place of the one that came first, unless that is a view."""
    x = torch.randn(64, 64, requires_grad=True)
    trace = MemoryTrace(torch.device("cpu"))
    with trace:
        SUMS[name](x * 1).backward()
    x.grad = None
    expected = peak_of_passing(lambda: SUMS[name](x * 1).backward())
    assert trace.peak_of_passing() == pytest.approx(expected, abs=64)


class Discriminator(nn.Module):
    """With spectral norm as a hook, which sets its weight anew in every call; three calls in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.utils.spectral_norm(nn.Linear(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x.tanh()) + self.layer(x.sin()) + self.layer(x)


def test_what_a_call_has_replaced_is_not_held_by_the_profile() -> None:
    torch.manual_seed(0)
    module, x = Discriminator(), torch.randn(64, 256)
    module(x).sum().backward()  # what libraries make in their first step is there
    module.zero_grad(set_to_none=True)
    assert profile_module(module, x).peak == pytest.approx(measured(module, x), rel=0.01)


class NoRecipe(nn.Module):
    """Its result can only be had by calling it again."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Swing.apply(x, 2.0)
        return out


class Attentive(nn.Module):
    """What it makes first is saved last, after the pieces that are made from it."""

    def __init__(self, memory: nn.Module) -> None:
        super().__init__()
        self.first, self.memory = nn.Linear(64, 64), memory
        self.score, self.out = nn.Linear(96, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.memory(self.first(x))
        h = h if isinstance(h, Tensor) else h[0]
        weights = self.score(torch.cat([h, x[..., :32]], -1)).tanh()
        return self.out(weights * h)


@pytest.mark.parametrize("memory", [NoRecipe, lambda: nn.GRU(64, 64, batch_first=True)], ids=["function", "recurrent"])
def test_what_is_dropped_before_its_source_is_saved_is_dropped(memory: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, x = Attentive(memory()), torch.randn(16, 8, 64)
    plan = dpx.search_plan(module, x, planner=DropsEverything())
    joined = {d.name for d in plan.decisions if d.operator == "CatBackward0" and d.module == "score"}
    assert len(joined) == 1
    plan = plan.with_actions(dict.fromkeys(plan.dropped - joined, "keep"))
    plain = copy.deepcopy(module)
    applied = dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, x), train(plain, x)))
    assert not applied.not_found


def test_a_call_is_repeated_on_arguments_that_lie_as_they_did() -> None:
    """An embedding bag makes one row of its indices, which is a copy unless they lie in one."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(50, 64, mode="max"), nn.Linear(64, 8)

        def forward(self, indices: Tensor) -> Tensor:
            return self.out(torch.stack([self.bag(indices[:, k]) for k in range(2)]))

    torch.manual_seed(0)
    profile = profile_module(Bags(), torch.randint(50, (256, 2, 3)))
    (stacked,) = [value for value in profile.values if value.operator == "StackBackward0"]
    assert not stacked.refused


def test_what_goes_with_the_step_itself_is_planned_as_all_else() -> None:
    """The last weight of a spectral norm is replaced by those who put the module's attributes back."""

    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return F.softplus(super().forward(x)).mean() + F.softplus(super().forward(x * 2)).mean()

    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 32, 4, 2, 1), nn.Conv2d(32, 64, 4, 2, 1)
    layers = [torch.nn.utils.spectral_norm(layer) for layer in (first, second, nn.Linear(1024, 1))]
    module = Twice(layers[0], nn.LeakyReLU(0.2, inplace=True), layers[1], nn.Flatten(), layers[2])
    plan = dpx.search_plan(module, torch.randn(16, 3, 16, 16))
    assert plan.peak is not None
    assert plan.peak < plan.unplanned_peak


class Depthwise(nn.Module):
    """Convolutions whose scratch is many times their size, and a norm whose result lies as its input does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.norm, self.mix = nn.LayerNorm(32), nn.Linear(32, 64)
        self.by_channel, self.up = nn.BatchNorm1d(64), nn.ConvTranspose2d(64, 3, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.deep(self.stem(x)).permute(0, 2, 3, 1)
        h = F.gelu(self.mix(self.norm(h))).flatten(1, 2)
        h = self.by_channel(h.transpose(1, 2)).transpose(1, 2) + h
        return self.up(h.transpose(1, 2).unflatten(2, (8, 8)))


def test_a_dry_plan_for_the_host_knows_what_kernels_take_and_how_results_lie() -> None:
    torch.manual_seed(0)
    module, x = Depthwise(), torch.randn(4, 3, 32, 32)
    real, dry = profile_module(module, x), profile_module(module, x, device="cpu")
    assert dry.peak == pytest.approx(real.peak, rel=1e-3)
    assert dry.basis.startswith("from fake tensors for cpu: times by FLOPs and bytes, what operators take inside tried")
    smaller = plan_profile(module, dry, int(0.7 * real.peak))
    assert smaller.peak == pytest.approx(forecast_plan(real, smaller).peak, rel=1e-3)


class Spectral(nn.Module):
    """Complex weights that are kept as real pairs, some of them frozen, as those of state space models are."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(64, 64, 2)) for _ in range(4))
        self.frozen = nn.ParameterList(nn.Parameter(torch.randn(64, 64, 2), requires_grad=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for scale, frozen in zip(self.scales, self.frozen, strict=True):
            waves = torch.fft.fft(x) * torch.view_as_complex(scale)[None]
            x = torch.tanh(torch.fft.ifft(waves * torch.view_as_complex(frozen)[None]).abs()) + x
        return x


def test_complex_views_of_parameters_are_no_values_of_a_step() -> None:
    """They would shift the names of all that comes after them."""
    torch.manual_seed(0)
    module, x = Spectral(), torch.randn(16, 64, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, budget=0.6)
    applied = dpx.apply_plan(module, plan)
    for _ in range(2):
        assert measured(module, x) <= 1.002 * 0.6 * (plan.unplanned_peak or 0)
    assert not applied.not_found
    assert all(map(torch.equal, train(module, x), train(plain, x)))


class Remembering(nn.Module):
    """Goes over a sequence by segments, beside the end of the one before, which has no gradients."""

    def __init__(self, *, changes: bool = False) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.zeros(len(x), 4, 64)
        total = torch.zeros(())
        for segment in x.chunk(6, 1):
            hidden = self.into(segment)
            hidden = hidden + hidden.tanh()
            total = total + self.out(torch.cat([memory, hidden], 1)).cos().sum()
            if self.changes:
                memory.zero_()
            memory = hidden.detach()[:, -4:]
        return total


def test_operands_outside_of_the_graph_go_in_a_profile_when_they_go_in_a_step() -> None:
    torch.manual_seed(0)
    module, x = Remembering(), torch.randn(8, 96, 64)
    profile = profile_module(module, x)
    assert profile.peak == measured(module, x)
    plan = plan_profile(module, profile, None)
    assert any(d.operator == "CatBackward0" for d in plan.decisions if d.action.startswith("recompute"))
    applied = dpx.apply_plan(module, plan)
    assert measured(module, x) == pytest.approx(plan.peak, rel=0.002)
    assert not applied.not_found


@pytest.mark.parametrize("device", [None, "cpu"], ids=["real", "fake"])
def test_operands_outside_of_the_graph_that_are_written_to_are_not_relied_on(device: str | None) -> None:
    torch.manual_seed(0)
    module, x = Remembering(changes=True), torch.randn(8, 96, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, planner=DropsEverything(), device=device)
    assert not any(d.operator == "CatBackward0" for d in plan.decisions if d.action.startswith("recompute"))
    dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, x), train(plain, x)))
