"""Manual optimization on replicas trains to the weights of one device."""

import threading
from concurrent.futures import ThreadPoolExecutor
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


class HoldsParameters(Manual):
    """Has them in a list of its own and, as recurrent networks do, in one of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(2, 4, batch_first=True)
        self.net = nn.Sequential(nn.Unflatten(1, (4, 2)), self.recurrent, Last(), nn.Linear(4, 3))
        self.trained = [list(self.net.parameters())]


class Last(nn.Module):
    def forward(self, outputs: Any) -> torch.Tensor:
        return outputs[0][:, -1]


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


class StepsAnotherBeforeBackward(Manual):
    """As actors and critics do: a graph is there while an optimizer steps what is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        actor, critic = self.optimizers()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        critic.zero_grad()
        self.manual_backward(self.critic(batch[0]).square().mean())
        critic.step()
        actor.zero_grad()
        self.manual_backward(loss)
        actor.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(self.critic.parameters(), 0.1)


def trained(kind: type[Manual], num_rows: int = 53, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, loader = kind(), make_loader(num_rows)
    trainer = make_trainer(**options)
    trainer.fit(model, loader)
    logged = {f"logged/{name}": value.cpu() for name, value in trainer.callback_metrics.items()}
    steps = torch.tensor(trainer.global_step)
    return {**model.state_dict(), **logged, "steps": steps}


@pytest.mark.parametrize("kind", [Manual, HoldsParameters, Scheduled, Accumulated, WithClosure, Plain, GAN])
def test_steps_by_hand_train_to_the_weights_of_one_device(kind, execution, recwarn) -> None:
    ours = trained(kind, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    assert not any("whole" in str(warning.message) for warning in recwarn)
    assert_equal(ours, trained(kind))


@pytest.mark.parametrize("reducer", ["auto", "colocate"])
def test_a_graph_outlives_the_step_of_what_is_no_part_of_it(reducer: str, execution: str, recwarn: Any) -> None:
    kind = StepsAnotherBeforeBackward
    ours = trained(kind, strategy=dpx.DPXStrategy(reducer, execution=execution), devices=3)
    assert not any("whole" in str(warning.message) for warning in recwarn)
    assert_equal(ours, trained(kind))


class SumsRows(Manual):
    """Has a loss of no rows, too."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).square().sum())
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Total length of `Tensor` across ranks is zero")
def test_an_empty_batch_is_stepped_by_hand(execution: str) -> None:
    def fit(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = SumsRows()
        make_trainer(**options).fit(model, [torch.randn(num_rows, 8) for num_rows in (6, 0, 5)])
        return model.state_dict()

    assert_equal(fit(strategy=dpx.DPXStrategy(execution=execution), devices=2), fit())


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


def test_a_step_that_not_all_replicas_take_is_that_of_one_device(execution) -> None:
    with pytest.warns(UserWarning, match="Its slices do not agree on what to do"):
        ours = trained(Forgets, strategy=dpx.DPXStrategy(execution=execution, verify="off"), devices=2)
    assert_equal(ours, trained(Forgets))


class ForgetsTheSecond(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().step()
        if self.global_rank == 0:
            self.optimizers().step()


def test_a_second_step_that_not_all_replicas_take_is_an_error(execution) -> None:
    """What the first one has done cannot be taken back."""
    with pytest.raises(dpx.CollectiveError, match=r"optimizer\.step\(\).*have ended"):
        trained(ForgetsTheSecond, strategy=dpx.DPXStrategy(execution=execution, verify="off"), devices=2)


class WithLBFGS(WithClosure):
    """Its line search calls the closure many times a step, and branches on the loss."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is found in many projects: it climbs first, and steps from there."""

    def __init__(self, params: Any, rho: float = 0.5, lr: float = 0.1) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        first = self.param_groups[0]["params"][0].device
        norms = [p.grad.norm().to(first) for group in self.param_groups for p in group["params"]]
        norm = torch.stack(norms).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.data.clone()
                parameter.add_(parameter.grad * (group["rho"] / (norm + 1e-12)).to(parameter.device))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step(zero_grad=True)
        closure()
        self.second_step()
        return loss


class WithSAM(WithClosure):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters())


class SAMByTwoSteps(WithSAM):
    """As its README shows for Lightning."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        first = F.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(first)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.second_step(zero_grad=True)
        self.log("loss", first)


class SAMByItsBase(WithSAM):
    """Steps the optimizer that is inside the optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        F.cross_entropy(self.net(batch[0]), batch[1]).backward()
        optimizer.base_optimizer.step()


class CallsClosure(torch.optim.SGD):
    """Calls its closure never, once, twice and three times by turns, and wants to know the loss."""

    def step(self, closure: Any = None) -> Any:
        self.calls = getattr(self, "calls", -1) + 1
        losses = []
        for _ in range(self.calls % 4):
            with torch.enable_grad():
                losses.append(float(closure().detach()))
        for group in self.param_groups:
            group["lr"] = 0.1 * (1 + sum(losses))
        super().step()
        return sum(losses)


class CountsClosures(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        self.log("losses", optimizer.step(closure))

    def configure_optimizers(self) -> Any:
        return CallsClosure(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("num_replicas", "execution"), [(3, "inline"), (2, "threads")])
@pytest.mark.parametrize("kind", [WithLBFGS, WithSAM, SAMByTwoSteps, SAMByItsBase, CountsClosures])
def test_optimizers_that_call_their_closure_again_or_have_steps_of_their_own(kind, num_replicas, execution) -> None:
    # A line search turns another order of additions into another step: in double precision it stays far below 1e-5.
    ours = trained(kind, strategy=dpx.DPXStrategy(execution=execution), devices=num_replicas, precision="64-true")
    for name, value in trained(kind, precision="64-true").items():
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9)


class ClipsScaled(Manual):
    """Half precision by hand: what is scaled is unscaled once, before it is clipped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        if batch_idx % 2:
            scaler = self.trainer.precision_plugin.scaler
            scaler.unscale_(optimizer.optimizer)
            self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))
            scaler.step(optimizer.optimizer)
            scaler.update()
        else:
            optimizer.step()


def test_a_scaler_acts_once(execution) -> None:
    scaled = [
        trained(
            ClipsScaled,
            32,
            strategy=dpx.DPXStrategy(execution=execution),
            devices=devices,
            plugins=dpx.DPXPrecision("16-mixed"),
        )
        for devices in (2, 1)
    ]
    ours, one = scaled
    for name, value in one.items():
        torch.testing.assert_close(ours[name], value, rtol=2e-2, atol=2e-2)


class FailsInItsClosure(WithSAM):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        calls = []

        def closure() -> torch.Tensor:
            calls.append(1)
            if self.global_rank == 1 and len(calls) == 2:
                raise ArithmeticError("on purpose")
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        self.optimizers().step(closure)


def test_an_error_in_a_closure_ends_the_optimizers_step(execution) -> None:
    with pytest.raises(ArithmeticError, match="on purpose"):
        trained(FailsInItsClosure, strategy=dpx.DPXStrategy(execution=execution, verify="off"), devices=3)
    assert not [thread for thread in threading.enumerate() if thread.name == "dpx-optimizer"]


class FailsInItsOptimizer(WithClosure):
    def configure_optimizers(self) -> Any:
        return Fails(self.parameters(), lr=0.1)


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        raise ArithmeticError("on purpose")


def test_an_error_in_an_optimizer_is_raised_as_it_is(execution) -> None:
    with pytest.raises(ArithmeticError, match="on purpose"):
        trained(FailsInItsOptimizer, strategy=dpx.DPXStrategy(execution=execution), devices=3)
    assert not [thread for thread in threading.enumerate() if thread.name == "dpx-optimizer"]


class StepsInAThread(Manual):
    """Its optimizer steps in a thread that the step starts, and waits for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(optimizer.step).result()


@pytest.mark.parametrize("verify", ["off", "warn"])
def test_an_optimizer_that_steps_in_a_thread_of_the_users_own_steps_for_the_whole_batch(execution, verify) -> None:
    strategy = dpx.DPXStrategy(execution=execution, verify=verify)
    with pytest.warns(UserWarning, match=r"calls optimizer\.step\(\) in a thread of its own"):
        ours = trained(StepsInAThread, strategy=strategy, devices=2)
    assert_equal(ours, trained(StepsInAThread))


class ReadsItsPool(LightningModule):
    """A pool of what was made before, as for a discriminator: rows of one slice are read by the next one's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Linear(8, 8)
        self.judge = nn.Linear(8, 1)
        self.pool: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_maker, of_judge = self.optimizers()
        made = self.maker(batch[0])
        of_maker.zero_grad()
        self.manual_backward(-self.judge(made).mean())
        of_maker.step()
        for row in made.detach():
            self.pool.append(row)
        oldest = torch.stack(self.pool[: len(made)])
        of_judge.zero_grad()
        self.manual_backward(self.judge(oldest).square().mean())
        of_judge.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.maker, self.judge)]


@pytest.mark.filterwarnings("ignore:dpx.*is not what it is on one device")
def test_what_one_device_puts_into_a_list_another_one_reads_in_the_same_batch(sim: Any, execution: str) -> None:
    model = ReadsItsPool()
    strategy = dpx.DPXStrategy(execution=execution)
    make_trainer(accelerator="sim", devices=2, strategy=strategy, limit_train_batches=1).fit(model, make_loader())
    assert len(model.pool) > 0
    assert {str(row.device) for row in model.pool} == {"sim:0"}
