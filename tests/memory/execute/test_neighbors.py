"""Plans beside others that handle saved tensors: checkpointed regions, offloading, and inputs that look like masks."""

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from tests.conftest import SIMULATED


class Blocks(nn.Module):
    """Six blocks over rows (B, 256); every second one in a region of torch.utils.checkpoint, if asked for."""

    def __init__(self, regions: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()) for _ in range(6)
        )
        self.regions, self.runs = regions, 0

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.blocks[index](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.blocks)):
            inside = self.regions and index % 2
            x = checkpoint(self.block, index, x, use_reentrant=False) if inside else self.block(index, x)
        return x


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_plan_never_runs_a_checkpointed_region_in_forward() -> None:
    torch.manual_seed(0)
    model, x = Blocks(regions=True), torch.randn(512, 256)
    expected = gradients(model, x)
    plan = dpx.search_plan(model, x, budget=0.6)
    assert not plan.keeps_all
    dpx.apply_plan(model, plan)
    model.runs = 0
    model(x)
    assert model.runs == 6
    assert all(map(torch.equal, gradients(model, x), expected))


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_a_recipe_does_not_bring_offloaded_tensors_back() -> None:
    torch.manual_seed(0)
    sim: Any = torch.get_device_module("sim")
    model, x = Blocks(regions=False).to("sim:0"), torch.randn(512, 256, device="sim:0")
    expected = [gradient.clone() for gradient in gradients(model, x)]
    dpx.offload_activations(model, ["blocks.1", "blocks.3"], "cpu")
    everything = dpx.search_plan(model, x, budget=1.0)
    plan = everything.with_actions({decision.name: "recompute" for decision in everything.decisions})
    predicted = dpx.estimate_cost(model, plan, x)["peak"]
    dpx.apply_plan(model, plan)
    assert all(map(torch.equal, gradients(model, x), expected))
    gc.collect()
    sim.reset_peak_memory_stats(0)
    before = sim.memory_allocated(0)
    model(x).sum().backward()
    gradient = max(p.nbytes for p in model.parameters())  # until it is added to that of before; half a offloaded tensor
    assert sim.max_memory_allocated(0) - before <= 1.02 * predicted + gradient


def test_an_input_of_zeros_and_ones_is_no_mask_to_compress() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    x = (torch.rand(512, 64) > 0.5).float()
    assert dpx.search_plan(model, x, budget=0.8).dropped


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(nn.functional.gelu(self.one(x)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_parts_stay_compiled_and_right(backend: str, in_place: bool) -> None:
    """Code that meets a dispatch mode is given up by dynamo for good; code that meets hooks takes them in."""
    torch.manual_seed(0)
    model, x = Blocks(regions=False), torch.randn(64, 256)
    for index in range(1, 4):
        block = model.blocks[index] = Perceptron()
        if in_place:
            block.compile(backend=backend)
        else:
            model.blocks[index] = torch.compile(block, backend=backend)
    expected = gradients(model, x)
    plan = dpx.search_plan(model, x, budget=0.8)
    assert not plan.keeps_all
    applied = dpx.apply_plan(model, plan)
    assert all(map(torch.equal, gradients(model, x), expected))
    dpx.remove_plan(model)
    assert all(map(torch.equal, gradients(model, x), expected))
    if backend == "aot_eager":
        assert model.blocks[1](x).grad_fn.name() == "CompiledFunctionBackward"
    assert not set(applied.not_found) - plan.dropped
    torch.compiler.reset()


class Normed(nn.Module):
    """Two blocks with batch norm, each in a region of torch.utils.checkpoint, if asked for."""

    def __init__(self) -> None:
        super().__init__()
        blocks = []
        for _ in range(2):
            blocks.append(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)))
        self.blocks = nn.ModuleList(blocks)
        self.regions = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.regions else block(x)
        return x


def trained(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Gradients after each of three steps, and buffers at last."""
    torch.manual_seed(1)
    found = list[torch.Tensor]()
    for _ in range(3):
        model.zero_grad()
        run().square().mean().backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *model.buffers()]


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_planned_module_in_a_region_is_as_without_a_plan(reentrant: bool, within: bool) -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(64, 64, requires_grad=True)
    plain = copy.deepcopy(model)
    expected = trained(plain, lambda: checkpoint(plain, x, use_reentrant=reentrant))
    applied = dpx.apply_plan(model, dpx.search_plan(model, x, budget=0.6, progress=False))
    told = nullcontext() if reentrant else pytest.warns(UserWarning, match="Normed with a memory plan runs within")

    def run() -> torch.Tensor:
        with applied.active() if within else nullcontext():
            return checkpoint(model, x, use_reentrant=reentrant)

    with told:
        assert all(map(torch.equal, trained(model, run), expected))


def test_a_call_in_a_region_is_not_replayed_as_well() -> None:
    """The region would make what the replay has counted on."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(64, 64)
    plan = dpx.search_plan(model, x, budget=1.0, progress=False)
    calls = [replace(plan.decisions[0], name=f"blocks.{index}", calls=(), action="replay") for index in range(2)]
    plan = replace(plan, decisions=tuple(calls))
    model.regions = True
    plain = copy.deepcopy(model)
    expected = trained(plain, lambda: plain(x))
    dpx.apply_plan(model, plan)
    assert all(map(torch.equal, trained(model, lambda: model(x)), expected))


class OwnCall(nn.Module):
    """Is called in a way of its own, without hooks, as modules of gpytorch are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.body(x)) * scale


def test_a_module_that_is_called_without_hooks_follows_its_plan() -> None:
    torch.manual_seed(0)
    module, x = OwnCall(), torch.randn(256, 64)
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, budget=0.5)
    applied = dpx.apply_plan(module, plan)
    duplicate = copy.deepcopy(module)
    peak = peak_of_passing(lambda: module(x, scale=2.0).pow(2).mean().backward())
    assert peak <= 0.55 * (plan.unplanned_peak or 0)
    plain(x, scale=2.0).pow(2).mean().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert not applied.not_found
    # A copy runs itself, and follows no plan.
    with torch.no_grad():
        duplicate.body[0][0].bias.add_(1.0)
    assert not torch.equal(duplicate(x), plain(x))
    dpx.remove_plan(module)
    assert "forward" not in vars(module)
    assert torch.equal(module(x), plain(x))


def test_a_module_that_is_called_without_hooks_goes_with_its_plan_and_can_be_written() -> None:
    module, x = OwnCall(), torch.randn(256, 64)
    dpx.apply_plan(module, dpx.search_plan(module, x, budget=0.5))
    assert list(inspect.signature(module.forward).parameters) == ["x", "scale"]
    expected = module(x)
    duplicate = pickle.loads(pickle.dumps(module))
    assert torch.equal(duplicate(x), expected)
    plan = dpx.search_plan(duplicate, x, budget=0.5)
    dpx.apply_plan(duplicate, plan)
    assert peak_of_passing(lambda: duplicate(x).sum().backward()) <= 0.55 * (plan.unplanned_peak or 0)
    held = weakref.ref(module)
    gc.collect()
    gc.disable()
    try:
        del module
        assert held() is None, "nothing that it holds leads back to it"
    finally:
        gc.enable()


def test_a_traced_module_with_a_plan_can_be_written() -> None:
    module, x = torch.fx.symbolic_trace(OwnCall().body), torch.randn(256, 64)
    dpx.apply_plan(module, dpx.search_plan(module, x, budget=0.5))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))
