"""Planning runs steps of the user's module, and leaves everything as it was."""

import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.python_objects.object_state import ObjectState
from lightning_dpx.python_objects.untouched import BeforeWrites, untouched
from tests.conftest import make_loader, make_trainer

RANDOM = np.random.default_rng(3)


class Busy(nn.Module):
    """Writes to everything that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(32, 64, max_norm=0.1), nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.free = nn.Parameter(torch.ones(4))
        self.outside = [nn.BatchNorm1d(64)]
        self.generators = [torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)]
        self.steps, self.seen, self.table_of, self.average = 0, list[int](), np.zeros(3), torch.zeros(64)
        self.queue, self.cache = deque([1, 2, 3]), {"rows": [1]}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x + self.table(torch.arange(len(x)) % 32)))
        with torch.no_grad():
            self.free.data.mul_(2)
            self.average.add_(1)
        self.steps += 1
        self.seen.append(self.steps)
        self.table_of += 1
        self.queue.rotate()
        self.cache["rows"].append(2)
        self.cache["new"] = [3]
        self.fresh = self.steps
        self.average_now = self.average * 2
        drawn = [random.random(), np.random.rand(), RANDOM.random(), self.generators[1].random()]
        drawn += [self.generators[2].random(), float(torch.rand(1)), float(torch.rand(1, generator=self.generators[0]))]
        return torch.sigmoid(self.outside[0](x) * sum(drawn) * self.free.sum())


def _everything(module: Busy) -> list[Any]:
    own, norm = module.generators, module.outside[0]
    tensors = [*module.state_dict().values(), *norm.state_dict().values(), module.average, torch.get_rng_state()]
    gradients = [parameter.grad for parameter in module.parameters()]
    states = [own[0].get_state().tolist(), own[1].bit_generator.state, own[2].getstate(), RANDOM.bit_generator.state]
    states += [random.getstate(), str(np.random.get_state()), module.table_of.tolist(), list(module.queue)]
    held = [module.steps, list(module.seen), repr(module.cache), hasattr(module, "fresh")]
    return [*(tensor.tolist() for tensor in tensors), gradients, *states, *held, sorted(vars(module))]


RUNS: dict[str, Callable[[Busy, Tensor], Any]] = {
    "search_plan": dpx.search_plan,
    "search_plan for another device": partial(dpx.search_plan, device="cuda"),
    "trace_activations": dpx.trace_activations,
    "estimate_cost": lambda module, x: dpx.estimate_cost(module, dpx.search_plan(module, x), x),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore:Fake tensors cannot run this step:UserWarning")
def test_a_run_of_the_planner_leaves_no_trace(name: str) -> None:
    torch.manual_seed(0)
    module, x = Busy(), torch.rand(64, 64)
    before, objects = _everything(module), [module.seen, module.cache, module.queue, module.table_of, module.average]
    RUNS[name](module, x)
    assert _everything(module) == before
    now = [module.seen, module.cache, module.queue, module.table_of, module.average]
    assert all(one is other for one, other in zip(now, objects, strict=True))


def test_a_lazy_module_stays_what_the_first_run_made_of_it() -> None:
    module = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(64))
    plan = dpx.search_plan(module, torch.rand(64, 64))
    assert isinstance(module[0], nn.Linear)
    assert module[0].in_features == 64
    dpx.apply_plan(module, plan)
    module(torch.rand(64, 64)).sum().backward()
    assert module[0].weight.grad is not None


def test_only_what_is_written_to_is_copied() -> None:
    """A large model has no room for a second one."""
    module = nn.Sequential(nn.Embedding(8, 4, max_norm=0.1), nn.Linear(4, 4))
    with untouched(module) as writes, BeforeWrites(writes):
        module(torch.arange(8)).sum().backward()
        assert writes.num_bytes == module[0].weight.nbytes


def test_iterators_stay_where_they_are() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.number = next(self.counter)
            return super().forward(x)

    module = Counts(64, 64)
    module.counter = itertools.count()
    dpx.search_plan(module, torch.rand(64, 64))
    assert not hasattr(module, "number")
    assert next(module.counter) >= 4, "a count cannot be put back: at least two steps are timed, two are watched"


class KeepsTrainer(LightningModule):
    """Holds on to what leads to the trainer and all that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.found: list[str] = []

    def on_train_start(self) -> None:
        self.kept = [self.trainer, self.trainer.strategy]

    def on_train_batch_start(self, *_: Any) -> None:
        state = ObjectState(list(self.modules()), follow_code=False)
        self.found += state.paths

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_runs_the_step_is_not_walked() -> None:
    module = KeepsTrainer()
    trainer = make_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, make_loader())
    assert any("KeepsTrainer" in path for path in module.found)
    assert not [path for path in module.found if path.startswith("KeepsTrainer.kept.")]
