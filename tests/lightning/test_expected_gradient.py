"""What is known of Lightning's backward before it begins."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lightning_dpx.lightning.expected_gradient import LossGradient, names_gradients
from tests.conftest import dpx, make_loader, make_trainer, seeded


class NotesGradient(Callback):
    """What is expected and freed, asked where training_step would; and what the optimizer finds."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        gradient = LossGradient(trainer.strategy.session)
        self.seen.append((bool(gradient.zeroed()), gradient.expected().is_certain))


class ZeroesByItself(Callback):
    def on_before_zero_grad(self, *_: Any) -> None:
        """Looks."""


def noted(*others: Callback, **options: Any) -> list[tuple[bool, bool]]:
    notes = NotesGradient()
    strategy = dpx.DPXStrategy(micro_batches=2, verify="off")
    trainer = make_trainer(
        strategy=strategy, max_epochs=1, limit_train_batches=3, limit_val_batches=0, callbacks=[notes, *others],
        **options,
    )  # fmt: skip
    trainer.fit(seeded(), make_loader())
    return notes.seen


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_gradients_go_where_a_window_begins_and_no_hook_looks() -> None:
    assert noted() == [(True, False)] * 3
    assert noted(accumulate_grad_batches=2) == [(True, False), (False, False), (True, False)]
    assert noted(ZeroesByItself()) == [(False, False)] * 3


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_on_an_accelerator_nothing_waits_for_a_gradient_that_is_certain(sim: Any) -> None:
    class Looks(Callback):
        def on_before_backward(self, *_: Any) -> None:
            """Might change the loss."""

    assert noted(accelerator="sim") == [(True, True)] * 3
    assert noted(Looks(), accelerator="sim") == [(True, False)] * 3


class ReadsInHelper(nn.Linear):
    def norm(self) -> torch.Tensor:
        return max(one.grad.norm() for one in self.parameters())


class ReadsInHook(LightningModule):
    def on_after_backward(self) -> None:
        self.norm = [one.grad.norm() for one in self.parameters()]


class ReadsInStep(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return [(lambda parameter: parameter.grad)(one) for one in self.parameters()]


def norm_of(parameters: Any) -> Any:
    return sum(one.grad.norm() for one in parameters)


class ReadsInFunction(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return norm_of(self.parameters())


class ReadsByGetattr(LightningModule):
    @property
    def norm(self) -> Any:
        return [getattr(one, "grad") for one in self.parameters()]  # noqa: B009  another way to say it


class ReadsInTransfer(LightningModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch, [one.grad for one in self.parameters()]


class ClipsByALibrary(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return clip_grad_norm_(self.parameters(), 1.0)


class Balance:
    """What weighs a loss by gradients now and then, and is no module."""

    def weight(self, parameters: Any) -> float:
        return 1 / (1 + float(norm_of(parameters)))


class ReadsByAnObject(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.balance = Balance()


class HasAHook(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        norm = lambda parameters: max(one.grad.norm() for one in parameters)  # noqa: E731  held by the hook's closure
        self.net = nn.Linear(1, 1)
        self.norms: list[Any] = []
        self.net.register_forward_pre_hook(lambda net, _: self.norms.append(norm(net.parameters())))


@pytest.mark.parametrize(
    "kind", [ReadsInFunction, ReadsByGetattr, ReadsInTransfer, ClipsByALibrary, ReadsByAnObject, HasAHook]
)
def test_code_that_reads_gradients_by_way_of_something_else(kind: type[LightningModule]) -> None:
    assert names_gradients(kind())


def test_code_that_may_read_gradients_in_a_step() -> None:
    assert not names_gradients(nn.Sequential(nn.Linear(1, 1)))
    assert names_gradients(nn.Sequential(ReadsInHelper(1, 1)))
    assert not names_gradients(ReadsInHook())
    assert names_gradients(ReadsInStep())
