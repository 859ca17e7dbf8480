"""Real models within budgets: the same bits, by the account of the allocator, and beside their own checkpointing."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dpx import DPXStrategy, PlanError
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.bench.zoo import ZOO, Animal
from lightning_dpx.memory import MemoryPlan, Profile, apply_plan, plan_profile, profile_module, remove_plan, search_plan
from tests.conftest import assert_equal, make_trainer

Result = TypeVar("Result")
pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the libraries
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
_SHARES = (0.7, 0.45)
_SLACK = 1.002  # of the budget


def _budgets() -> Iterator[Any]:
    """Every model with one of the shares, in turns; the other pairs are slow."""
    for number, name in enumerate(ZOO):
        for position, share in enumerate(_SHARES):
            yield pytest.param(name, share, marks=[] if number % 2 == position else [pytest.mark.slow])


def gradients(animal: Animal, *, autocast: bool = False) -> list[Tensor]:
    """Of one step from the same random numbers."""
    animal.module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = animal.module(*animal.inputs)
    loss.backward()
    return [one.grad.clone() for one in animal.module.parameters() if one.grad is not None]


def measured(animal: Animal) -> int:
    """Bytes of a step at the most, by the allocator's own account."""
    animal.module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    return peak_of_passing(lambda: animal.module(*animal.inputs).backward())


@pytest.mark.parametrize(("name", "share"), list(_budgets()))
def test_budgets_are_kept_with_the_same_bits_or_refused_also_for_other_shapes_and_precisions(
    name: str, share: float
) -> None:
    """Other shapes and precisions follow the plan, or the tightest one that there is."""
    torch.manual_seed(0)
    animal = ZOO[name]()  # in training mode
    buffers = copy.deepcopy(dict(animal.module.named_buffers()))
    gradients(animal)  # what libraries make in their first step is there
    unplanned = measured(animal)
    _put_back(animal, buffers)
    expected = gradients(animal)
    profile = profile_module(animal.module, *animal.inputs)
    budget = int(share * unplanned)
    try:
        plan = plan_profile(animal.module, profile, budget)
    except PlanError:
        plan = _is_below_the_floor(animal, profile, budget)
    else:
        _put_back(animal, buffers)
        _under(animal, plan, lambda: _same(gradients(animal), expected))
        peak = _under(animal, plan, lambda: measured(animal))
        assert peak <= _SLACK * budget, f"{peak / budget:.3f} of a budget of {share}"
    _is_followed_elsewhere(animal, plan, buffers)


def _is_followed_elsewhere(animal: Animal, plan: MemoryPlan, buffers: dict[str, Tensor]) -> None:
    rows = max(1, len(animal.inputs[0]) // 2)
    smaller = Animal(animal.module, tuple(one[:rows] for one in animal.inputs))
    for subject, autocast in ((smaller, False), (animal, True)):
        if "edges" in buffers and subject is smaller:
            continue  # its edges are those of all nodes
        _put_back(animal, buffers)
        expected = gradients(subject, autocast=autocast)
        _put_back(animal, buffers)
        with warnings.catch_warnings():
            # Autocast keeps casts beside what the plan knows, and a step that takes more is told of.
            warnings.filterwarnings("ignore", message="dpx: a step needs about")
            _under(animal, plan, lambda s=subject, a=autocast, e=expected: _same(gradients(s, autocast=a), e))


class _Trained(LightningModule):
    """A model of the zoo, whose batches are its inputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", ["llama", "convnext", "flow"])  # of those whose rows do not depend on each other
def test_two_replicas_within_a_budget_train_as_one_device(name: str) -> None:
    torch.manual_seed(0)
    animal = ZOO[name]()
    one, two = _Trained(animal.module), _Trained(copy.deepcopy(animal.module))
    rows = len(animal.inputs[0])
    loader = DataLoader(TensorDataset(*animal.inputs), rows)
    plan = search_plan(two, [each[: rows // 2] for each in animal.inputs], budget=0.85)
    assert not plan.keeps_all
    make_trainer(max_epochs=2).fit(one, loader)
    strategy = DPXStrategy(plan=plan, execution="inline", verify="off")
    make_trainer(max_epochs=2, strategy=strategy, devices=2).fit(two, loader)
    assert_equal(two.state_dict(), one.state_dict())


def _is_below_the_floor(animal: Animal, profile: Profile, budget: int) -> MemoryPlan:
    """The plan for as little as possible takes more than what was refused."""
    plan = plan_profile(animal.module, profile, None)
    assert plan.peak is not None
    assert plan.peak > budget
    assert _under(animal, plan, lambda: measured(animal)) <= 1.01 * plan.peak
    return plan


def _under(animal: Animal, plan: Any, call: Callable[[], Result]) -> Result:
    apply_plan(animal.module, plan)
    try:
        return call()
    finally:
        remove_plan(animal.module)


def _same(given: list[Tensor], expected: list[Tensor]) -> None:
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one, other)


def _put_back(animal: Animal, buffers: dict[str, Tensor]) -> None:
    """Batch norm's statistics, which every step changes."""
    for name, buffer in animal.module.named_buffers():
        buffer.copy_(buffers[name])
