"""One strategy object in several Trainers, one after the other."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

import lightning_dpx as dpx
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, run, seeded
from tests.lightning.several_replicas import on_replicas


def test_a_strategy_object_serves_one_trainer_after_the_other() -> None:
    strategy = dpx.DPXStrategy(execution="inline")
    loader = make_loader()
    expected = run(seeded(), loader, max_epochs=1, accelerator="cpu")
    models = [seeded(), seeded(), seeded()]
    first = make_trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1)
    first.fit(models[0], loader, loader)
    second = make_trainer(strategy=strategy, devices=3, accelerator="cpu", max_epochs=1, precision="64-true")
    assert len(strategy.parallel_devices) == 3
    assert second.precision == "64-true"
    second.fit(models[1], loader, loader)
    first.fit_loop.epoch_progress.reset()
    first.fit(models[2], loader, loader)
    assert len(strategy.parallel_devices) == 2
    assert first.precision == "32-true"
    for model in (models[0], models[2]):
        state = dict(model.state_dict())
        assert_equal(state, {name: expected[name] for name in state})


class StartsAnother(Classifier):
    """Makes a second Trainer of its own strategy in the middle of a run."""

    def on_train_start(self) -> None:
        make_trainer(strategy=self.trainer.strategy, devices=2, accelerator="cpu")


def test_a_strategy_object_of_a_trainer_that_runs_is_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="belongs to a Trainer that is running"):
        make_trainer(**on_replicas()).fit(StartsAnother(), make_loader(), make_loader())


class CopiesInTheMiddle(Callback):
    """Copies and pickles what leads to the strategy while it runs."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        copy.deepcopy(trainer.callbacks)
        copied = copy.deepcopy(trainer.strategy)
        assert not copied.is_running
        assert not copied.replica_modules
        pickle.dumps(trainer.strategy)
        assert trainer.strategy.is_running


@pytest.mark.parametrize("execution", ["auto", "inline", "threads"])
def test_a_trainer_from_a_file_goes_on_training(execution: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        max_steps=2, devices=2, strategy=dpx.DPXStrategy(execution=execution), callbacks=[CopiesInTheMiddle()]
    )
    trainer.fit(Classifier(), make_loader(), make_loader())
    torch.save(trainer, tmp_path / "trainer.pt")
    other = torch.load(tmp_path / "trainer.pt", weights_only=False)
    other.fit_loop.epoch_loop.max_steps = 4
    other.fit(Classifier(), make_loader(), make_loader())
    assert other.global_step == 4
    assert other.strategy.options.execution == execution
    assert trainer.global_step == 2
