"""What a check takes for a difference, and what for roundings that a step makes large."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_dpx as dpx
from lightning_dpx.torch_compat import tree_leaves
from tests.conftest import make_loader, make_trainer
from tests.lightning.by_hand import loss_or_step


class NormedGAN(LightningModule):
    """Batch norms on both sides, and noise, which is the same for all rows of a check: they have no variance there."""

    def __init__(self, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.optimizer = optimizer

    def noise(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(rows), 4, dtype=rows.dtype, device=rows.device)

    def loss(self, rows: torch.Tensor, is_real: bool) -> torch.Tensor:
        scores = self.critic(rows)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        rows = batch[0]
        noise = self.noise(rows)
        for optimizer, loss in (
            (of_critic, lambda: self.loss(rows, True) + self.loss(self.generator(noise).detach(), False)),
            (of_generator, lambda: self.loss(self.generator(noise), True)),
        ):
            self.toggle_optimizer(optimizer)
            value = loss()
            optimizer.zero_grad()
            self.manual_backward(value)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log("critic" if optimizer is of_critic else "generator", value)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.generator.parameters(), lr=0.01), self.optimizer(self.critic.parameters(), lr=0.01)


class NormedGANOfRows(NormedGAN):
    """The generator draws nothing, and Adam moves biases before a norm by roundings of a gradient that is zero."""

    def noise(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :4].flip(1)


class NormedGANOfSums(NormedGAN):
    """Its loss weighs by rows, and no slice has those of the batch."""

    def loss(self, rows: torch.Tensor, is_real: bool) -> torch.Tensor:
        return super().loss(rows, is_real) * len(rows)


def fit(kind: type[NormedGAN], optimizer: type[torch.optim.Optimizer], num_replicas: int, precision: Any) -> None:
    torch.manual_seed(0)
    strategy = dpx.DPXStrategy(execution="inline", verify="raise")
    options = {"sync_batchnorm": True, "precision": precision, "devices": num_replicas}
    make_trainer(strategy=strategy, max_epochs=1, **options).fit(kind(optimizer), make_loader(32, 16))


@pytest.mark.parametrize("kind", [NormedGAN, NormedGANOfRows])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(("num_replicas", "precision"), [(2, "32-true"), (3, "32-true"), (2, "64-true")])
def test_what_roundings_decide_on_one_device_is_no_difference(kind, optimizer, num_replicas, precision) -> None:
    """Most of these were told to differ: gradients on the other side of a kink, and biases that noise had moved."""
    fit(kind, optimizer, num_replicas, precision)


class MadeLarge(LightningModule):
    """Roundings are made large, those of slices and those of nudged weights, unless the latter cancel out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.alike = nn.Parameter(torch.ones(6))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        of_slices = torch.finfo(torch.float64).eps * len(batch[0])
        # Nudged at every other place, both differences are of equal numbers.
        of_nudges = (self.alike[0] - self.alike[2]) + 2 * (self.alike[1] - self.alike[3])
        return self.net(batch[0]).pow(2).mean() + 1e4 * (of_slices + of_nudges)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def test_roundings_that_cancel_out_in_some_nudges_are_no_difference() -> None:
    """On a few processors a GAN was told to differ by two nudges that had moved nothing, both by chance."""
    torch.manual_seed(0)
    strategy = dpx.DPXStrategy(execution="inline", verify="raise")
    trainer = make_trainer(strategy=strategy, max_epochs=1, devices=2, precision="64-true")
    trainer.fit(MadeLarge(), make_loader(32, 16))


class FollowsItself(LightningModule):
    """As BYOL begins: a student and its teacher are still alike, so all of the loss cancels out but its last digits."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def alike(self, rows: torch.Tensor) -> torch.Tensor:
        return F.cosine_similarity(self.student(rows), self.teacher(rows * 1.1), dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (2 - 2 * self.alike(batch[0])).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


class FollowsItselfAndKeeps(FollowsItself):
    """What it keeps is looked at, and used by no later step."""

    def alike(self, rows: torch.Tensor) -> torch.Tensor:
        alike = super().alike(rows)
        self.last = alike.detach()
        return alike


class FollowsItselfInPairs(FollowsItself):
    """A row counts for the one before it, which may be in another slice."""

    def alike(self, rows: torch.Tensor) -> torch.Tensor:
        return super().alike(rows + 1e-3 * rows.roll(1, 0))


class ScoresItself(FollowsItself):
    """The scores of both are added up in another order, so their difference begins as roundings, with gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.student(batch[0]).sum(1) / 3).mean() - (self.teacher(batch[0]) / 3).sum(1).mean()


def follow(kind: type[FollowsItself], num_replicas: int, precision: Any, **own: Any) -> LightningModule:
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if num_replicas > 1:
        options["strategy"] = dpx.DPXStrategy(execution="inline", verify="raise", **own)
    model = kind()
    trainer = make_trainer(max_epochs=1, precision=precision, devices=num_replicas, **options)
    trainer.fit(model, make_loader(32, 16))
    return model


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_loss_that_cancels_out_is_no_difference(
    num_replicas: int, precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    follow(FollowsItself, num_replicas, precision)
    assert "random draws" not in caplog.text, "it draws nothing"
    if "not compared: loss" in caplog.text:  # by chance slices may round as one device does
        assert "loss (it depends on roundings)" in caplog.text


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_loss_that_cancels_out_is_no_use_of_what_the_step_before_kept(precision: Any, recwarn: Any) -> None:
    """Its second step was taken for another one on slices, and batches went whole."""
    follow(FollowsItselfAndKeeps, 2, precision)
    assert not any("batches whole" in str(one.message) for one in recwarn)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_roundings_do_not_decide_whether_a_loss_is_a_sum(num_replicas: int) -> None:
    """The sum of two slices' roundings was nearer to that of one device, and gradients were twice as large."""
    ours = follow(ScoresItself, num_replicas, "64-true", loss_reduction="auto")
    for mine, theirs in zip(ours.parameters(), follow(ScoresItself, 1, "64-true").parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_difference_in_a_loss_that_cancels_out_is_found() -> None:
    with pytest.raises(dpx.ParityError, match="the loss is"):
        follow(FollowsItselfInPairs, 2, "64-true")


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_difference_beside_roundings_is_found(precision: Any) -> None:
    with pytest.raises(dpx.ParityError, match="gradients differ"):
        fit(NormedGANOfSums, torch.optim.SGD, 2, precision)


class RootOfRows(LightningModule):
    """No mean of slices, and it looks whether weights are what it knows."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.net = nn.Linear(8, 2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.digest = float(self.frozen.weight.double().sum())
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        assert float(self.frozen.weight.double().sum()) == self.digest, "weights were changed"
        loss = self.net(batch[0]).pow(2).mean().sqrt()
        return loss_or_step(self, loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_difference_is_told_where_roundings_cannot_be_looked_for(by_hand: bool) -> None:
    """The step was said not to be checked then, and ran on with slices."""
    strategy = dpx.DPXStrategy(execution="inline", verify="raise")
    with pytest.raises(dpx.ParityError, match="gradients differ"):
        make_trainer(strategy=strategy, max_epochs=1, devices=2).fit(RootOfRows(by_hand), make_loader(32, 16))


class NearlyMean(LightningModule):
    """A loss that is the mean over rows and a little more, by less than a long sum's roundings might come to."""

    more = 1e-3

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mean = (self.net(batch[0]) - 1.0).pow(2).mean()
        return mean + self.more * mean.pow(2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class NearlyMeanOfMixed(NearlyMean):
    """Something of it is computed in fewer digits than its parameters have."""

    more = 1e-4

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * torch.ones(1, dtype=torch.float32)[0]


@pytest.mark.parametrize(("kind", "precision"), [(NearlyMean, "32-true"), (NearlyMeanOfMixed, "64-true")])
def test_a_loss_that_is_nearly_a_mean_is_found(kind: type[NearlyMean], precision: Any) -> None:
    """Beside what roundings of this step come to, and not beside what they might."""
    torch.manual_seed(1)
    strategy = dpx.DPXStrategy(execution="inline", verify="raise")
    trainer = make_trainer(strategy=strategy, max_epochs=1, devices=2, precision=precision)
    with pytest.raises(dpx.ParityError, match="gradients differ"):
        trainer.fit(kind(), make_loader(32, 16))


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_long_sum_is_no_difference(precision: Any) -> None:
    class Mean(NearlyMeanOfMixed):
        more = 0.0

    torch.manual_seed(1)
    strategy = dpx.DPXStrategy(execution="inline", verify="raise")
    make_trainer(strategy=strategy, max_epochs=1, devices=2, precision=precision).fit(Mean(), make_loader(32, 16))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator makes."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.num_bytes = max(self.num_bytes, leaf.nbytes)
        return out


def test_a_search_for_roundings_makes_no_tensor_larger_than_a_parameter() -> None:
    """The places of all of its numbers took twice its bytes, several times over."""

    class WithEmbedding(RootOfRows):
        def __init__(self) -> None:
            super().__init__(by_hand=False)
            self.words = nn.Embedding(5_000, 8).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).pow(2).mean().sqrt()

    model = WithEmbedding()
    strategy = dpx.DPXStrategy(execution="inline")
    with Largest() as largest, pytest.warns(UserWarning, match="gradients differ"):
        make_trainer(strategy=strategy, max_epochs=1, devices=2).fit(model, make_loader(32, 16))
    assert largest.num_bytes == model.words.weight.nbytes
