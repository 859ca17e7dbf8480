"""Accumulated gradients are those of one device, whatever happens at any position of a window."""

from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import assert_equal, make_loader, make_trainer, strategy_in

pytestmark = [
    pytest.mark.usefixtures("hardware"),
    pytest.mark.filterwarnings("ignore:.training_step. returned .None."),
]

WINDOW = 3
WAYS = [(2, "threads"), (3, "inline")]


class Accumulates(LightningModule):
    """Rows (B, 8) to logits (B, 3); something happens at one position of every window.

    Args:
        position: From 0 to 2; the last window of an epoch has two batches.
        event: What happens there.
    """

    def __init__(self, position: int, event: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.position = position
        self.event = event

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if self.happens("none", batch_idx):
            return None
        if self.happens("error", batch_idx) and self.current_epoch == 1:
            raise ArithmeticError("on purpose")
        return loss

    def happens(self, event: str, batch_idx: int) -> bool:
        return event == self.event and batch_idx % WINDOW == self.position

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class AccumulatesAndForgets(Accumulates):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.happens("zero_grad of the optimizer", batch_idx):
            self.optimizers().zero_grad()
        if self.happens("zero_grad of the module", batch_idx):
            self.zero_grad()
        if self.happens("zero_grad in place", batch_idx):
            self.optimizers().zero_grad(set_to_none=False)


class AccumulatesAndLooks(Accumulates):
    def on_after_backward(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        self.log("norm", torch.stack([gradient.norm().cpu() for gradient in gradients]).norm())
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class AccumulatesByHand(Accumulates):
    """Backward in every step, the optimizer steps in the last one of a window."""

    def __init__(self, position: int, event: str) -> None:
        super().__init__(position, event)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        if loss is not None:
            self.manual_backward(loss / WINDOW)
        if self.happens("zero_grad of the optimizer", batch_idx):
            optimizer.zero_grad()
        if self.happens("zero_grad of the module", batch_idx):
            self.zero_grad()
        if self.happens("zero_grad in place", batch_idx):
            optimizer.zero_grad(set_to_none=False)
        if batch_idx % WINDOW == WINDOW - 1:
            optimizer.step()
            optimizer.zero_grad()


def trained(kind: type[Accumulates], position: int, event: str, **options: Any) -> dict[str, torch.Tensor]:
    """Weights, momenta, gradients and logged values after two epochs of five batches, the last one short."""
    torch.manual_seed(0)
    model = kind(position, event)
    window = 1 if kind is AccumulatesByHand else WINDOW
    trainer = make_trainer(accumulate_grad_batches=window, **options)
    try:
        trainer.fit(model, make_loader(37, 8))
    except ArithmeticError:
        assert event == "error"
    seen = {**model.state_dict(), **trainer.callback_metrics}
    states = trainer.optimizers[0].state_dict()["state"]
    seen.update({f"momentum/{index}": state["momentum_buffer"] for index, state in states.items()})
    if "strategy" not in options or options["strategy"].reducer != "colocate":
        named = list(model.named_parameters())
        seen.update({f"gradient/{name}": one.grad for name, one in named if one.grad is not None})
    return {name: value.detach().cpu().clone() for name, value in seen.items()}


@cache
def of_one_device(kind: type[Accumulates], position: int, event: str) -> dict[str, torch.Tensor]:
    return trained(kind, position, event)


CASES = [
    *[(Accumulates, event) for event in ("nothing", "none", "error")],
    *[(AccumulatesAndForgets, f"zero_grad {how}") for how in ("of the optimizer", "of the module", "in place")],
    (AccumulatesAndLooks, "none"),
    *[
        (AccumulatesByHand, event)
        for event in (
            "nothing",
            "none",
            "error",
            "zero_grad of the optimizer",
            "zero_grad of the module",
            "zero_grad in place",
        )
    ],
]


@pytest.mark.parametrize(("num_replicas", "execution"), WAYS)
@pytest.mark.parametrize(("kind", "event"), CASES)
def test_whatever_happens_in_a_window_happens_as_on_one_device(kind, event, num_replicas, execution) -> None:
    for position in range(WINDOW if event != "nothing" else 1):
        strategy = strategy_in(execution)
        ours = trained(kind, position, event, strategy=strategy, devices=num_replicas)
        assert_equal(ours, of_one_device(kind, position, event))


@pytest.mark.parametrize(("kind", "event"), CASES)
def test_with_owners_elsewhere(kind, event) -> None:
    for position in range(WINDOW if event != "nothing" else 1):
        ours = trained(kind, position, event, strategy=dpx.DPXStrategy("colocate"), devices=3)
        theirs = of_one_device(kind, position, event)
        assert_equal(ours, {name: value for name, value in theirs.items() if not name.startswith("gradient/")})
