"""A memory budget with manual optimization: steps by hand are profiled as they are, and end at the same bits."""

import warnings
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import make_trainer, simulated_bytes
from tests.lightning.manual.test_manual import SAM

MIB = 2**20


def layers(depth: int = 4, out: int = 1) -> nn.Sequential:
    """Rows (B, 64) to (B, out)."""
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(64, out))


class ByHand(LightningModule):
    """A generator and a critic with two optimizers, toggled; what subclasses change is how they step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = layers(out=64), layers()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        rows = batch[0]
        for_generator, for_critic = self.optimizers()
        noise = torch.randn(rows.shape).to(rows.device)
        self.toggle_optimizer(for_critic)
        loss = self.critic_loss(rows, noise)
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)
        self.toggle_optimizer(for_generator)
        loss = -self.critic(self.generator(noise)).mean()
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.log("loss", loss)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def critic_loss(self, rows: Tensor, noise: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        return F.softplus(-self.critic(rows)).mean() + F.softplus(self.critic(fake)).mean()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2, eps=1e-4) for part in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 2) for one in optimizers]


class Penalized(ByHand):
    """WGAN-GP."""

    def critic_loss(self, rows: Tensor, noise: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        mixed = (0.3 * rows + 0.7 * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return self.critic(fake).mean() - self.critic(rows).mean() + (gradient.norm(dim=1) - 1).pow(2).mean()


class Accumulating(ByHand):
    """Several backwards, and a step of the optimizer every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[1]
        for factor in (1, 2):
            self.manual_backward(self.critic_loss(batch[0] * factor, batch[0]))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Sharpness(ByHand):
    """The closure is called twice."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.critic_loss(batch[0], batch[0])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return SAM(self.critic.parameters(), lr=0.1)


class Keeping(ByHand):
    """Holds its optimizer and a scheduler, and changes the learning rate."""

    def on_train_start(self) -> None:
        self.mine = self.optimizers()[1]
        self.several = [self.mine, self.lr_schedulers()[1]]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.mine.zero_grad()
        self.manual_backward(self.critic_loss(batch[0], batch[0] * 2))
        self.mine.step()
        self.mine.param_groups[0]["lr"] *= 0.9
        self.several[1].step()


def loader(rows: int = 256, batches: int = 3) -> DataLoader[Any]:
    data = torch.randn(batches * rows, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(data), rows)


def fit(kind: type[LightningModule], batches: int = 3, **options: Any) -> dict[str, Tensor]:
    """All that can be seen of a run: weights, optimizers, learning rates, what is logged and the next random number."""
    torch.manual_seed(0)
    module = kind()
    trainer = make_trainer(max_epochs=1, **options)
    trainer.fit(module, loader(batches=batches))
    seen = {name: value.cpu() for name, value in module.state_dict().items()} | trainer.callback_metrics
    states = [entry for one in trainer.optimizers for state in one.state.values() for entry in state.values()]
    tensors = {f"state {index}": entry.cpu() for index, entry in enumerate(states) if isinstance(entry, Tensor)}
    rates = torch.tensor([group["lr"] for one in trainer.optimizers for group in one.param_groups])
    return {**seen, **tensors, "rates": rates, "draws": torch.rand(3)}


KINDS = [ByHand, Penalized, Accumulating, Sharpness, Keeping]
BUDGETS = {
    ByHand: (1.5, 1.1),
    Penalized: (2.5, 1.6),
    Accumulating: (1.5, 1.1),
    Sharpness: (1.5, 1.0),
    Keeping: (1.5, 1.1),
}


class Watch(Callback):
    """The plans of a run; by device and step, the most bytes that were allocated beyond those of others."""

    def __init__(self) -> None:
        self.plans: dict[torch.device, Any] = {}
        self.predicted: dict[torch.device, int] = {}
        self.peaks: list[int] = []
        self.held = simulated_bytes()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        self.plans = {device: plan for device, (plan, _) in strategy.memory_plans.items()}
        if trainer.strategy.root_device.type == "sim":
            sim = torch.get_device_module("sim")
            self.peaks.append(sim.max_memory_allocated(0) - self.held)
            sim.reset_peak_memory_stats(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_by_hand_within_a_budget_ends_where_it_does_without(
    kind: type[LightningModule], devices: int, hardware: str
) -> None:
    if hardware == "cpu" and devices > 1:
        pytest.skip("they are one")
    budget = int(BUDGETS[kind][devices - 1] * MIB)
    plain = fit(kind, strategy=dpx.DPXStrategy(execution="inline", verify="off"), devices=devices)
    watch = Watch()
    strategy = dpx.DPXStrategy(memory_budget=budget, execution="inline", verify="off")
    ours = fit(kind, strategy=strategy, devices=devices, callbacks=[watch])
    assert any(not plan.keeps_all for plan in watch.plans.values())
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name
    assert max(watch.peaks[1:], default=0) <= budget


@pytest.mark.parametrize("kind", KINDS)
def test_the_rehearsal_of_a_step_by_hand_leaves_no_trace(kind: type[LightningModule], caplog: Any) -> None:
    plain = fit(kind, strategy=dpx.DPXStrategy(execution="inline", verify="off"), devices=2)
    ours = fit(kind, strategy=dpx.DPXStrategy(execution="inline", verify="raise"), devices=2)
    assert "new weights" in caplog.text
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


def budget_between(kind: type[LightningModule], precision: Any) -> int:
    """Bytes on the host halfway between what a plan can do with and what the step takes without one.

    Products in half precision take room of their own there, on each kind of processor another.
    """
    watch, ample = Watch(), 1024 * MIB
    plugins = dpx.DPXPrecision(precision)
    fit(kind, batches=1, strategy=dpx.DPXStrategy(memory_budget=ample), callbacks=[watch], plugins=plugins)
    (plan,) = watch.plans.values()
    held = ample - plan.budget
    strategy = dpx.DPXStrategy(memory_budget=held + 1024)
    with pytest.raises(dpx.BudgetError) as refused:
        fit(kind, batches=1, strategy=strategy, plugins=dpx.DPXPrecision(precision))
    assert refused.value.smallest is not None
    return held + (refused.value.smallest + plan.unplanned_peak) // 2


def test_a_step_by_hand_in_mixed_precision() -> None:
    plain = fit(ByHand, precision="bf16-mixed")
    budget, watch = budget_between(ByHand, "bf16-mixed"), Watch()
    ours = fit(ByHand, strategy=dpx.DPXStrategy(memory_budget=budget), precision="bf16-mixed", callbacks=[watch])
    assert all(not plan.keeps_all for plan in watch.plans.values())
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # the scaler left a step out
@pytest.mark.parametrize("kind", [ByHand, Accumulating, Keeping])
def test_a_step_by_hand_with_a_scaler(kind: type[LightningModule], hardware: str) -> None:
    """Half precision: losses are scaled, and steps with an infinite gradient are left out, while memory is planned."""
    devices = 1 if hardware == "cpu" else 2
    strategy, watch = dpx.DPXStrategy(execution="inline", verify="off"), Watch()
    plain = fit(kind, strategy=strategy, devices=devices, plugins=dpx.DPXPrecision("16-mixed"))
    budget = budget_between(kind, "16-mixed") if hardware == "cpu" else MIB
    strategy = dpx.DPXStrategy(execution="inline", verify="off", memory_budget=budget)
    ours = fit(kind, strategy=strategy, devices=devices, plugins=dpx.DPXPrecision("16-mixed"), callbacks=[watch])
    assert any(not plan.keeps_all for plan in watch.plans.values())
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


def test_the_callback_plans_a_step_by_hand_for_another_strategy() -> None:
    plain, planner = fit(ByHand), dpx.ActivationPlanner(budget=0.5)
    ours = fit(ByHand, callbacks=[planner])
    assert planner.plan is not None
    assert not planner.plan.keeps_all
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


class Forgets(ByHand):
    """Notes whether a gradient that it forgets is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[bool] = []

    def critic_loss(self, rows: Tensor, noise: Tensor) -> Tensor:
        gradient = self.critic[0].weight.grad
        if gradient is not None:
            before = weakref.ref(gradient.untyped_storage())
            del gradient
            self.optimizers()[1].zero_grad()
            self.gone.append(before() is None)
        return super().critic_loss(rows, noise)


def test_a_gradient_that_a_step_forgets_is_gone() -> None:
    module = Forgets()
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    trainer.fit(module, loader())
    assert module.gone
    assert all(module.gone)


class LooksFirst(ByHand):
    """Its first step trains nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            super().training_step(batch, batch_idx)


def test_a_first_step_that_trains_nothing_is_no_error() -> None:
    plain, ours = fit(LooksFirst), fit(LooksFirst, strategy=dpx.DPXStrategy(memory_budget=8 * MIB))
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


class InTurns(ByHand):
    """The critic in one batch, the generator in the next one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for_generator, for_critic = self.optimizers()
        if batch_idx % 2:
            loss, optimizer = -self.critic(self.generator(batch[0])).mean(), for_generator
        else:
            loss, optimizer = self.critic_loss(batch[0], batch[0] * 2), for_critic
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_steps_that_differ_are_planned_for_once_they_are_seen(sim: Any, caplog: Any) -> None:
    plain = fit(InTurns, strategy=dpx.DPXStrategy(), accelerator="sim", batches=6)
    watch = Watch()
    strategy = dpx.DPXStrategy(memory_budget=int(1.4 * MIB))
    ours = fit(InTurns, strategy=strategy, callbacks=[watch], accelerator="sim", batches=6)
    assert "a step saved" in caplog.text
    assert "(generator" in caplog.text
    assert caplog.text.count("profiles a step on") == 3
    assert "the worst of 2 steps that are planned for" in caplog.text  # of one shape
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name
    (plan,) = watch.plans.values()
    assert any(name.startswith("generator") for name in plan.dropped)
    assert max(watch.peaks[4:]) <= 1.4 * MIB


class InTheEnd(ByHand):
    """The critic in three batches; the generator, which keeps more, in the last one of the run."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for_generator, for_critic = self.optimizers()
        if batch_idx == 3:
            loss, optimizer = -self.critic(self.generator(self.generator(batch[0]))).mean(), for_generator
        else:
            loss, optimizer = self.critic(batch[0]).mean(), for_critic
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_what_the_last_step_takes_beyond_the_budget_is_told_at_the_end_of_the_run(sim: Any) -> None:
    budget = int(1.2 * MIB)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(InTheEnd, strategy=dpx.DPXStrategy(memory_budget=budget), accelerator="sim", batches=4)
    (text,) = [str(one.message) for one in told if "memory_budget allows" in str(one.message)]
    assert "were allocated on sim:0 at a time in the last steps, where memory_budget allows 1.2 MiB" in text


class InAHook(ByHand):
    """The backward comes after the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss = self.critic(batch[0]).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[1]
        optimizer.zero_grad()
        self.manual_backward(self.loss)
        del self.loss
        optimizer.step()


def test_a_backward_in_a_hook_is_in_no_plan_which_is_told(caplog: Any) -> None:
    plain = fit(InAHook, batches=12)
    warned = "8 training steps in a row ran no backward.* What a hook runs a backward of, such as on_train_batch_end"
    with pytest.warns(UserWarning, match=warned):
        ours = fit(InAHook, strategy=dpx.DPXStrategy(memory_budget=MIB), batches=12)
    assert caplog.text.count("ran no backward on this batch") == 1
    assert caplog.text.count("profiles a step on") == 1, "one run of each later step tells as much"
    assert "planned by the forward" not in caplog.text, "a backward follows that no plan knows"
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


class WithoutGradients(ByHand):
    """Draws other weights, and keeps those that are better; the loss has a graph that nothing uses."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.critic(batch[0]).mean()
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter += 1e-3 * torch.randn_like(parameter) * loss.sign()


@pytest.mark.parametrize("accelerator", ["cpu", "sim"])
def test_a_step_that_never_runs_a_backward_is_planned_by_its_forward(sim: Any, caplog: Any, accelerator: str) -> None:
    plain = fit(WithoutGradients, strategy=dpx.DPXStrategy(), batches=20, accelerator=accelerator)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = fit(
            WithoutGradients, strategy=dpx.DPXStrategy(memory_budget=8 * MIB), batches=20, accelerator=accelerator
        )
    assert [str(one.message) for one in told if "in a row" in str(one.message)] == []
    assert caplog.text.count("profiles a step on") == 2, "the first, and the one that is planned by"
    assert caplog.text.count("planned by the forward alone, as 8 training steps in a row ran no backward") == 1
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


def test_a_forward_that_does_not_fit_is_told() -> None:
    with pytest.warns(UserWarning, match="8 training steps in a row ran no backward.* may exceed the budget"):
        fit(WithoutGradients, strategy=dpx.DPXStrategy(memory_budget=int(0.6 * MIB)), batches=10)


class BeginsLate(WithoutGradients):
    """Trains from its sixteenth batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 15:
            ByHand.training_step(self, batch, batch_idx)
        else:
            super().training_step(batch, batch_idx)


def test_a_step_that_was_planned_by_its_forward_is_planned_once_it_runs_a_backward() -> None:
    watch = Watch()
    fit(BeginsLate, strategy=dpx.DPXStrategy(memory_budget=int(1.5 * MIB)), batches=18, callbacks=[watch])
    assert any(not plan.keeps_all for plan in watch.plans.values())


class WarmsUp(ByHand):
    """Trains from its third batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx > 1:
            super().training_step(batch, batch_idx)
        else:
            self.log("value", self.critic(batch[0]).mean())


def test_a_step_by_hand_is_planned_once_it_runs_a_backward() -> None:
    plain = fit(WarmsUp, batches=4)
    watch = Watch()
    ours = fit(WarmsUp, strategy=dpx.DPXStrategy(memory_budget=int(1.5 * MIB)), batches=4, callbacks=[watch])
    assert any(not plan.keeps_all for plan in watch.plans.values())
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name


class Small(ByHand):
    """So little is kept for its backward that no profile looks at any of it."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(64, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[1]
        optimizer.zero_grad()
        self.manual_backward(self.critic(batch[0][:2]).mean())
        optimizer.step()


def test_a_small_step_by_hand_is_planned_at_once(caplog: Any) -> None:
    fit(Small, strategy=dpx.DPXStrategy(memory_budget=8 * MIB))
    assert "ran no backward" not in caplog.text
    assert "everything fits" in caplog.text


class RunsOutOfMemory(ByHand):
    """In one of its runs, with its generator frozen by ``toggle_optimizer``, as on a device that is nearly full."""

    runs = 0
    failing = 0

    def critic_loss(self, rows: Tensor, noise: Tensor) -> Tensor:
        type(self).runs += 1
        if self.runs == self.failing:
            raise torch.OutOfMemoryError("not enough memory")
        return super().critic_loss(rows, noise)


@pytest.mark.parametrize("failing", range(1, 5))
def test_a_tried_step_that_runs_out_of_memory_leaves_nothing_frozen(failing: int, caplog: Any) -> None:
    RunsOutOfMemory.runs = 0
    RunsOutOfMemory.failing = failing
    torch.manual_seed(0)
    module = RunsOutOfMemory()
    batches = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=64)
    strategy = dpx.DPXStrategy(memory_budget="64MiB", plan_cache=False)
    make_trainer(max_epochs=1, strategy=strategy, accelerator="cpu", devices=1).fit(module, batches)
    assert RunsOutOfMemory.runs > failing, "it was tried again"
    assert "predicted of 64.0 MiB allowed" in caplog.text
    assert all(parameter.requires_grad for parameter in module.parameters())
