"""Predictions of compiled steps are those of the compiled code, and not of its operators one by one."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import lightning_dpx as dpx
from lightning_dpx.memory.execute.recompiled_parts import RecompiledParts
from lightning_dpx.memory.profile.compiled_code import most_without
from lightning_dpx.memory.profile.profiler import profile_step
from lightning_dpx.memory.tracing.allocator_account import OperatorMemory
from tests.conftest import COMPILES
from tests.memory.execute.test_compiled_calls import CHEAP, Model, peak

pytestmark = COMPILES


@pytest.mark.parametrize("form", ["in place", "wrapped"])
def test_the_peak_of_a_compiled_step_is_predicted_with_and_without_a_plan(form: str) -> None:
    torch.manual_seed(0)
    model, x = Model(form), torch.randn(1024, 64)
    model(x).sum().backward()
    model.zero_grad()
    everything = dpx.search_plan(model, x, budget=1.0)
    assert dpx.estimate_cost(model, everything, x)["peak"] == pytest.approx(peak(model, x), rel=0.05)
    plan = dpx.search_plan(model, x, budget=0.8)
    predicted = dpx.estimate_cost(model, plan, x)["peak"]
    dpx.apply_plan(model, plan)
    peak(model, x)
    assert peak(model, x) == pytest.approx(predicted, rel=0.05)
    dpx.remove_plan(model)


def test_first_gradients_of_parameters_are_no_activations() -> None:
    taken = OperatorMemory(70, [40, 10, -10, 20, 10])
    assert most_without(taken, []) == 70
    assert most_without(taken, [40]) == 30
    assert most_without(taken, [10, 99]) == 60


def test_what_compiled_code_saves_too_is_not_dropped_elsewhere() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Sigmoid(), Model("wrapped"))
    x = torch.randn(256, 64)
    model(x)
    profile = profile_step(model, lambda: model(x).sum(), torch.device("cpu"))
    refused = {value.name: value.refused for value in profile.values}
    assert refused["1:1"] == "", "the input of the GELU is nothing to compiled code"
    assert refused["2:1"] == "compiled code saves it, too", "it is the input of the first block"


class Activation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x) * torch.tanh(x)


@torch.compile(backend=CHEAP)
def activation(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x) * torch.tanh(x)


class CallsByName(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return activation(x)


def compiled_activation(form: str) -> nn.Module:
    if form == "by name":
        return CallsByName()
    if form == "wrapped":
        return torch.compile(Activation(), backend=CHEAP)
    module = Activation()
    module.compile(backend=CHEAP)
    return module


@pytest.mark.parametrize("budget", [0.9, 0.8, 0.65])
@pytest.mark.parametrize("form", ["by name", "in place", "wrapped"])
def test_what_compiled_code_gives_to_others_is_not_counted_on_to_be_made_operator_by_operator(
    form: str, budget: float
) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), compiled_activation(form), nn.Linear(256, 64)) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(1024, 64)
    peak(model, x)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    plan = dpx.search_plan(model, x, budget=int(budget * peak(model, x)))
    dpx.apply_plan(model, plan)
    peak(model, x)
    assert peak(model, x) <= 1.02 * plan.peak
    again = [parameter.grad for parameter in model.parameters()]
    assert_close(again, gradients, atol=0, rtol=0)
    dpx.remove_plan(model)


@torch.compile(backend=CHEAP)
def loss_by_name(outputs: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(outputs, 1).mean()


class WithLoss(nn.Module):
    """Submodules, operators of its own, and a compiled function beside them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(64, 512)
        if form == "attribute":
            self.compute_loss = torch.compile(lambda outputs: torch.logsumexp(outputs, 1).mean(), backend=CHEAP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(x + layer(x))
        return self.compute_loss(self.head(x))


class ByName(WithLoss):
    def compute_loss(self, outputs: torch.Tensor) -> torch.Tensor:
        return loss_by_name(outputs)


class Inside(WithLoss):
    @torch.compile(backend=CHEAP)
    def compute_loss(self, outputs: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(outputs, 1).mean()


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ByName("by name")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def with_loss(form: str) -> nn.Module:
    torch.manual_seed(0)
    if form == "nested":
        return Whole()
    return {"attribute": WithLoss, "by name": ByName, "decorated": Inside}[form](form)


@pytest.mark.parametrize("form", ["attribute", "by name", "decorated", "nested"])
def test_what_runs_beside_a_compiled_function_is_planned_and_keeps_its_budget(form: str) -> None:
    model, x = with_loss(form), torch.randn(1024, 64)
    peak(model, x)
    without = peak(model, x)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for share in (0.8, 0.6):
        plan = dpx.search_plan(model, x, budget=int(share * without))
        dpx.apply_plan(model, plan)
        peak(model, x)
        assert peak(model, x) <= 1.01 * share * without
        assert_close([parameter.grad for parameter in model.parameters()], gradients, atol=0, rtol=0)
        dpx.remove_plan(model)
        model.zero_grad()


class CallsParts(WithLoss):
    def compute_loss(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_of_it(x)

    @torch.compile(backend=CHEAP, fullgraph=True)
    def all_of_it(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)).mean()


def test_a_compiled_function_that_calls_submodules_is_one_code_with_them() -> None:
    model, x = CallsParts("parts"), torch.randn(256, 64)
    profile = profile_step(model, lambda: model(x).sum(), torch.device("cpu"))
    assert not profile.values
    assert [code.name for code in profile.codes] == [""]


class Fusing(WithLoss):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(x + activation(layer(x)))
        return self.head(x)


def test_what_a_compiled_function_saves_is_counted_by_its_own_bytes() -> None:
    torch.manual_seed(0)
    model, x = Fusing("beside"), torch.randn(2048, 64)
    peak(model, x)
    without = peak(model, x)
    assert dpx.search_plan(model, x, budget=1.0).peak == pytest.approx(without, rel=0.01)


def test_a_function_that_is_compiled_where_it_is_defined_stays_so() -> None:
    layers = [nn.Sequential(nn.Linear(64, 256), CallsByName(), nn.Linear(256, 64)) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(1024, 64)
    model(x).sum().backward()
    dpx.apply_plan(model, dpx.search_plan(model, x, budget=0.8))
    model(x).sum().backward()
    dpx.remove_plan(model)
    node = CallsByName()(torch.ones(1024, 256, requires_grad=True)).grad_fn
    assert node is not None
    assert node.name() == "CompiledFunctionBackward"


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.two(torch.tanh(nn.functional.dropout(self.one(x)))), 0.3)


def test_no_share_is_offered_with_which_random_numbers_are_drawn_anew() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Dropping(), Dropping()), torch.randn(512, 64)
    for part in model:
        part.compile(backend=CHEAP)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(x).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    model.zero_grad()
    profile = profile_step(model, lambda: model(x).sum(), torch.device("cpu"))
    for share in {run.share for call in profile.codes for run in call.runs if run.share < 1}:
        code = RecompiledParts(model, dict.fromkeys(("0", "1"), share))
        assert all(map(torch.allclose, gradients(), expected))
        code.remove()
    code = RecompiledParts(model, dict.fromkeys(("0", "1"), 0.0))
    assert not all(map(torch.allclose, gradients(), expected)), (
        "torch recomputes dropout right: nothing need be refused"
    )
    code.remove()
    assert all(run.share for call in profile.codes for run in call.runs), "that share must not be there"
