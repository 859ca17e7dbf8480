"""Steps that call more together than any planned one are seen, told of once, and planned for."""

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.conftest import assert_equal, make_trainer

MIB = 2**20
WIDTH, ROWS = 64, 512
TOLD = "a step calls more of Skips together"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Skips(LightningModule):
    """Eight blocks, of which every step calls those that it is told to."""

    def __init__(self, called: list[range], block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(8))
        self.called = called
        self.peaks: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if self.device.type == "sim":
            gc.collect()
            torch.get_device_module("sim").reset_peak_memory_stats(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for number in self.called[batch_idx]:
            x = self.blocks[number](x)
        loss: Tensor = x.square().mean()
        return loss

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.device.type == "sim":
            self.peaks.append(torch.get_device_module("sim").max_memory_allocated(0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


HALVES = [range(4), range(4, 8)]


def fit(
    called: list[range],
    budget: int | None,
    accelerator: str = "sim",
    block: type[Block] = Block,
    rows: Sequence[int] = (),
) -> Skips:
    model = Skips(called, block)
    sizes = rows or [ROWS] * len(called)
    batches: Any = DataLoader([[torch.randn(size, WIDTH)] for size in sizes], batch_size=None)  # type: ignore[arg-type]
    strategy = dpx.DPXStrategy(memory_budget=budget, micro_batches=1, plan_cache=False)
    make_trainer(max_epochs=1, strategy=strategy, accelerator=accelerator, devices=1).fit(model, batches)
    return model


def test_all_layers_together_fit_from_the_next_time_on(sim: Any) -> None:
    called = [*HALVES, *HALVES, range(8), *HALVES, range(8), range(8)]
    plain = fit(called, None)
    budget = int(0.6 * max(plain.peaks))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = fit(called, budget)
    assert sum(TOLD in str(one.message) for one in told) == 1
    assert ours.peaks[4] > budget, "the premise: they are too much for the plan of both halves"
    assert max(ours.peaks[5:]) <= budget
    assert_equal(plain.state_dict(), ours.state_dict(), bitwise=True)


def test_more_layers_than_ever_are_told_of_on_the_host_as_well() -> None:
    with pytest.warns(UserWarning, match=TOLD):
        fit([*HALVES, *HALVES, range(8)], 8 * MIB, "cpu")


def test_nothing_is_told_of_steps_that_have_room_together(sim: Any) -> None:
    called = [*HALVES, *HALVES, range(2, 6), range(8)]
    plain = fit(called, None)
    ours = fit(called, int(1.1 * max(plain.peaks)))  # warnings are errors in tests
    assert_equal(plain.state_dict(), ours.state_dict(), bitwise=True)


def test_fewer_layers_need_no_plan_of_their_own(sim: Any) -> None:
    called = [*HALVES, *HALVES, range(2), range(5, 8)]
    plain = fit(called, None)
    budget = int(0.7 * max(plain.peaks))
    with warnings.catch_warnings(record=True) as told:  # that the second half was not planned for is one
        warnings.simplefilter("always")
        ours = fit(called, budget)
    assert not any(TOLD in str(one.message) for one in told)
    assert max(ours.peaks[4:]) <= budget


class KeepsItsOwn(torch.autograd.Function):
    """Keeps a tensor that nothing in the graph can make again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(torch.linspace(0.5, 1.0, 4 * x.numel()).view(-1, WIDTH))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0][:ROWS]


class Stubborn(Block):
    """A block that cannot be called again, as a hook of the user's watches it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = KeepsItsOwn.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return out


def test_where_no_plan_keeps_them_within_the_budget_that_is_told_and_the_run_goes_on() -> None:
    called = [*HALVES, *HALVES, range(8), range(8)]
    plain = fit(called, None, "cpu", Stubborn)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = fit(called, 7 * MIB, "cpu", Stubborn)
    messages = [str(one.message) for one in told if "dpx" in str(one.message)]
    assert TOLD in messages[0]
    assert "no plan keeps a step" in messages[1]
    assert len(messages) == 2
    assert_equal(plain.state_dict(), ours.state_dict(), bitwise=True)


def test_a_short_batch_that_calls_all_layers_is_no_step_beyond_the_budget(sim: Any) -> None:
    called = [*HALVES, *HALVES, range(8), *HALVES]
    rows = [ROWS] * 4 + [ROWS // 8] + [ROWS] * 2
    plain = fit(called, None, rows=rows)
    with warnings.catch_warnings(record=True) as told:  # that the second half was not planned for is one
        warnings.simplefilter("always")
        ours = fit(called, int(0.7 * max(plain.peaks)), rows=rows)
    assert not any(TOLD in str(one.message) for one in told)
    assert_equal(plain.state_dict(), ours.state_dict(), bitwise=True)


def test_a_short_batch_after_such_a_step_gives_its_plan_no_room_that_full_ones_have_not(sim: Any) -> None:
    called = [*HALVES, *HALVES, range(8), range(4), range(8), range(8), range(8)]
    rows = [ROWS] * 5 + [ROWS // 32] + [ROWS] * 3
    plain = fit(called, None, rows=rows)
    budget = int(0.6 * max(plain.peaks))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = fit(called, budget, rows=rows)
    assert sum(TOLD in str(one.message) for one in told) == 1
    assert max(ours.peaks[6:]) <= budget
    assert_equal(plain.state_dict(), ours.state_dict(), bitwise=True)
