"""Running out of memory: the error says what would help; ``on_oom="replan"`` repeats the step and loses nothing."""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import lightning_dpx as dpx
from lightning_dpx.units import parse_bytes
from tests.conftest import SIMULATED, make_trainer, simulate_room

pytestmark = [
    pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED),
    pytest.mark.usefixtures("devices_as_before"),
    pytest.mark.filterwarnings("ignore:dpx. the activations on sim.0 took"),  # which is what these tests are about
]
ROWS = 256


class Deep(LightningModule):
    """Rows (B, 64) through ten layers with dropout to 3 classes; counts the rows that it saw."""

    def __init__(self, peak_in: str = "backward") -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.2)) for _ in range(10)]
        self.net, self.head = nn.Sequential(*layers, nn.BatchNorm1d(64)), nn.Linear(64, 3)
        self.rows, self.peak_in = MeanMetric(), peak_in

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        hidden = self.net(rows)
        if self.peak_in == "backward":
            hidden = Hungry.apply(hidden)
        self.rows.update(float(len(rows)))
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        loss = F.cross_entropy(self.head(hidden), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Hungry(torch.autograd.Function):
    """Takes 6 KiB a row at the very moment when backward begins, with all activations there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        extra = torch.ones(len(gradient), 1536, device=gradient.device)
        return gradient * extra[:, :1]


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(3 * ROWS, 64, generator=generator), torch.randint(3, (3 * ROWS,), generator=generator)
    )
    return DataLoader(data, ROWS)


class Neighbor(Callback):
    """Takes a MiB of the device in the second step, after it was looked at whether the plan still has its room."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.fit_loop.batch_idx == 1:
            self.block = torch.ones(2**18, device="sim:0")


def fit(memory: str | None, num_devices: int, peak_in: str, execution: str, **options: Any) -> dict[str, torch.Tensor]:
    trainer_options = {key: options.pop(key) for key in ("accumulate_grad_batches",) if key in options}
    callbacks = [Neighbor()] if options.pop("neighbor", False) else []
    if memory is None:
        dpx.simulate(num_devices)
    else:
        simulate_room(*[parse_bytes("memory", memory)] * num_devices)
    torch.manual_seed(0)
    model = options.pop("kind", Deep)(peak_in)
    strategy = dpx.DPXStrategy(execution=execution, gradient_buckets=0, **options)
    trainer = make_trainer(
        strategy=strategy, accelerator="sim", devices=num_devices, max_epochs=1, callbacks=callbacks, **trainer_options
    )
    torch.manual_seed(1)
    trainer.fit(model, batches())
    logged = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
    return {name: value.cpu() for name, value in {**model.state_dict(), **logged}.items()}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"DPXStrategy\(memory_budget='auto'\) computes again what does not fit"),
        (
            {"memory_budget": "3900KiB", "neighbor": True},
            r"The plan of sim:0 for a budget of 3\.8 MiB predicted .* One of .* MiB costs .*% of a step",
        ),
    ],
)
def test_an_error_that_is_raised_says_what_would_help(options: dict[str, Any], said: str) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error:
        fit("4000KiB", 1, "backward", "inline", **options)
    assert type(error.value) is torch.OutOfMemoryError, "the original"
    assert re.search(said, " ".join(error.value.__notes__)), error.value.__notes__


def test_an_unknown_choice() -> None:
    with pytest.raises(dpx.ConfigurationError, match="on_oom='ignore' is not allowed; choose one of 'raise', 'replan'"):
        dpx.DPXStrategy(on_oom="ignore")


class Wide(LightningModule):
    """Rows (B, 16384), of which each keeps twenty times 64 KiB for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16384))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = batch[0] * self.scale
        for _ in range(20):
            hidden = torch.tanh(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_check_of_rows_that_fit_in_micro_batches_alone_keeps_on_the_host_what_backward_needs(caplog: Any) -> None:
    simulate_room(70 * 65536)  # one row takes some 25 of them in forward and backward, eight rows more than 160
    data = DataLoader(TensorDataset(torch.randn(8, 16384)), 8)
    with caplog.at_level("INFO"):
        trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(micro_batches=8), accelerator="sim")
        trainer.fit(Wide(), data)
    assert "dpx: checked on 8 rows: loss, 1 gradient as on one device" in caplog.text
