"""Steps that optimize by hand in some batches only, and by hand with sparse gradients."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import assert_equal, make_loader, make_trainer


class Switches(LightningModule):
    """Optimizes by hand in every second epoch."""

    by_hand_first = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.by_hand_first
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.automatic_optimization = not self.automatic_optimization

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BeginsByHand(Switches):
    by_hand_first = True


class SwitchesBetweenBatches(Switches):
    """What a step by hand leaves in gradients the next one forgets."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.automatic_optimization = not self.automatic_optimization


class Sparse(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.table = nn.Embedding(11, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self.head(self.table(batch[0]).mean(1)), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        dense = torch.optim.Adam(self.head.parameters(), lr=0.1)
        return torch.optim.SparseAdam(list(self.table.parameters()), lr=0.1), dense


def fitted(kind: type[LightningModule], loader: Any, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    trainer = make_trainer(max_epochs=3, **options)
    trainer.fit(model, loader)
    seen = {**model.state_dict(), **trainer.callback_metrics}
    return {name: value.detach().cpu().clone() for name, value in seen.items()}


def on(num_devices: int, execution: str = "inline", **options: Any) -> dict[str, Any]:
    return {"devices": num_devices, "strategy": dpx.DPXStrategy(execution=execution, **options)}


@pytest.mark.parametrize("kind", [Switches, BeginsByHand, SwitchesBetweenBatches])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_steps_that_switch_train_to_the_weights_of_one_device(
    kind: type[Switches], num_devices: int, hardware: str
) -> None:
    expected = fitted(kind, make_loader(48))
    assert_equal(fitted(kind, make_loader(48), **on(num_devices, "threads")), expected)


def test_owners_on_several_devices_follow_the_switch(hardware: str) -> None:
    expected = fitted(SwitchesBetweenBatches, make_loader(48))
    assert_equal(fitted(SwitchesBetweenBatches, make_loader(48), **on(2, reducer="colocate")), expected)


@pytest.mark.parametrize("kind", [Switches, SwitchesBetweenBatches])
def test_micro_batches_end_where_a_step_begins_to_optimize_by_hand(kind: type[Switches]) -> None:
    expected = fitted(kind, make_loader(48))
    with pytest.warns(UserWarning, match="in one piece from here on, not in micro-batches: it optimizes by hand now"):
        assert_equal(fitted(kind, make_loader(48), **on(1, micro_batches=2)), expected)


def test_steps_by_hand_with_sparse_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(11, (20, 4), generator=generator)
    loader = DataLoader(TensorDataset(words, torch.randint(3, (20,), generator=generator)), 8)
    expected = fitted(Sparse, loader)
    for options in (on(2), on(3, "threads"), on(1, micro_batches=2)):
        assert_equal(fitted(Sparse, loader, **options), expected)
