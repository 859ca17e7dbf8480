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
from torch.testing._internal.two_tensor import TwoTensor

import lightning_dpx as dpx
from lightning_dpx.python_objects.leave_no_trace import BeforeWrites, untouched
from lightning_dpx.python_objects.object_state import ObjectState
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


class Swaps(nn.Module):
    """Gives its tensors other memory, as code books that follow an average do."""

    def __init__(self, smaller: bool) -> None:
        super().__init__()
        self.one, self.two, self.frozen, self.tied = (nn.Linear(64, 64) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.tied.weight = self.one.weight
        self.register_buffer("average", torch.rand(64))
        self.held, self.size = torch.rand(64), 32 if smaller else 64
        self.wide = nn.Parameter(torch.rand(64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.tied(torch.sigmoid(self.two(torch.tanh(self.one(x))))))
        out = torch.tanh(self.frozen(y)) * self.wide.sum() * self.average.sum() * self.held.sum()
        # Written to in place before it is swapped, and what it is swapped for after.
        self.frozen.bias.data.mul_(2)
        for tensor in (self.one.weight, self.two.bias, self.frozen.weight, self.frozen.bias):
            tensor.data = tensor.detach() * 0.9
            tensor.data.add_(0.01)
        for tensor in (self.average, self.held, self.wide):
            tensor.data = tensor[: self.size] * 0.9
        return out


def _tensors_of(module: Swaps) -> list[Tensor]:
    return [*module.parameters(), *module.buffers(), module.held]


@pytest.mark.parametrize("smaller", [False, True])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore:Fake tensors cannot run this step:UserWarning")
def test_tensors_look_at_their_own_memory_again(name: str, smaller: bool) -> None:
    torch.manual_seed(0)
    module, x = Swaps(smaller), torch.rand(64, 64)
    before = [(tensor, tensor.data_ptr(), tensor.tolist()) for tensor in _tensors_of(module)]
    RUNS[name](module, x)
    now = _tensors_of(module)
    for tensor, (same, address, numbers) in zip(now, before, strict=True):
        assert tensor is same
        assert tensor.data_ptr() == address
        assert tensor.tolist() == numbers
    assert module.tied.weight is module.one.weight
    assert all(tensor.grad is None for tensor in now)


def test_what_is_written_into_a_tensor_of_tensors_is_put_back() -> None:
    module = nn.Linear(4, 4)
    module.held = TwoTensor(torch.zeros(4), torch.zeros(4))
    with untouched(module) as writes, BeforeWrites(writes):
        module.held.add_(1)
        assert module.held.a.all()
    assert not module.held.a.any()
    assert not module.held.b.any()


def test_what_a_run_makes_of_the_types_of_its_tensors_is_put_back() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with untouched(module):
        module.to(torch.float64)
        assert module[0].weight.dtype == torch.float64
    assert {tensor.dtype for tensor in module.parameters()} == {torch.float32}
    assert module(torch.rand(2, 4)).dtype == torch.float32


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
