"""A step that comes to the module by something outside of it: a check leaves no trace there, and batches go whole."""

import itertools
import threading
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import StepsByHand, make_loader, make_trainer

ACTOR: list[threading.Semaphore] = []
MODELS: list[Any] = []  # as registries of plugins have it


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.num_steps = 0
        self.seen: list[int] = []
        self.register_buffer("mean", torch.zeros(3))
        MODELS[:] = [self]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counts(Model):
    def loss(self, batch: Any) -> torch.Tensor:
        MODELS[0].num_steps += 1
        return super().loss(batch)


class CountsBesideAHook(Counts):
    """A parameter has a hook, which comes to nothing of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.net.weight.register_hook(torch.clone)


class FilledByAnActor(Model):
    """A thread puts experiences into the module while steps run, checks among them."""

    def __init__(self) -> None:
        super().__init__()
        ACTOR[:] = [threading.Semaphore(0), threading.Semaphore(0)]

    def loss(self, batch: Any) -> torch.Tensor:
        ACTOR[0].release()
        ACTOR[1].acquire()
        return super().loss(batch)


class Appends(Model):
    def loss(self, batch: Any) -> torch.Tensor:
        MODELS[0].seen.append(1)
        return super().loss(batch)


class WritesABuffer(Model):
    def loss(self, batch: Any) -> torch.Tensor:
        logits = self.net(batch[0])
        with torch.no_grad():
            MODELS[0].mean.lerp_(logits.mean(0).to(self.device), 0.1)
        return F.cross_entropy(logits - self.mean, batch[1])


class WritesBuffersOfOneMemory(Model):
    """Both are rows of one table."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(2, 3)
        self.register_buffer("first", table[0])
        self.register_buffer("last", table[1])

    def loss(self, batch: Any) -> torch.Tensor:
        MODELS[0].first.add_(1.0)
        MODELS[0].last.add_(1.0)
        return super().loss(batch)


class AddsUpGradients(Model):
    """Two batches for a step, by hand: gradients that a check left would be added to."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(F.cross_entropy(MODELS[0].net(batch[0]), batch[1]))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def fitted(kind: type[Model], **options: Any) -> tuple[dict[str, torch.Tensor], int, list[int]]:
    torch.manual_seed(0)
    model = kind()
    loader = make_loader(32, 8)
    make_trainer(max_epochs=2, **options).fit(model, loader, loader)
    return {name: value.cpu() for name, value in model.state_dict().items()}, model.num_steps, model.seen


@pytest.mark.parametrize(
    "kind", [Counts, CountsBesideAHook, Appends, WritesABuffer, WritesBuffersOfOneMemory, AddsUpGradients]
)
@pytest.mark.parametrize("accelerator", ["cpu", "sim"])
def test_what_leads_to_the_module_from_outside(kind: type[Model], accelerator: str, sim: Any) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = fitted(kind, accelerator=accelerator, devices=2, strategy=dpx.DPXStrategy(execution="inline"))
    assert any("of the module itself, to which something outside of it leads" in str(one.message) for one in told)
    one = fitted(kind)
    assert ours[1:] == one[1:]
    for name, value in one[0].items():
        torch.testing.assert_close(ours[0][name], value)


class KeepsNormsByAHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.net.weight.register_hook(lambda gradient: self.norms.append(float(gradient.norm())))


class CountsByAHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.net.weight.register_post_accumulate_grad_hook(self.count)

    def count(self, parameter: torch.Tensor) -> None:
        self.calls += 1


class NotesByAHook(Model):
    """What it leaves is the same however often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.has_run = False
        self.width = 0
        self.net.weight.register_hook(self.note)

    def note(self, gradient: torch.Tensor) -> None:
        self.has_run = True
        self.width = gradient.shape[1]


class NotesByAHookByHand(StepsByHand, NotesByAHook):
    pass


class CountsByAHookByHand(StepsByHand, CountsByAHook):
    pass


class MasksByAHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net.weight.register_hook(lambda gradient: gradient * 0.5)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (KeepsNormsByAHook, "KeepsNormsByAHook.norms"),
        (CountsByAHook, "CountsByAHook.calls"),
        (CountsByAHookByHand, "CountsByAHookByHand.calls"),
    ],
)
def test_what_hooks_of_parameters_keep_of_every_slice_is_told(
    kind: type[Model], name: str, recwarn: pytest.WarningsRecorder
) -> None:
    """It is no way of a step to the module, for which batches would go whole; but a count was K times what it is."""
    fitted(kind, devices=2, strategy=dpx.DPXStrategy(execution="inline"))
    told = [str(one.message) for one in recwarn]
    assert not any("batches whole" in one for one in told)
    assert any(f"hooks of parameters change {name}, once for the gradient of each slice" in one for one in told)


@pytest.mark.parametrize("kind", [NotesByAHook, NotesByAHookByHand])
def test_what_hooks_of_parameters_leave_as_on_one_device_is_no_difference(kind: type[Model]) -> None:
    """Any change by a hook was told to differ, and was an error here."""
    fitted(kind, devices=2, strategy=dpx.DPXStrategy(execution="inline", verify="raise"))


class Generated(nn.Linear):
    """Makes its code anew whenever it is pickled, as what torch.fx generates does."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.lines = {1: 1}

    def __getstate__(self) -> dict[str, Any]:
        self.lines = dict(self.lines)
        return vars(self).copy()


class HasGenerated(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net = Generated()


class HasGeneratedAndAHook(HasGenerated):
    def __init__(self) -> None:
        super().__init__()
        self.net.weight.register_hook(torch.clone)


@pytest.mark.parametrize("kind", [HasGenerated, HasGeneratedAndAHook])
def test_what_a_module_changes_of_itself_when_it_is_copied_is_not_the_steps_doing(
    kind: type[Model], recwarn: pytest.WarningsRecorder
) -> None:
    ours = fitted(kind, devices=2, strategy=dpx.DPXStrategy(execution="inline", verify="raise"))
    assert not [str(one.message) for one in recwarn if "dpx" in str(one.message)]
    for name, value in fitted(kind)[0].items():
        torch.testing.assert_close(ours[0][name], value)


def test_that_hooks_of_parameters_get_gradients_of_slices_is_part_of_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fitted(MasksByAHook, devices=2, strategy=dpx.DPXStrategy(execution="inline", verify="raise"))
    assert "training_step). Hooks of parameters get the gradient of each slice." in caplog.text


def test_what_another_thread_puts_into_the_module_meanwhile_stays_there() -> None:
    module = FilledByAnActor()
    ended = threading.Event()

    def act() -> None:
        for number in itertools.count():
            ACTOR[0].acquire()
            if ended.is_set():
                return
            module.seen.append(number)
            ACTOR[1].release()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution="inline"), devices=2).fit(
            module, make_loader(), make_loader()
        )
    finally:
        ended.set()
        ACTOR[0].release()
        thread.join()
    assert len(module.seen) > 4
    assert module.seen == list(range(len(module.seen)))
