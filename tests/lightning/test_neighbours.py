"""The strategy beside other people's plugins, environments and exceptions."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.lightning.checkpoint_io import AtomicCheckpointIO
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, run, seeded


def on_replicas(devices: int = 2, **options: Any) -> dict[str, Any]:
    """Trainer options for replicas that really run."""
    return {"strategy": dpx.DPXStrategy(execution="inline", **options), "devices": devices, "accelerator": "cpu"}


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


class Own(MixedPrecision):
    """A user's plugin with something of its own."""

    def __init__(self) -> None:
        super().__init__("bf16-mixed", "cpu")
        self.threshold = 3
        self.steps = 0

    def told(self) -> str:
        return f"{self.threshold} {self.precision}"

    def train_step_context(self) -> Any:
        self.steps += 1
        return super().train_step_context()


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("32-true", Precision),
        ("64-true", DoublePrecision),
        ("bf16-true", HalfPrecision),
        ("bf16-mixed", MixedPrecision),
    ],
)
def test_the_precision_plugin_is_of_the_class_that_it_wraps(precision: Any, kind: type) -> None:
    plugin = make_trainer(precision=precision, **on_replicas()).precision_plugin
    assert isinstance(plugin, kind)
    assert isinstance(plugin, dpx.DPXPrecision)
    assert isinstance(plugin, Precision)
    assert isinstance(plugin, MixedPrecision) == (kind is MixedPrecision)


def test_the_precision_plugin_shows_what_it_wraps() -> None:
    trainer = make_trainer(plugins=Own(), max_epochs=1, **on_replicas())
    plugin: Any = trainer.precision_plugin
    assert isinstance(plugin, Own)
    assert plugin.told() == "3 bf16-mixed"
    plugin.threshold = 4
    assert plugin.wrapped.threshold == 4
    with pytest.raises(AttributeError, match="missing"):
        _ = plugin.missing
    trainer.fit(seeded(), make_loader(16), make_loader(16))
    assert plugin.steps == 1


def test_the_precision_plugin_is_pickled_and_copied_as_what_it_is() -> None:
    plugin: Any = dpx.DPXPrecision("bf16-mixed", {"0": "float32"})
    for other in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        assert type(other) is dpx.DPXPrecision
        assert isinstance(other, MixedPrecision)
        assert other.precision == "bf16-mixed"
        assert other.convert_input([torch.ones(1).double()])[0].dtype == torch.float32


@pytest.mark.parametrize("known", [(), ("SLURM_NODEID",), ("SLURM_NODEID", "SLURM_LOCALID"), ("SLURM_PROCID",)])
def test_a_shell_of_slurm_is_one_process(monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...]) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    for name in known:
        monkeypatch.setenv(name, "0")
    ours, one = seeded(), seeded()
    make_trainer(fast_dev_run=True, **on_replicas()).fit(ours, make_loader(), make_loader())
    monkeypatch.undo()
    make_trainer(fast_dev_run=True).fit(one, make_loader(), make_loader())
    assert_equal(dict(ours.state_dict()), dict(one.state_dict()))


def test_a_task_of_slurm_that_cannot_tell_which_it_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    with pytest.raises(dpx.ConfigurationError, match="SLURM_NTASKS is 2, but SLURM_PROCID"):
        make_trainer(**on_replicas())


class MuteError(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise ValueError("no words")


class FailsWithoutWords(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:  # by then replicas in threads no longer take turns, and all of them fail
            raise MuteError
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("execution", ["inline", "threads", "auto"])
def test_an_exception_that_cannot_be_told_stays_the_one_that_is_raised(execution: Any) -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution=execution), devices=2, accelerator="cpu")
    with pytest.raises(MuteError):
        trainer.fit(FailsWithoutWords(), make_loader(), make_loader())


@pytest.mark.parametrize("argument", ["save_to", "report"])
def test_a_report_that_cannot_be_written_is_told_before_training(argument: str, tmp_path: Path) -> None:
    suffix = "csv" if argument == "save_to" else "html"
    (tmp_path / "file").write_text("")
    monitor = dpx.DeviceMemoryMonitor(table=False, **{argument: tmp_path / "file" / f"memory.{suffix}"})
    model = seeded()
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(dpx.ConfigurationError, match=rf"{argument}=.* cannot be written: .*file is no folder"):
        make_trainer(callbacks=[monitor], **on_replicas()).fit(model, make_loader(), make_loader())
    assert_equal(dict(model.state_dict()), before, bitwise=True)
