"""Manual optimization on replicas trains to the weights of one device."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import assert_equal, make_loader, make_trainer

pytestmark = pytest.mark.usefixtures("hardware")


class Manual(LightningModule):
    """Rows (B, 8) to logits (B, 3), with one optimizer stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        return {"loss": loss, "rows": batch[0]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Scheduled(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.lr_schedulers().step()
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return output

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Accumulated(Manual):
    """Steps every third batch; the last one of an epoch has few rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]) / 3)
        if batch_idx % 3 == 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class AccumulatedToTheShortBatch(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        if len(batch[0]) == 1 and batch_idx == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()


class ForgetsBeforeTheShortBatch(Manual):
    """What replicas that get nothing of the last batch have accumulated is forgotten too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.optimizers().zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        if batch_idx == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()


class WithClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        with optimizer.toggle_model():
            optimizer.step(closure=closure)


class Plain(Manual):
    """The optimizers of torch, without Lightning's wrapper."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()


class GAN(Manual):
    """Generator and discriminator by turns, with toggling, a gradient penalty and two schedulers."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch[0], batch[0].flip(1)
        generators, discriminators = self.optimizers()
        self.toggle_optimizer(generators)
        assert not any(parameter.requires_grad for parameter in self.discriminator.parameters())
        generator_loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        generators.zero_grad()
        self.manual_backward(generator_loss)
        generators.step()
        self.untoggle_optimizer(generators)

        with self.toggled_optimizer(discriminators):
            points = real.clone().requires_grad_()
            scores = self.discriminator(points)
            (slopes,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
            penalty = (slopes.norm(dim=1) - 1).square().mean()
            fake = self.discriminator(self.generator(noise).detach())
            loss = F.softplus(-scores).mean() + F.softplus(fake).mean() + 0.1 * penalty
            discriminators.zero_grad()
            self.manual_backward(loss)
            discriminators.step()
        assert all(parameter.requires_grad for parameter in self.parameters())
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log_dict({"generator": generator_loss, "discriminator": loss})

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), 1e-2, eps=1e-4),
            torch.optim.SGD(self.discriminator.parameters(), 0.1),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


def trained(kind: type[Manual], num_rows: int = 53, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, loader = kind(), make_loader(num_rows)
    trainer = make_trainer(**options)
    trainer.fit(model, loader)
    logged = {f"logged/{name}": value.cpu() for name, value in trainer.callback_metrics.items()}
    steps = torch.tensor(trainer.global_step)
    return {**model.state_dict(), **logged, "steps": steps}


@pytest.mark.parametrize("kind", [Manual, Scheduled, Accumulated, WithClosure, Plain, GAN])
def test_steps_by_hand_train_to_the_weights_of_one_device(kind, execution) -> None:
    ours = trained(kind, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    assert_equal(ours, trained(kind))


def test_gradients_that_wait_on_the_replicas_reach_a_step_that_one_replica_takes(execution) -> None:
    for kind in (AccumulatedToTheShortBatch, ForgetsBeforeTheShortBatch):
        ours = trained(kind, 49, strategy=dpx.DPXStrategy(execution=execution), devices=3)
        assert ours["steps"] == 2
        assert_equal(ours, trained(kind, 49))


def test_manual_optimization_in_mixed_precision(execution) -> None:
    options = {"precision": "bf16-mixed"}
    ours = trained(Manual, strategy=dpx.DPXStrategy(execution=execution), devices=2, **options)
    one = trained(Manual, **options)
    torch.testing.assert_close(ours["net.0.weight"], one["net.0.weight"], rtol=0, atol=0.05)


class Forgets(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.optimizers().step()


def test_a_step_that_not_all_replicas_take_is_an_error(execution) -> None:
    with pytest.raises(dpx.CollectiveError, match=r"optimizer\.step\(\).*have ended"):
        trained(Forgets, strategy=dpx.DPXStrategy(execution=execution), devices=2)


class WithLBFGS(WithClosure):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_lbfgs_by_hand_is_refused(execution) -> None:
    with pytest.raises(dpx.UnsupportedError, match="LBFGS"):
        trained(WithLBFGS, strategy=dpx.DPXStrategy(execution=execution), devices=2)
