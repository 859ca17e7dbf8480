"""Plans beside others that handle saved tensors: checkpointed regions, offloading, and inputs that look like masks."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
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
