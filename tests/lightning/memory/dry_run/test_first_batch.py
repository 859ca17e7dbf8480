"""The first batch is looked at, and nothing is trained on it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.memory.dry_run.first_batch import work_on_first_batch
from tests.conftest import make_trainer


def test_the_step_of_the_first_batch_never_happens() -> None:
    module = BoringModel()
    before = module.layer.weight.clone()
    trainer = make_trainer(max_epochs=1, accelerator="cpu", devices=1)
    callbacks = list(trainer.callbacks)
    rows = DataLoader(torch.randn(4, 32), batch_size=2)
    assert work_on_first_batch(trainer, module, rows, lambda _trainer, _module, batch: len(batch)) == 2
    assert torch.equal(module.layer.weight, before)
    assert trainer.callbacks == callbacks


def test_a_loader_without_batches_is_told() -> None:
    trainer = make_trainer(max_epochs=1, accelerator="cpu", devices=1, limit_train_batches=0)
    rows = DataLoader(torch.randn(4, 32), batch_size=2)
    with pytest.raises(ConfigurationError, match="There is no training batch to look at"):
        work_on_first_batch(trainer, BoringModel(), rows, lambda *_: 1)


def test_a_module_that_was_looked_at_keeps_no_batch() -> None:
    """It keeps its Trainer, whose log had the batch: on an accelerator that room was missing from then on."""
    seen = []

    def look(_trainer: Any, _module: Any, batch: torch.Tensor) -> bool:
        seen.append(weakref.ref(batch))
        return True

    module = BoringModel()
    trainer = make_trainer(max_epochs=1, accelerator="cpu", devices=1)
    assert work_on_first_batch(trainer, module, DataLoader(torch.randn(4, 32), batch_size=2), look)
    gc.collect()
    assert module.trainer is trainer
    assert [batch() for batch in seen] == [None]
