"""The flow of one training step: its stages in order, and what stands between Lightning and the user's step."""

import inspect
import itertools
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

import lightning_dpx
from lightning_dpx.shifting import has_shifts
from tests.conftest import make_loader, make_trainer

PACKAGE = lightning_dpx.__path__[0]
TRAINER = inspect.getfile(Trainer).removesuffix("trainer.py")
MOST_FRAMES = 7  # between Lightning and the user's training_step
# Python calls of this package in a step of a module without hooks: 65, 403, 54 and 55 when they were counted. What a
# step costs beside the model follows them, and no clock of a busy machine tells it as well.
MOST_CALLS = {"one device": 70, "a step": 420, "of a micro-batch": 56, "of a replica": 57}
CALLS_AMONG_SHIFTS = 7


class Diary(LightningModule):
    """Writes down each stage of a step, with the replica that is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.stages: list[str] = []
        self.frames: list[int] = []

    def note(self, stage: str) -> None:
        self.stages.append(f"{stage} {self.trainer.strategy.global_rank}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.stages.clear()
        self.note("batch start")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("before transfer")
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.note("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("after transfer")
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.note("training step")
        self.frames.append(own_frames())
        inputs, targets = batch
        output = self.layer(inputs)
        output.register_hook(lambda _: self.note("backward"))
        return nn.functional.cross_entropy(output, targets)

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.note("before backward")

    def on_after_backward(self) -> None:
        self.note("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("before optimizer")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def own_frames() -> int:
    """Calls of this package that the caller's caller is in, up to the next one of Lightning's."""
    frame, own = sys._getframe(2), 0
    while frame is not None and not frame.f_code.co_filename.startswith(TRAINER):
        own += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back  # type: ignore[assignment]
    return own


def fit(devices: int, **options: Any) -> Diary:
    module, strategy = Diary(), lightning_dpx.DPXStrategy(verify="off", **options)
    trainer = make_trainer(strategy=strategy, devices=devices, limit_train_batches=2, accelerator="cpu")
    trainer.fit(module, make_loader(num_rows=32))
    return module


def test_the_stages_of_a_step_of_several_replicas_come_in_this_order() -> None:
    module = fit(devices=2, execution="inline")
    assert module.stages == [
        "batch start 0",
        "transfer 0",
        "after transfer 0",
        "training step 0",
        "transfer 1",
        "after transfer 1",
        "training step 1",
        "before backward 0",
        "backward 1",
        "backward 0",
        "after backward 0",
        "before optimizer 0",
        "batch end 0",
    ]


@pytest.mark.parametrize("options", [{"devices": 1}, {"devices": 2}, {"devices": 2, "execution": "inline"}])
def test_few_own_calls_stand_between_lightning_and_the_step(options: dict[str, Any]) -> None:
    assert 0 < max(fit(**options).frames) <= MOST_FRAMES


class Plain(LightningModule):
    """Rows (B, 8) to a loss; no hook looks at anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def calls_of_a_step(devices: int, **options: Any) -> int:
    """Python calls of this package in the cheapest of eight steps: the first ones learn what later ones know."""
    calls = 0
    totals: list[int] = []

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls += 1

    class Reads(Plain):
        # Called once a step, and none of the hooks for which batches and gradients are kept.
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            totals.append(calls)

    strategy = lightning_dpx.DPXStrategy(verify="off", **options)
    trainer = make_trainer(strategy=strategy, devices=devices, accelerator="cpu")
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        trainer.fit(Reads(), make_loader(num_rows=64))
    finally:
        sys.setprofile(before)
    # While any module of the process is shifted, as those are that tests of interrupted runs have left, optimizers step
    # in blocks of their own.
    return min(after - total for total, after in itertools.pairwise(totals)) - CALLS_AMONG_SHIFTS * has_shifts()


def test_a_step_of_one_device_makes_few_calls() -> None:
    assert 0 < calls_of_a_step(1) <= MOST_CALLS["one device"]


@pytest.mark.parametrize(
    ("of_each", "cut"),
    [
        ("of a micro-batch", lambda number: {"devices": 1, "micro_batches": number}),
        ("of a replica", lambda number: {"devices": number, "execution": "inline"}),
    ],
)
def test_a_step_on_slices_makes_few_calls(of_each: str, cut: Any) -> None:
    of_four = calls_of_a_step(**cut(4))
    of_one = (calls_of_a_step(**cut(8)) - of_four) / 4
    assert 0 < of_one <= MOST_CALLS[of_each]
    assert 0 < of_four - 4 * of_one <= MOST_CALLS["a step"]


class Fails(Diary):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise ValueError("the step fails")


class Interrupted(Diary):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise KeyboardInterrupt


class Caught(Callback):
    notes: list[str]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.notes = exception.__notes__


def test_an_error_in_a_run_that_memory_is_planned_from_says_so() -> None:
    strategy, caught = lightning_dpx.DPXStrategy(memory_budget="1GiB", plan_cache=False), Caught()
    trainer = make_trainer(strategy=strategy, devices=2, accelerator="cpu", callbacks=[caught])
    with pytest.raises(ValueError, match="the step fails"):
        trainer.fit(Fails(), make_loader())
    assert [note for note in caught.notes if "trial run" in note] == [
        "In replica 0 on cpu, during training_step, in a trial run from which memory is planned; nothing of it stays."
    ]


def test_an_interrupt_of_a_rehearsal_says_so() -> None:
    strategy, caught = lightning_dpx.DPXStrategy(execution="inline"), Caught()
    trainer = make_trainer(strategy=strategy, devices=2, accelerator="cpu", callbacks=[caught])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(Interrupted(), make_loader())
    assert caught.notes[-1] == "In the rehearsal of training_step, which checks its slices against one device."
    assert "In replica 0 on cpu, during training_step." in caught.notes
