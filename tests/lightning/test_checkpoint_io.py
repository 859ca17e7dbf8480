"""Checkpoint files are whole, run no code, and go through other people's plugins."""

import os
import pickle
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.nn import functional as F

from lightning_dpx.lightning.checkpoint_io import AtomicCheckpointIO
from tests.conftest import assert_equal, make_loader, make_trainer, seeded
from tests.lightning.several_replicas import on_replicas


class Remembers(TorchCheckpointIO):
    """A user's plugin, which takes its storage options by name only."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *, storage_options: Any = None) -> None:
        self.options.append(storage_options)
        super().save_checkpoint(checkpoint, path)


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, Remembers, lambda: AsyncCheckpointIO(Remembers())])
def test_a_checkpoint_plugin_may_stand_beside_the_strategy(plugin: Any, tmp_path: Path) -> None:
    trainer = make_trainer(plugins=plugin(), max_epochs=1, **on_replicas())
    model, loader = seeded(), make_loader()
    trainer.fit(model, loader, loader)
    trainer.save_checkpoint(tmp_path / "last.ckpt", storage_options=None)
    trainer.strategy.teardown()  # the one that saves beside training ends its thread
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert_equal(saved, model.state_dict(), bitwise=True)


def test_a_plugin_that_wraps_another_is_given_whole_files() -> None:
    plugin = AsyncCheckpointIO()
    strategy = make_trainer(plugins=plugin, **on_replicas()).strategy
    assert strategy.checkpoint_io is plugin
    assert isinstance(plugin.checkpoint_io, AtomicCheckpointIO)
    mine = Remembers()
    chosen = make_trainer(plugins=AsyncCheckpointIO(mine), **on_replicas()).strategy.checkpoint_io
    assert chosen.checkpoint_io is mine
    assert isinstance(make_trainer(**on_replicas()).strategy.checkpoint_io, AtomicCheckpointIO)


def test_storage_options_reach_a_plugin_by_name(tmp_path: Path) -> None:
    plugin = Remembers()
    trainer = make_trainer(plugins=plugin, fast_dev_run=True, **on_replicas())
    trainer.fit(seeded(), make_loader(), make_loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt", storage_options={"tier": "cold"})
    assert plugin.options == [{"tier": "cold"}]


class HoldsItsNetwork(LightningModule):
    """Its network is a hyperparameter, as in tutorials."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saves(Callback):
    """Saves a checkpoint file in the middle of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance")
def test_a_synchronized_network_among_the_hyperparameters_is_saved_as_the_plain_one(tmp_path: Path) -> None:
    def fitted(**options: Any) -> HoldsItsNetwork:
        torch.manual_seed(0)
        model = HoldsItsNetwork(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)))
        callbacks = [Saves(tmp_path / "middle.ckpt")] if options else []
        make_trainer(max_epochs=1, callbacks=callbacks, **options).fit(model, make_loader(48))
        return model

    ours, one = fitted(sync_batchnorm=True, **on_replicas()), fitted()
    assert_equal(dict(ours.state_dict()), dict(one.state_dict()))
    saved = torch.load(tmp_path / "middle.ckpt", weights_only=False)
    assert type(saved["hyper_parameters"]["net"][1]) is nn.BatchNorm1d
    assert type(ours.net[1]) is nn.BatchNorm1d


def test_a_file_is_replaced_as_a_whole_or_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "last.ckpt"
    files = AtomicCheckpointIO()
    files.save_checkpoint({"a": torch.ones(2)}, path)
    with pytest.raises(AttributeError):
        files.save_checkpoint({"a": lambda: 0}, path)  # pickle knows no lambda
    assert files.load_checkpoint(path)["a"].tolist() == [1, 1]
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    # A folder cannot be replaced by a file.
    (tmp_path / "last.ckpt").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "last.ckpt")
    assert str(caught.value) == f"[Errno 21] Is a directory: '{tmp_path / 'last.ckpt'}'"


def test_a_damaged_file_is_named_and_one_that_runs_code_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    files = AtomicCheckpointIO()
    files.save_checkpoint({"a": torch.full((100,), 7.0)}, path)
    content = path.read_bytes()
    number = torch.tensor(7.0).numpy().tobytes()
    path.write_bytes(content.replace(number * 100, number * 50 + bytes(4) + number * 49))
    with pytest.raises(ValueError, match="is damaged") as caught:
        files.load_checkpoint(path)
    assert caught.value.__notes__ == [f"While reading {path}."]
    files.save_checkpoint({"a": Remembers()}, path)
    with pytest.raises(pickle.UnpicklingError):
        files.load_checkpoint(path)


def test_what_killed_saves_have_left_is_swept_away(tmp_path: Path) -> None:
    ended = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(ended, 0)
    left = tmp_path / f".last.ckpt.{platform.node()}-{ended}.part"
    left.write_text("")
    elsewhere = tmp_path / f".last.ckpt.another-{ended}.part"
    elsewhere.write_text("")
    AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")
    assert not left.exists()
    assert elsewhere.exists(), "of a machine that may still write it"
