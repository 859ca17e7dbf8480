"""Tensors in attributes of modules are part of what a step takes: as they are, copied, and left by steps."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import make_trainer

MIB = 2**20
TABLE = 8192 * 64 * 4  # 2 MiB


class WithTable(LightningModule):
    """Reads a tensor that is no buffer, and may append to a list in each step."""

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.table = torch.ones(8192, 64)
        self.grows = grows
        self.history: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net(batch[0]) * self.table[0].to(self.device)
        if self.grows:
            self.history.append(hidden.detach())
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rooms(Callback):
    """What plans leave for activations, step by step."""

    def __init__(self) -> None:
        self.rooms: list[int | None] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for plan, _ in trainer.strategy.memory_plans.values():
            self.rooms.append(plan.budget)


def fitted(module: LightningModule, budget: int, batches: int = 1, **options: Any) -> Rooms:
    torch.manual_seed(0)
    rooms = Rooms()
    strategy = dpx.DPXStrategy(memory_budget=budget, plan_cache=False, **options)
    data = DataLoader(TensorDataset(torch.randn(2048, 64).repeat(batches, 1)), 2048)
    on_host: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "callbacks": [rooms]}
    make_trainer(max_epochs=1, strategy=strategy, **on_host).fit(module, data)
    return rooms


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_those_on_the_host_take_from_the_room_for_activations(micro_batches: int) -> None:
    module = WithTable()
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    # Gradients of a step in one piece come within it; those of the first micro-batch are there beside the second.
    held = micro_batches * parameters + 2048 * 64 * 4 + micro_batches * TABLE
    assert fitted(module, 12 * MIB, micro_batches=micro_batches).rooms == [12 * MIB - held]


def test_copies_count_where_the_number_of_micro_batches_is_chosen() -> None:
    """Thirds would fit, but for the copies that two of them have, and one piece does not."""
    parameters = sum(parameter.nbytes for parameter in WithTable().parameters())
    with pytest.raises(dpx.BudgetError):
        fitted(WithTable(), 2 * parameters + 2048 * 64 * 4 + TABLE + 9 * MIB // 4)


def test_lists_that_grow_are_told_of_once_no_plan_does() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted(WithTable(grows=True), 9 * MIB, batches=17, micro_batches=1)
    texts = [str(one.message) for one in told if "more is kept between steps" in str(one.message)]
    assert len(texts) == 1
    assert "lists that grow" in texts[0]


def test_what_each_step_leaves_in_the_place_of_the_last_is_told_of_by_nothing() -> None:
    class Caches(WithTable):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.cached = self.net[0](batch[0]).detach()
            return super().training_step(batch, batch_idx)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx:.*kept between steps")
        rooms = fitted(Caches(), 9 * MIB, batches=17, micro_batches=1)
    assert len(set(rooms.rooms)) == 1, "nothing was planned anew"


def test_of_looks_that_have_no_room_it_is_said_once(caplog: Any) -> None:
    """Whatever the list has grown to by the next one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted(WithTable(grows=True), 12 * MIB, batches=17, micro_batches=2)
    assert caplog.text.count("is not looked at again in later ones") == 1


class WithSparse(WithTable):
    """Multiplies by a sparse matrix, in an attribute or in a buffer."""

    def __init__(self, layout: torch.layout, is_buffer: bool) -> None:
        super().__init__()
        self.table = torch.ones(1, 64)
        ends = torch.arange(65)
        places = torch.arange(64)
        if layout is torch.sparse_coo:
            matrix = torch.sparse_coo_tensor(torch.stack([places, places]), torch.ones(64))
        else:
            matrix = torch.sparse_csr_tensor(ends, places, torch.ones(64), (64, 64))
        if is_buffer:
            self.register_buffer("matrix", matrix)
        else:
            self.matrix = matrix

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([(self.matrix @ batch[0].t()).t()], batch_idx)


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_of_sparse_ones_what_is_there_counts(layout: torch.layout, is_buffer: bool) -> None:
    module = WithSparse(layout, is_buffer)
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    indices = 2 * 64 if layout is torch.sparse_coo else 65 + 64  # of 8 bytes
    held = parameters + 2048 * 64 * 4 + module.table.nbytes + 8 * indices + 4 * 64
    in_one_piece = fitted(module, 12 * MIB, micro_batches=1)
    assert in_one_piece.rooms == [12 * MIB - held]
    fitted(module, 12 * MIB, micro_batches=2)
