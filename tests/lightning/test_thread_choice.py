"""Threads for large operators, chosen or asked for, with the results of one device."""

import threading
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.devices import num_usable_cpus
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, run

pytestmark = pytest.mark.skipif(num_usable_cpus() < 2, reason="threads need a core for every replica")


class Convolutions(LightningModule):
    """Images (B, 3, 24, 24) to logits (B, 3); large enough for threads. Dropout from step ``late`` on."""

    def __init__(self, *, late: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())
        self.head = nn.Linear(64, 3)
        self.late = late
        self.pools: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        pooled = self.net(batch[0]).mean((2, 3))
        if self.late is not None and batch_idx >= self.late:
            pooled = F.dropout(pooled, 0.5)
        self.log("rows", float(len(batch[0])), reduce_fx="max", on_epoch=True, on_step=True)
        loss = F.cross_entropy(self.head(pooled), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_rows", float(len(batch[0])), reduce_fx="max")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.net(batch[0]).mean((2, 3)))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.pools.append(torch.get_num_threads())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(50, 3, 24, 24, generator=generator)
    return DataLoader(TensorDataset(images, torch.randint(3, (50,), generator=generator)), 16)


def build(**options: Any) -> Convolutions:
    torch.manual_seed(0)
    return Convolutions(**options)


def without_rows(seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What must be equal however the batch was cut."""
    return {name: value for name, value in seen.items() if "rows" not in name}


def test_large_operators_train_in_threads_to_the_weights_of_one_device() -> None:
    one, ours = run(build(), loader()), run(build(), loader(), strategy=dpx.DPXStrategy(verify="off"), devices=2)
    assert ours["logged/rows_step"] == 2, "the last batch has two rows, for one replica"
    assert ours["logged/rows_epoch"] == 8, "in the second epoch all full batches are cut"
    assert ours["logged/val_rows"] == 16, "evaluation takes the batch whole, with all threads"
    assert_equal(without_rows(ours), without_rows(one))


def test_more_replicas_than_cores_take_their_slices_as_one_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    cores = num_usable_cpus()
    with caplog.at_level("INFO"):
        run(build(), loader(), strategy=dpx.DPXStrategy(), devices=cores + 1)
    said = (
        f"dpx: {cores + 1} replicas on cpu take their slices as one: {cores} usable cores are fewer than one for each."
    )
    assert caplog.messages.count(said) == 1


def test_slices_run_in_threads_after_the_first_step(monkeypatch) -> None:
    seen: list[int] = []
    step = Convolutions.training_step

    def spy(self, batch, batch_idx):
        seen.append(len(batch[0]))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Convolutions, "training_step", spy)
    strategy = dpx.DPXStrategy(verify="off")
    make_trainer(strategy=strategy, devices=2, max_steps=3, max_epochs=1).fit(build(), loader(), loader())
    assert seen == [16, 8, 8, 8, 8, 8, 8], "the whole first batch, its rehearsal on copies, then slices"


def test_the_rehearsal_logs_nothing_and_leaves_the_weights_alone() -> None:
    trainer, model, one = make_trainer(max_steps=1, strategy="dpx", devices=2), build(), build()
    trainer.fit(model, loader(), loader())
    make_trainer(max_steps=1).fit(one, loader(), loader())
    assert_equal(model.state_dict(), one.state_dict(), bitwise=True)
    assert trainer.callback_metrics["rows_step"] == 16


def test_the_caller_keeps_one_intra_op_thread_only_while_it_trains() -> None:
    before, model = torch.get_num_threads(), build()
    make_trainer(strategy="dpx", devices=2, max_epochs=1).fit(model, loader(), loader())
    assert model.pools[1] == 1
    assert torch.get_num_threads() == before


def test_random_numbers_that_come_late_end_the_threads_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="from here on they take their slices as one"):
        seen = run(build(late=1), loader(), strategy=dpx.DPXStrategy(), devices=2)
    assert seen["logged/rows_epoch"] == 16


NAMES: SimpleQueue[str] = SimpleQueue()  # of threads; nobody looks into it, as into a list that steps share


class Slope(Classifier):
    """Differentiates in forward mode, of which the process has one level."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        NAMES.put(threading.current_thread().name)
        _, slope = torch.func.jvp(self.net, (batch[0],), (torch.ones_like(batch[0]),))
        return F.cross_entropy(self.net(batch[0]), batch[1]) + slope.square().mean()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_steps_in_threads_take_turns_where_they_differentiate_in_forward_mode() -> None:
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution="threads"), devices=2)
    trainer.fit(Slope(), make_loader(), make_loader())
    assert {NAMES.get() for _ in range(NAMES.qsize())} == {threading.main_thread().name}
