"""One of two processes that shard a model with ``fully_shard`` and plan its steps; prints what it found as JSON."""

import json
import sys
import warnings
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(**options: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def wrapped(**options: Any) -> FullyShardedDataParallel:
    """The same, by FSDP1."""
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of it is here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Steps:
    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model = model
        self.x = x

    def run(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(self.x).square().mean().backward()

    def gradients(self) -> list[torch.Tensor]:
        self.run()
        # Of FSDP1 some processes have nothing of a parameter, and no gradient.
        return [own_part(one.grad).clone() for one in self.model.parameters() if one.grad is not None]

    def peak(self) -> int:
        self.run()
        self.model.zero_grad(set_to_none=True)
        return peak_of_passing(lambda: self.model(self.x).square().mean().backward())

    def collectives(self) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as record:
            self.run()
        return [event.name for event in record.events() if event.name.startswith("c10d::")]


def planned(steps: Steps, budget: float | None) -> dict[str, Any]:
    plan = dpx.search_plan(steps.model, steps.x, budget=budget)
    return followed(steps, plan, dpx.estimate_cost(steps.model, plan, steps.x)["peak"])


def followed(steps: Steps, plan: dpx.MemoryPlan, predicted: float) -> dict[str, Any]:
    before = steps.gradients()
    collectives = steps.collectives()
    dpx.apply_plan(steps.model, plan)
    steps.run()
    found = {
        "dropped": sorted(plan.dropped | plan.replayed),
        "predicted": predicted,
        "peak": steps.peak(),
        "same": all(map(torch.equal, steps.gradients(), before)),
        "same_collectives": steps.collectives() == collectives != [],
    }
    dpx.remove_plan(steps.model)
    return found


def main(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    steps = Steps(sharded(), torch.randn(4096, WIDTH))
    found: dict[str, Any] = {"peak": steps.peak()}
    everything = dpx.search_plan(steps.model, steps.x, budget=1.0)
    found["predicted"] = dpx.estimate_cost(steps.model, everything, steps.x)["peak"]
    for budget in (0.7, 0.5, None):
        found[str(budget)] = planned(steps, budget)
    # FSDP1: the plan of one is that of the other, whatever their parameters look like.
    kept = Steps(wrapped(use_orig_params=True), steps.x)
    plan = dpx.search_plan(kept.model, steps.x, budget=0.5)
    found["wrapped True"] = followed(kept, plan, plan.peak)
    found["wrapped False"] = followed(Steps(wrapped(use_orig_params=False), steps.x), plan, plan.peak)
    try:
        dpx.search_plan(steps.model, steps.x, budget=1024)
    except dpx.BudgetError as error:
        found["refusal"] = str(error)
        found["smallest"] = error.smallest
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
