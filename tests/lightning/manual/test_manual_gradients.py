"""What a manual step does with gradients and optimizers between a backward and a step, it does as on one device."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import assert_equal
from tests.lightning.manual.test_manual import Manual, trained

pytestmark = pytest.mark.usefixtures("hardware")


class ByHand(Manual):
    """Backward, something in between, step."""

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.between(optimizer, batch_idx)
        optimizer.step()
        self.log("loss", self.loss(batch))

    def between(self, optimizer: Any, batch_idx: int) -> None:
        raise NotImplementedError


class ClipsItsParameters(ByHand):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))


class ClipsThroughGroups(ByHand):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-0.01, 0.01)


class ClipsTheTrainersModule(ByHand):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        torch.nn.utils.clip_grad_value_(self.trainer.lightning_module.parameters(), 0.01)


class ClipsByLightning(ByHand):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class WritesGradients(ByHand):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad.sign() * 0.1
        self.net[0].weight.grad = None


class ChangesTheRate(ByHand):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])


class SetsTheRate(ByHand):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        self.optimizers(use_pl_optimizer=False).param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        self.trainer.optimizers[0].defaults["lr"] = 0.5


class HalvesTheMomentum(ByHand):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        plain = optimizer.optimizer
        plain.halved = getattr(plain, "halved", 0) + 1
        self.log("halved", float(plain.halved))
        for parameter in self.net.parameters():
            if "momentum_buffer" in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"].mul_(0.5)


class AddsAGroup(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(3, 3)

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.late(self.net(batch[0])), batch[1])

    def between(self, optimizer: Any, batch_idx: int) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": self.late.parameters(), "lr": 0.05})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


class KeepsItsOptimizer(ByHand):
    """Stored before the first step, and in a list."""

    def on_train_start(self) -> None:
        self.mine = self.optimizers()
        self.several = [self.optimizers(), self.optimizers(use_pl_optimizer=False)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.several[1].zero_grad()
        self.manual_backward(self.loss(batch))
        self.several[0].param_groups[0]["lr"] *= 0.9
        self.mine.step()


class LooksAtItsOptimizers(ByHand):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        plain = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(optimizer, torch.optim.SGD)
        assert isinstance(plain, torch.optim.SGD)
        assert not isinstance(plain, LightningOptimizer)
        assert type(plain).__name__ == "SGD"
        assert optimizer.optimizer is plain
        assert optimizer._strategy is not None
        mine = {id(parameter) for parameter in self.parameters()}
        assert {id(parameter) for group in plain.param_groups for parameter in group["params"]} == mine
        assert plain.state_dict()["param_groups"][0]["lr"] == 0.1


class PlainBackward(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.loss(batch).backward()
        if batch_idx % 2:
            torch.autograd.backward([self.loss(batch)], retain_graph=True)
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())
        optimizer.step()


class OwnBackward(ByHand):
    def backward(self, loss: torch.Tensor, scale: float = 1.0, **kwargs: Any) -> None:
        (loss * scale + 0.01 * self.net[0].weight.square().sum()).backward(**kwargs)
        self.log("weight", self.net[0].weight.norm())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), 0.5, retain_graph=True)
        self.trainer.strategy.backward(self.loss(batch), None)
        optimizer.step()


class Adversarial(ByHand):
    """One step up the gradient of the inputs, then one down that of the parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        rows = batch[0].clone().requires_grad_()
        self.manual_backward(self.loss((rows, batch[1])))
        optimizer.zero_grad()
        self.manual_backward(self.loss(((batch[0] + rows.grad), batch[1])))
        optimizer.step()


class GradientsByFunction(ByHand):
    """As VQGAN weighs two losses by the gradients of one layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        last = self.net[2].weight
        one, other = self.loss(batch), self.net(batch[0]).square().mean()
        (of_one,) = torch.autograd.grad(one, last, retain_graph=True)
        of_other = torch.autograd.grad(other, [last], retain_graph=True)[0]
        weight = of_one.norm() / (of_other.norm() + 1e-4)
        self.log("weight", weight)
        gradients = torch.autograd.grad(one + weight * other, list(self.parameters()))
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


class SomeRowsOnly(ByHand):
    """A replica without such rows has nothing to do, but the others have."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.global_rank == 0:
            self.manual_backward(0.0 * self.net(batch[0]).sum())
        optimizer.step()
        self.log("loss", self.loss(batch))


class Hooks(ByHand):
    """Hooks see the whole batch's loss and gradients, once, and may write them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.seen.append(float(loss.detach()))

    def on_after_backward(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)
        self.seen.append(float(self.net[0].weight.grad.norm()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].weight.grad.mul_(0.5)
        self.seen.append(float(self.net[0].weight.grad.norm()))

    def between(self, optimizer: Any, batch_idx: int) -> None:
        self.log("norm", self.net[0].weight.grad.norm())


class ForgetsInPlace(ByHand):
    """Gradients that are zero, not None; forgotten by the module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx == 1:
            self.zero_grad()
        elif batch_idx == 2:
            optimizer.zero_grad(set_to_none=False)
        if any(parameter.grad is not None for parameter in self.parameters()):
            optimizer.step()


class Freezes(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.net[0].requires_grad_(batch_idx % 2 == 0)
        self.manual_backward(self.loss(batch))
        optimizer.step()


class BesideTheTrainer(ByHand):
    """An optimizer that configure_optimizers did not return."""

    def on_fit_start(self) -> None:
        self.own = torch.optim.SGD(self.net[0].parameters(), lr=0.05, momentum=0.5)

    def between(self, optimizer: Any, batch_idx: int) -> None:
        self.own.step()
        self.own.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


class Plateau(ByHand):
    """The scheduler is told a loss, which is another one on every slice."""

    def between(self, optimizer: Any, batch_idx: int) -> None:
        """Nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        scheduler = self.lr_schedulers()
        scheduler.step(self.loss(batch).detach())
        self.log("best", scheduler.best)
        self.log("rate", scheduler.get_last_lr()[0])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)]


KINDS = [
    ClipsItsParameters, ClipsThroughGroups, ClipsTheTrainersModule, ClipsByLightning, WritesGradients, ChangesTheRate,
    SetsTheRate, HalvesTheMomentum, AddsAGroup, KeepsItsOptimizer, LooksAtItsOptimizers, PlainBackward, OwnBackward,
    Adversarial, GradientsByFunction, SomeRowsOnly, Hooks, ForgetsInPlace, Freezes, BesideTheTrainer, Plateau,
]  # fmt: skip


WAYS = [(3, "inline"), (2, "threads")]


@cache
def of_one_device(kind: type[Manual]) -> dict[str, torch.Tensor]:
    return trained(kind, 21)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_replicas", "execution"), WAYS)
def test_a_step_by_hand_is_that_of_one_device(kind, num_replicas, execution) -> None:
    ours = trained(kind, 21, strategy=dpx.DPXStrategy(execution=execution), devices=num_replicas)
    assert_equal(ours, of_one_device(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_owners_elsewhere_change_nothing(kind) -> None:
    ours = trained(kind, 21, strategy=dpx.DPXStrategy("colocate"), devices=3)
    assert_equal(ours, of_one_device(kind))


class Counts(ByHand):
    """Python state and random numbers, which must not be touched twice."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.seen: list[float] = []
        self.schedule = {"warm": [0.0]}
        random.seed(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.seen.append(torch.rand(()).item() + random.random())
        self.schedule["warm"].append(float(self.count))
        output = super().training_step(batch, batch_idx)
        self.log("count", float(self.count))
        self.log("seen", float(sum(self.seen)))
        self.log("warm", float(sum(self.schedule["warm"])))
        return output


class SecondOrder(Counts):
    """The gradient of the gradients' norm."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        return super().training_step(batch, batch_idx)

    def between(self, optimizer: Any, batch_idx: int) -> None:
        batch = torch.ones(4, 8, device=self.device), torch.zeros(4, dtype=torch.long, device=self.device)
        gradients = torch.autograd.grad(self.loss(batch), list(self.parameters()), create_graph=True)
        self.manual_backward(sum(gradient.square().sum() for gradient in gradients))


class GraphOfGradients(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), create_graph=True)
        penalty = sum(parameter.grad.square().sum() for parameter in self.parameters())
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) + penalty)
        optimizer.step()
        optimizer.zero_grad()


class GradientsOfItsSlice(Counts):
    """A functional transform, whose gradients nobody sums."""

    def between(self, optimizer: Any, batch_idx: int) -> None:
        self.rows = self.last[0].sum()
        for parameter in self.parameters():
            parameter.grad = parameter.grad + self.rows

    def loss(self, batch: Any) -> torch.Tensor:
        self.last = batch
        return super().loss(batch)


class OptimizerOfTheStep(Counts):
    def between(self, optimizer: Any, batch_idx: int) -> None:
        torch.optim.SGD(self.parameters(), lr=0.01).step()


class UpdatesATarget(ByHand):
    """A running mean of the weights, written in the step, which replicas on one device share."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(8, 16)
        self.target.requires_grad_(False)

    def between(self, optimizer: Any, batch_idx: int) -> None:
        for target, source in zip(self.target.parameters(), self.net[0].parameters(), strict=True):
            target.data.mul_(0.9).add_(source.data, alpha=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


WHOLE = {
    SecondOrder: "create a graph of the gradients of parameters",
    GraphOfGradients: "creates a graph of the gradients",
    GradientsOfItsSlice: r"writes the gradient of net\.0\.weight by hand, differently on every slice",
    OptimizerOfTheStep: "steps a SGD on the module's parameters",
}


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's own about create_graph=True
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize(
    ("reducer", "num_replicas", "execution"), [*(("auto", *way) for way in WAYS), ("colocate", 3, "inline")]
)
def test_what_slices_cannot_do_one_replica_does_with_the_whole_batch(kind, reducer, num_replicas, execution) -> None:
    strategy = dpx.DPXStrategy(reducer, execution=execution)
    with pytest.warns(UserWarning, match=f"training_step gets all of its batches whole.*{WHOLE[kind]}"):
        ours = trained(kind, 21, strategy=strategy, devices=num_replicas)
    assert_equal(ours, of_one_device(kind))


class DrawsAndMakesAGraph(GraphOfGradients):
    """Its noise is of a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(2)

    def loss(self, batch: Any) -> torch.Tensor:
        noise = self.generator.normal(size=tuple(batch[0].shape))
        return super().loss((batch[0] + torch.from_numpy(noise).to(batch[0]), batch[1]))


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's own about create_graph=True
@pytest.mark.filterwarnings("ignore:dpx. training_step gets all of its batches whole")
def test_the_first_step_that_is_undone_draws_the_same_from_a_generator_of_the_module() -> None:
    # Nothing is rehearsed, so it shows in the first step, after which slices have drawn.
    strategy = dpx.DPXStrategy(verify="off")
    ours = trained(DrawsAndMakesAGraph, 21, strategy=strategy, devices=2)
    assert_equal(ours, of_one_device(DrawsAndMakesAGraph))


@pytest.mark.filterwarnings("ignore:dpx. training_step gets all of its batches whole")
@pytest.mark.parametrize("reducer", ["auto", "colocate"])
@pytest.mark.parametrize(("num_replicas", "execution"), WAYS)
def test_parameters_that_a_step_writes_are_written_once(reducer, num_replicas, execution) -> None:
    strategy = dpx.DPXStrategy(reducer, execution=execution)
    ours = trained(UpdatesATarget, 21, strategy=strategy, devices=num_replicas)
    assert_equal(ours, of_one_device(UpdatesATarget))


class GrowsWhileGradientsWait(Manual):
    """Gradients of two batches count in a step; between them the module gets a part, and its replicas are made anew."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 0 and batch_idx == 1:
            self.net.append(nn.Identity())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))
        if batch_idx % 2 == 1:
            optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


@pytest.mark.parametrize(("execution", "reducer"), [("inline", "auto"), ("threads", "auto"), ("inline", "colocate")])
def test_gradients_that_wait_outlast_the_replicas(execution: str, reducer: str) -> None:
    ours = trained(GrowsWhileGradientsWait, strategy=dpx.DPXStrategy(reducer, execution=execution), devices=3)
    assert_equal(ours, trained(GrowsWhileGradientsWait))


class AccumulatesByHand(Manual):
    """Steps in none of the batches that are looked at: its window has five, and looks are at the 1st, 2nd, 4th, 8th."""

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 5 == 4:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class WeighsClassesByHand(AccumulatesByHand):
    def loss(self, batch: Any) -> torch.Tensor:
        weight = torch.tensor([1.0, 2.0, 7.0], device=batch[0].device)
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=weight)


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class HalvesWhatAddsUp(AccumulatesByHand):
    """One device halves the sum of all batches, in every batch; a hook of a slice has what that has added."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].bias.register_post_accumulate_grad_hook(_halve)


@pytest.mark.parametrize("kind", [WeighsClassesByHand, HalvesWhatAddsUp])
def test_gradients_that_a_step_leaves_to_later_ones_are_compared(kind: type[AccumulatesByHand]) -> None:
    strategy = dpx.DPXStrategy(execution="inline", verify="raise")
    with pytest.raises(dpx.ParityError, match=r"gradients differ, relatively: net.*@left"):
        trained(kind, devices=2, strategy=strategy)
    trained(AccumulatesByHand, devices=2, strategy=dpx.DPXStrategy(execution="inline", verify="raise"))
