"""Where fake tensors cannot run a step, a part of its rows is run for real, which is said aloud; or it is refused."""

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.memory import profile_module
from tests.memory.models import AWKWARD
from tests.memory.plan.test_planning import measured_peak
from tests.memory.steps import train


@torch.library.custom_op("dpx_tests::without_a_rule", mutates_args=())
def without_a_rule(x: Tensor) -> Tensor:
    return x * 2


def scaled_by_its_mean(x: Tensor) -> Tensor:
    return x * float(x.mean().item())


def branching(x: Tensor) -> Tensor:
    return x.sin() if x.sum() > 1e9 else x.cos()


class Deep(nn.Module):
    """Rows (B, 64) through six layers; ``odd`` runs in the middle."""

    def __init__(self, odd: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3)) for _ in range(6))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 2:
                x = x + self.odd(x.detach())
        return x


ODD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "item": (scaled_by_its_mean, r"DataDependentOutputException: .*_local_scalar_dense.*, at .*test_abstract.py:\d+"),
    "branch": (branching, "aten._local_scalar_dense.default, at "),
    "numpy": (lambda x: torch.from_numpy(x.numpy() * 2), "numpy"),
    "no rule": (lambda x: without_a_rule(x), "dpx_tests::without_a_rule"),
    "list": (lambda x: x * x[0].tolist()[0], "_local_scalar_dense"),
    "array": (lambda x: torch.from_numpy(np.asarray(x)), "numpy"),
    "shape by data": (lambda x: x[x[:, 0] < 1e9][:1], "aten.nonzero.default"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_part_of_the_rows_is_run_and_scaled_with_a_warning(name: str) -> None:
    torch.manual_seed(0)
    odd, said = ODD[name]
    module, x = Deep(odd), torch.randn(1024, 64)
    plain, random = copy.deepcopy(module), torch.get_rng_state()
    with pytest.warns(UserWarning, match=said) as told:
        plan = dpx.search_plan(module, x, budget=0.5, device="cpu")
    assert "a real one runs on few rows of the batch, and what it takes is scaled to all of its rows" in str(
        told[0].message
    )
    assert plan.basis == "from real steps on 128 and 256 of 1024 rows, scaled, for cpu: times by FLOPs and bytes"
    assert torch.equal(torch.get_rng_state(), random)
    assert plan.unplanned_peak == pytest.approx(measured_peak(module, x), rel=0.02)
    dpx.apply_plan(module, plan)
    assert measured_peak(module, x) == pytest.approx(plan.peak, rel=0.05)
    assert all(map(torch.equal, train(module, x), train(plain, x)))


@pytest.mark.parametrize("name", ["data-dependent", "hooks", "recurrent layers"])
def test_awkward_models_fall_back(name: str) -> None:
    torch.manual_seed(0)
    module, x = AWKWARD[name]()
    with pytest.warns(UserWarning, match="Fake tensors cannot run this step of "):
        profile = profile_module(module, x, device="cuda")
    assert "scaled, for cuda" in profile.basis
    assert not any(value.compact for value in profile.values), "a GPU offloads instead"


def test_few_rows_are_run_as_they_are() -> None:
    with pytest.warns(UserWarning, match="scaled to all of its rows"):
        profile = profile_module(Deep(scaled_by_its_mean), torch.randn(4, 64), device="cuda")
    assert profile.basis == "from a real step for cuda: times by FLOPs and bytes, what operators take inside by rule"


@pytest.mark.parametrize("where", ["module", "batch"])
def test_without_numbers_it_is_refused_and_says_what_to_do(where: str) -> None:
    module, x = Deep(scaled_by_its_mean), torch.randn(64, 64)
    module, x = (module.to("meta"), x) if where == "module" else (module, x.to("meta"))
    with pytest.raises(
        dpx.PlanError, match=r"(?s)_local_scalar_dense.*real ones are not there.*Take what needs numbers"
    ):
        dpx.search_plan(module, x, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device must be absent")
def test_a_device_by_name_is_refused_before_autograd_sees_it() -> None:
    """A fake tensor there that requires grad would end the process."""
    module = Deep(lambda x: torch.zeros(64, device="cuda", requires_grad=True)).to("meta")
    with pytest.raises(dpx.PlanError, match=r"makes a tensor on cuda:0; write device=x.device, or self.device"):
        dpx.search_plan(module, torch.empty(64, 64), device="cuda")


def test_a_sparse_parameter_has_no_fake() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Parameter(torch.eye(64).to_sparse()), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(torch.sparse.mm(self.table, x.T).T.relu())
            return out

    with pytest.warns(UserWarning, match="there is no fake of a Parameter with layout torch.sparse_coo"):
        assert dpx.search_plan(Sparse(), torch.randn(512, 64), device="cpu").unplanned_peak


def test_a_scripted_part_takes_no_fakes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(64, 64))
    module = nn.Sequential(scripted, nn.GELU(), nn.Linear(64, 64))
    with pytest.warns(UserWarning, match="a ScriptModule takes no fake tensors"):
        assert dpx.search_plan(module, torch.randn(512, 64), device="cpu").unplanned_peak


def test_a_mistake_of_the_step_is_its_own() -> None:
    with pytest.raises(dpx.PlanError, match="nothing to plan"):
        dpx.search_plan(nn.Identity(), torch.ones(64, 64), device="cuda")
    with pytest.warns(UserWarning, match="Fake tensors cannot"), pytest.raises(RuntimeError, match="shapes cannot be"):
        dpx.search_plan(nn.Linear(32, 64), torch.ones(64, 64), device="cuda")


def test_what_has_no_rows_cannot_be_cut() -> None:
    class NoInput(nn.Linear):
        def forward(self, scale: Any) -> Tensor:
            return F.relu(self.weight * scale) * self.weight.sum().item()

    assert dpx.search_plan(nn.Sequential(nn.Linear(64, 64)), torch.ones(64, 64), device="cpu").basis
    with pytest.raises(dpx.ConfigurationError, match="no tensor with rows"):
        dpx.search_plan(NoInput(64, 64), 2.0, device="cpu")


def test_a_failed_fake_step_leaves_no_tensors_behind() -> None:
    module = Deep(scaled_by_its_mean)
    before = {name: id(value) for name, value in module.named_parameters()}
    fakes = {id(found) for found in gc.get_objects() if type(found).__name__ == "FakeTensor"}  # of other tests
    with pytest.warns(UserWarning, match="Fake tensors cannot"):
        dpx.search_plan(module, torch.randn(64, 64), device="cpu")
    assert {name: id(value) for name, value in module.named_parameters()} == before
    gc.collect()
    left = [found for found in gc.get_objects() if type(found).__name__ == "FakeTensor"]
    assert {id(found) for found in left} <= fakes
