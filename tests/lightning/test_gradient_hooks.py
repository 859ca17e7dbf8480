"""In automatic optimization hooks find the gradients of one device, and what they write counts, wherever owners are."""

from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import assert_equal, make_loader, make_trainer
from tests.lightning.manual.test_manual import SAM

pytestmark = pytest.mark.usefixtures("hardware")


class Hooked(LightningModule):
    """Rows (B, 8) to logits (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ClipsBeforeStep(Hooked):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClipsByConfiguration(Hooked):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClipsByLightning(Hooked):
    """Lightning clips the optimizer's parameters, in the middle of what the hook does by itself."""

    def note(self, name: str) -> None:
        norms = [parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]
        if norms:
            self.trainer.callback_metrics[name] = torch.stack([norm.cpu() for norm in norms]).norm()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(0.1)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.note("clipped")
        self.net[0].weight.grad.mul_(0.5)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note("before zero_grad")


class ClipsAndIsClipped(Hooked):
    """By the hook first, then by the trainer."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(0.1)


class ClipsAfterBackward(Hooked):
    def on_after_backward(self) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


class LogsNorms(Hooked):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm())


class ForgetsOne(Hooked):
    def on_after_backward(self) -> None:
        self.net[0].weight.grad = None


class StepsItself(Hooked):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()


class ClampsWeights(Hooked):
    """As a Wasserstein GAN's critic: written through ``.data``, which leaves no trace."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class ClampsBeforeStep(Hooked):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class OwnBackward(Hooked):
    """Called once, with the loss of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.losses.append(float(loss.detach()))
        (loss * 0.5).backward(*args, retain_graph=True, **kwargs)

    def on_train_end(self) -> None:
        for index, loss in enumerate(self.losses):
            self.trainer.callback_metrics[f"loss/{index}"] = torch.tensor(loss)


class WithSAM(Hooked):
    """Its optimizer calls the closure twice, with parameters that it has moved in between."""

    def configure_optimizers(self) -> Any:
        return SAM(self.parameters())


class WithLookAhead(Hooked):
    """Its optimizer moves the parameters before it calls the closure for the first time."""

    def configure_optimizers(self) -> Any:
        return LooksAhead(self.parameters(), lr=0.1, momentum=0.9)


class LooksAhead(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        momenta = []
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    momentum = self.state[parameter].get("momentum_buffer")
                    if momentum is not None:
                        parameter.data -= 0.05 * momentum
                        momenta.append((parameter, momentum.clone()))
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter, momentum in momenta:
                parameter.add_(momentum, alpha=0.05)
        super().step()
        return loss


class Halves(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.mul_(0.5)


KINDS = [
    ClipsBeforeStep, ClipsByConfiguration, ClipsByLightning, ClipsAndIsClipped, ClipsAfterBackward, LogsNorms,
    ForgetsOne, StepsItself, ClampsWeights, ClampsBeforeStep, OwnBackward, WithSAM, WithLookAhead,
]  # fmt: skip


def trained(kind: type[Hooked], num_rows: int = 21, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    clipped = {"gradient_clip_val": 0.3} if kind in (ClipsAndIsClipped, ClipsByConfiguration) else {}
    callbacks = [*options.pop("callbacks", []), *([Halves()] if kind is ClipsAfterBackward else [])]
    trainer = make_trainer(callbacks=callbacks, max_epochs=2, **clipped, **options)
    trainer.fit(model, make_loader(num_rows))
    seen = {**model.state_dict(), **trainer.callback_metrics}
    return {name: value.detach().cpu().clone() for name, value in seen.items()}


@cache
def of_one_device(kind: type[Hooked]) -> dict[str, torch.Tensor]:
    return trained(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_replicas", "execution", "reducer"),
    [(3, "inline", "auto"), (2, "threads", "auto"), (3, "auto", "colocate"), (2, "inline", "colocate")],
)
def test_hooks_find_and_write_what_they_do_on_one_device(kind, num_replicas, execution, reducer) -> None:
    strategy = dpx.DPXStrategy(reducer, execution=execution)
    assert_equal(trained(kind, strategy=strategy, devices=num_replicas), of_one_device(kind))


class TeacherFollows(Hooked):
    """A hook between steps writes a frozen part through ``.data``, which leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 3).requires_grad_(False)
        self.student = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.student(batch[0]) + self.teacher(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        for source, target in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            target.data = 0.9 * target.data + 0.1 * source.data

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.5)


WINDOW_OF_3 = {"accumulate_grad_batches": 3}


class TeacherFollowsByHand(TeacherFollows):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(("kind", "options"), [(TeacherFollows, WINDOW_OF_3), (TeacherFollowsByHand, {})], ids=str)
def test_what_hooks_write_without_a_trace_between_steps_counts(kind: type[Hooked], options: dict[str, Any]) -> None:
    ours = trained(kind, 53, strategy=dpx.DPXStrategy(execution="inline"), devices=2, **options)
    assert_equal(ours, trained(kind, 53, **options))


class GrowsLater(Callback):
    """A new submodule makes the replicas anew."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            pl_module.net.append(nn.Identity())


@pytest.mark.parametrize("kind", [ClampsWeights, ClampsBeforeStep, ClipsBeforeStep, ClipsAfterBackward, LogsNorms])
def test_what_hooks_write_counts_after_replicas_were_made_anew(kind: type[Hooked]) -> None:
    theirs = trained(kind, callbacks=[GrowsLater()])
    ours = trained(kind, callbacks=[GrowsLater()], strategy=dpx.DPXStrategy("colocate", execution="inline"), devices=2)
    assert_equal(ours, theirs)


class Centers(Hooked):
    """Centers its rows by an average that a hook between forward and backward keeps of the last batch's mean.

    The step writes that mean into a buffer that its graph has saved, so the backward needs the slice's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.ones(3))
        self.register_buffer("center", torch.zeros(3))
        self.found: list[torch.Tensor] = []

    def keep(self, mean: torch.Tensor) -> None:
        self.last.copy_(mean)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.net(batch[0]) - self.center
        self.keep(rows.detach().mean(0))
        return F.cross_entropy(rows, batch[1]) + (rows * self.last.sign()).mean() * 0

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.found.append(self.last.cpu().clone())
        self.center.lerp_(self.last, 0.5)


class CentersAnew(Centers):
    def keep(self, mean: torch.Tensor) -> None:
        self.last = mean


class CentersBeforeBackward(Centers):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.found.append(self.last.cpu().clone())
        self.center.lerp_(self.last, 0.5)


class CentersInBackward(Centers):
    def keep(self, mean: torch.Tensor) -> None:
        self.last.lerp_(mean, 0.5)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.found_last = self.last.cpu().clone()
        loss.backward(*args, **kwargs)

    def on_train_batch_end(self, *args: Any) -> None:
        self.found.append(self.found_last)


@pytest.mark.parametrize("kind", [Centers, CentersAnew, CentersBeforeBackward, CentersInBackward])
@pytest.mark.parametrize(
    ("num_replicas", "execution", "micro_batches"), [(2, "inline", 1), (3, "threads", 1), (2, "inline", 2)]
)
def test_hooks_before_backward_find_the_buffers_of_the_whole_batch(
    kind, num_replicas, execution, micro_batches
) -> None:
    def centers(**where: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = kind()
        make_trainer(max_epochs=2, **where).fit(model, make_loader(22, 8))
        found = {f"found {index}": value for index, value in enumerate(model.found)}
        return {**{name: value.cpu() for name, value in model.state_dict().items()}, **found}

    strategy = dpx.DPXStrategy(execution=execution, micro_batches=micro_batches, verify="raise")
    assert_equal(centers(strategy=strategy, devices=num_replicas), centers())
