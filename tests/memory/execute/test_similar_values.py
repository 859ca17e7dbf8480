"""Steps that differ from the planned one: layers that it skipped, more rows for one expert than it had."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import MemoryPlan
from lightning_dpx.memory.apply import applied_plan
from tests.conftest import SIMULATED
from tests.memory.steps import DropsEverything

WIDTH, ROWS = 64, 512
TOLD = "it is another step than the planned one, or a larger one"

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)  # the host's allocator is asked


class Block(nn.Module):
    """What a layer of a transformer does, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + down


class Chain(nn.Module):
    """Six blocks, each of which sees so many of the rows; one that would see none is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.rows = [ROWS] * 6

    def forward(self, x: Tensor) -> Tensor:
        for block, rows in zip(self.blocks, self.rows, strict=True):
            if rows:
                x = torch.cat([block(x[:rows]), x[rows:]])
        return x


def step(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    module.zero_grad(set_to_none=True)
    loss = module(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters())]


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    for one, other in zip(ours, theirs, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
        elif not torch.equal(one, other):
            return False
    return True


def are_the_same_steps(count: int, module: nn.Module, plain: nn.Module, x: Tensor) -> bool:
    return all(same(step(module, x), step(plain, x)) for _ in range(count))


def make(rows: list[int], budget: float) -> tuple[Chain, Chain, Tensor, MemoryPlan]:
    """A module, a plain copy, a batch, and the plan for a step with these rows."""
    torch.manual_seed(0)
    module, x = Chain(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(module)
    module.rows = rows
    return module, plain, x, dpx.search_plan(module, x, budget=budget, planner="optimal", progress=False)


def test_layers_that_the_planned_step_skipped_are_treated_like_those_that_it_had() -> None:
    module, plain, x, plan = make([ROWS, 0, ROWS, 0, 0, ROWS], 0.45)
    dpx.apply_plan(module, plan)
    module.rows = [ROWS] * 6
    found = list[list[Tensor | None]]()
    with pytest.warns(UserWarning, match=TOLD):
        peak = peak_of_passing(lambda: found.append(step(module, x)))
    assert same(found[0], step(plain, x))
    unplanned = peak_of_passing(lambda: step(plain, x))
    assert plan.budget is not None
    assert unplanned > 3.5 * plan.budget
    assert peak < 2 * plan.budget


def test_layers_that_are_called_for_the_first_time_in_a_routine_are_dropped_as_well() -> None:
    module, plain, x, plan = make([ROWS, 0, ROWS, 0, 0, ROWS], 0.45)
    dpx.apply_plan(module, plan)
    for _ in range(3):  # nothing is told of steps that are as planned
        step(module, x)
    module.rows = [ROWS] * 6
    with pytest.warns(UserWarning, match=TOLD):
        assert are_the_same_steps(2, module, plain, x)
    assert peak_of_passing(lambda: step(module, x)) < peak_of_passing(lambda: step(plain, x)) / 2


def test_more_rows_than_in_the_planned_step_are_noticed_in_a_routine() -> None:
    module, plain, x, plan = make([ROWS // 8] * 5 + [ROWS], 0.6)
    dpx.apply_plan(module, plan)
    for _ in range(2):
        step(module, x)
    module.rows = plain.rows = [ROWS] * 6
    with pytest.warns(UserWarning, match=TOLD):
        assert are_the_same_steps(3, module, plain, x)
    assert peak_of_passing(lambda: step(module, x)) < peak_of_passing(lambda: step(plain, x)) / 2


def test_a_smaller_step_is_not_told_of() -> None:
    module, plain, x, plan = make([ROWS] * 6, 0.6)
    dpx.apply_plan(module, plan)
    for rows in ([ROWS] * 6, [ROWS, 0] * 3, [ROWS // 2] * 6, [ROWS] * 6, [0, ROWS] * 3):
        module.rows = plain.rows = rows
        assert same(step(module, x), step(plain, x))


def test_calls_of_modules_of_the_class_of_a_replayed_one_are_replayed() -> None:
    module, plain, x, plan = make([ROWS, 0, ROWS, 0, 0, ROWS], 1.0)
    calls = [replace(plan.decisions[0], name=f"blocks.{index}", action="replay", calls=()) for index in (0, 2)]
    others = [d for d in plan.decisions if not d.name.startswith(("blocks.0", "blocks.2"))]
    dpx.apply_plan(module, replace(plan, decisions=(*calls, *others)))
    module.rows = [ROWS] * 6
    found = list[list[Tensor | None]]()
    peak = peak_of_passing(lambda: found.append(step(module, x)))
    assert same(found[0], step(plain, x))
    assert peak < peak_of_passing(lambda: step(plain, x)) / 2
    applied = applied_plan(module)
    assert applied is not None
    assert not applied.not_found


class Adapted(nn.Module):
    """Layers whose weights are frozen, each with a small one beside it that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.tanh(frozen(x) + up(down(x)))
        return x


def plain_layers() -> nn.Module:
    parts = list[nn.Module]()
    for _ in range(6):
        parts += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*parts)


@pytest.mark.parametrize("make_module", [plain_layers, Adapted])
@pytest.mark.parametrize("is_made", [False, True])
def test_a_step_as_planned_is_not_taken_for_a_larger_one_by_what_was_there_before(
    make_module: Callable[[], nn.Module], is_made: bool
) -> None:
    """Inputs, whether they come from a graph or not, and frozen weights are no memory of the step."""
    torch.manual_seed(0)
    module, x = make_module(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(module)
    loose = dpx.search_plan(module, x, budget=0.7, progress=False)
    assert loose.peak is not None
    plan = dpx.search_plan(module, x, budget=loose.peak, progress=False)  # there is no room left
    dpx.apply_plan(module, plan)
    for _ in range(3):
        given = x * torch.ones((), requires_grad=True) if is_made else x
        assert same(step(module, given), step(plain, x))
    module.zero_grad(set_to_none=True)
    # Not in a graph: the gradient of the input would count.
    assert peak_of_passing(lambda: module(x).sum().backward()) <= 1.002 * loose.peak


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_layers_that_were_called_in_turns_are_told_of_when_all_are_called_together(budget: float) -> None:
    """Also with a plan that drops nothing, and where each of them is nothing new."""
    module, plain, x, plan = make([ROWS, ROWS, ROWS, 0, 0, 0], budget)
    assert plan.keeps_all == (budget == 1.0)
    dpx.apply_plan(module, plan)
    for number in range(10):
        module.rows = plain.rows = [ROWS, ROWS, ROWS, 0, 0, 0] if number % 2 else [0, 0, 0, ROWS, ROWS, ROWS]
        assert same(step(module, x), step(plain, x))
    module.rows = plain.rows = [ROWS] * 6
    with pytest.warns(UserWarning, match=TOLD):
        assert are_the_same_steps(2, module, plain, x)


def test_a_plan_that_drops_nothing_tells_of_more_rows_whenever_they_come() -> None:
    module, plain, x, plan = make([ROWS] * 6, 1.0)
    assert plan.keeps_all
    dpx.apply_plan(module, plan)
    for rows in (ROWS, ROWS // 2, ROWS, ROWS // 4, ROWS):
        assert same(step(module, x[:rows]), step(plain, x[:rows]))
    module.rows = plain.rows = [2 * ROWS] * 6
    with pytest.warns(UserWarning, match=TOLD):
        assert same(step(module, x.repeat(2, 1)), step(plain, x.repeat(2, 1)))


def test_a_plan_that_only_replays_calls_tells_of_more_rows_as_well() -> None:
    module, plain, x, plan = make([ROWS] * 6, 1.0)
    calls = [replace(plan.decisions[0], name=f"blocks.{index}", action="replay", calls=()) for index in range(2)]
    others = [d for d in plan.decisions if not d.name.startswith(("blocks.0", "blocks.1"))]
    dpx.apply_plan(module, replace(plan, decisions=(*calls, *others)))
    for rows in (ROWS, ROWS // 2, ROWS):  # nothing is told of steps that are as planned
        assert same(step(module, x[:rows]), step(plain, x[:rows]))
    module.rows = plain.rows = [4 * ROWS] * 6
    with pytest.warns(UserWarning, match=TOLD):
        assert same(step(module, x.repeat(4, 1)), step(plain, x.repeat(4, 1)))


class Packed(nn.Module):
    """A recurrent net over sequences of different lengths, whose contents decide which operator saves which value."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 48)
        self.net = nn.GRU(48, 48, 2, batch_first=True, dropout=0.2)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows, lengths = batch
        parts = [self.embedding(row[:length]) for row, length in zip(rows, lengths.tolist(), strict=True)]
        out: Tensor = self.net(nn.utils.rnn.pack_sequence(parts, enforce_sorted=False))[0].data
        return out


def test_a_value_that_another_operator_makes_than_the_planned_one_is_kept() -> None:
    torch.manual_seed(0)
    module = Packed()
    plain = copy.deepcopy(module)
    batches = [(torch.randint(100, (32, 32)), torch.randint(8, 33, (32,))) for _ in range(12)]
    plan = dpx.search_plan(module, batches[0], planner=DropsEverything(), progress=False)
    dpx.apply_plan(module, plan)
    for seed, batch in enumerate(batches):
        found = []
        for one in (module, plain):
            one.zero_grad(set_to_none=True)
            torch.manual_seed(seed)
            one(batch).square().mean().backward()
            found.append([parameter.grad for parameter in one.parameters()])
        assert same(*found)
