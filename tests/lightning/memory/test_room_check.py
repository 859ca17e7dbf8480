"""What callbacks come to keep in the course of a run is planned for, and told where no plan does."""

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import make_trainer
from tests.lightning.memory.test_manual_planning import Watch

MIB = 2**20
_STATIC = 3 * 8 * 256 * 256 * 4  # bytes of weights, gradients and the momentum of SGD


class Deep(LightningModule):
    """Rows (B, 256) through eight layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256, bias=False), nn.Tanh())]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=False)


class Copies(Callback):
    """Keeps as many copies of the layers from the second epoch, or from the second batch, on."""

    def __init__(self, number: int, of_epoch: bool) -> None:
        self.number = number
        self.of_epoch = of_epoch
        self.copies: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.of_epoch and trainer.current_epoch == 1:
            self.copies = [copy.deepcopy(module.net) for _ in range(self.number)]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.of_epoch and not self.copies:
            self.copies = [copy.deepcopy(module.net) for _ in range(self.number)]


def fit(callbacks: list[Callback], **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Deep()
    batches = DataLoader(TensorDataset(torch.randn(3 * 512, 256)), batch_size=512)
    make_trainer(max_epochs=2, callbacks=callbacks, **options).fit(module, batches)
    return {name: value.cpu() for name, value in module.state_dict().items()}


def planned(budget: int, callbacks: list[Callback], accelerator: str, devices: int = 1) -> dict[str, Tensor]:
    strategy = dpx.DPXStrategy(memory_budget=budget, micro_batches=1, plan_cache=False)
    return fit(callbacks, strategy=strategy, accelerator=accelerator, devices=devices)


@pytest.mark.parametrize("of_epoch", [True, False], ids=["epoch", "batch"])
def test_copies_that_callbacks_come_to_keep_are_planned_for(of_epoch: bool, sim: Any, caplog: Any) -> None:
    plain = fit([Copies(2, of_epoch)])
    budget = _STATIC + 7 * MIB
    watch = Watch()
    ours = planned(budget, [Copies(2, of_epoch), watch], "sim")
    assert "made anew, as less room is left than was planned for" in caplog.text
    assert max(watch.peaks[1:]) <= budget
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


def test_so_are_those_beside_what_a_reduction_keeps(sim: Any, caplog: Any) -> None:
    watch = Watch()
    before = sim.memory_allocated(0)
    budget = before + _STATIC + 6 * MIB
    planned(budget, [Copies(2, of_epoch=True), watch], "sim", devices=2)
    assert "made anew, as less room is left than was planned for" in caplog.text
    assert max(watch.peaks[1:]) <= budget


def test_so_are_those_on_the_host(caplog: Any) -> None:
    planned(_STATIC + 8 * MIB, [Copies(2, of_epoch=True)], "cpu")
    assert "made anew, as less room is left than was planned for" in caplog.text


def test_copies_without_room_for_any_plan_are_told_of_once_and_the_run_goes_on(sim: Any) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        planned(_STATIC + 7 * MIB, [Copies(4, of_epoch=False)], "sim")
    (text,) = [str(one.message) for one in told if "more is kept between steps" in str(one.message)]
    assert "callbacks and hooks that make copies, so steps exceed memory_budget on sim:0: " in text
    assert "it must allow at least" in text or "Allow more" in text
    # Its peak would say the same again.
    assert not [one for one in told if "were allocated on" in str(one.message)]
