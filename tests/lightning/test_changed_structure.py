"""Replicas are made anew when parts of the module are others than in the last step, and not otherwise."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torchmetrics import MeanMetric

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer

ANEW = "its replicas are made anew"


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.metric: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.metric is not None:
            self.metric.update(loss.detach(), len(batch[0]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Changes(Callback):
    """Does something to the module after its second batch."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.change(module)


def exchange_part(module: Any) -> None:
    torch.manual_seed(1)
    module.net[1] = nn.PReLU(init=0.3).double().requires_grad_(False)


def add_metric(module: Any) -> None:
    module.metric = MeanMetric()


def set_attribute(module: Any) -> None:
    module.note = "not a part"


def fitted(change: Any, **options: Any) -> Model:
    model = Model().double()
    trainer = make_trainer(max_epochs=1, precision="64-true", callbacks=[Changes(change)], **options)
    trainer.fit(model, make_loader(32, 8))
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (exchange_part, "the module has other parts than before"),
        (add_metric, "the module has other parts than before"),
        (set_attribute, ""),
    ],
)
def test_replicas_follow_what_a_hook_has_exchanged(change: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ours = fitted(change, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    plain = fitted(change)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())
    assert caplog.text.count(ANEW) == bool(said)
    assert said in caplog.text
    if ours.metric is not None:
        torch.testing.assert_close(ours.metric.compute(), plain.metric.compute())
