import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

import lightning_dpx as dpx
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, places, run, seeded, strategy_in

pytestmark = pytest.mark.usefixtures("hardware")


def inline(devices: int = 2, **options: Any) -> dict[str, Any]:
    """Trainer options for replicas that really run."""
    return {"strategy": dpx.DPXStrategy(execution="inline", **options), "devices": devices}


def test_the_name_and_one_alias_per_reducer_are_registered_once() -> None:
    dpx.DPXStrategy.register_strategies(StrategyRegistry)
    assert {"dpx", "dpx_naive"} <= set(StrategyRegistry.available_strategies())
    assert isinstance(make_trainer(strategy="dpx_naive", devices=2).strategy, dpx.DPXStrategy)


@pytest.mark.host
# Lightning calls what jsonargparse has deprecated.
@pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_class_path_in_a_cli_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fit"])
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  accelerator: cpu\n  devices: 2\n  max_epochs: 1\n  logger: false\n"
        "  enable_checkpointing: false\n  enable_progress_bar: false\n  enable_model_summary: false\n"
        "  strategy:\n    class_path: lightning_dpx.DPXStrategy\n"
        "    init_args: {workload: [2, 1], execution: inline, batch_dim: {'1': 0}}\n"
    )
    cli = LightningCLI(
        Classifier, run=False, seed_everything_default=0, args=["--config", str(config)], save_config_callback=None
    )
    cli.trainer.fit(cli.model, make_loader(), make_loader())
    assert cli.trainer.strategy.options.execution == "inline"
    assert cli.trainer.global_step == 4


@pytest.mark.host
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reducer": "ncl"}, "Unknown reducer 'ncl'; available: .*nccl"),
        ({"execution": "fast"}, "execution='fast' is not allowed; choose one of 'auto', 'inline', 'threads'"),
        ({"buffers": "sum"}, "buffers='sum'"),
        ({"loss_reduction": "max"}, "loss_reduction='max'"),
    ],
)
def test_bad_arguments_are_refused_at_construction(options, message) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.DPXStrategy(**options)


def test_a_workload_of_the_wrong_length_is_refused_at_setup() -> None:
    with pytest.raises(dpx.ConfigurationError, match="3 entries"):
        run(seeded(), **inline(workload=[1, 1, 1]))


def test_no_devices_are_refused_by_the_trainer() -> None:
    with pytest.raises(Exception, match="devices=0"):
        make_trainer(strategy="dpx", devices=0)


class MetricClassifier(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)


class LoggedMetric(MetricClassifier):
    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        return super().validation_step(batch, batch_idx)


@pytest.mark.host
def test_metric_objects_are_exact_where_replicas_are_merged() -> None:
    runs = []
    for options in ({}, {"strategy": "dpx", "devices": 4}):
        torch.manual_seed(0)
        runs.append(run(LoggedMetric(), **options))
    assert "logged/accuracy" in runs[0]
    assert_equal(runs[1], runs[0], bitwise=True)


@pytest.mark.filterwarnings("ignore:.*gets a batch whole")
@pytest.mark.parametrize("batch", [(torch.ones(4, 8), torch.ones(3, dtype=torch.long)), (torch.ones(0, 8),)])
def test_bad_batches_fail_as_on_one_device(batch) -> None:
    errors = []
    for options in ({}, inline()):
        with pytest.raises((ValueError, IndexError)) as caught:
            run(seeded(), DataLoader([batch], batch_size=None), **options)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


class Failing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise LookupError("on purpose")
        return super().training_step(batch, batch_idx)


def test_an_error_in_one_replica_is_the_original_and_the_trainer_can_fit_again(execution) -> None:
    # A step that was checked would run again on the whole batch, where this one does not fail.
    strategy = strategy_in(execution, verify="off")
    with pytest.raises(LookupError, match="on purpose") as caught:
        run(Failing(), strategy=strategy, devices=2)
    assert f"In replica 1 on {places(2)[1]}, during training_step." in caught.value.__notes__
    strategy.teardown()
    check = run(seeded(), strategy=strategy_in(execution), devices=2)
    assert_equal({"w": check["net.0.weight"]}, {"w": run(seeded())["net.0.weight"]})


class Watch(Callback):
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.logits: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(len(batch[0]))
        self.logits.append(len(outputs["logits"]))


def test_callbacks_see_the_whole_batch_and_the_merged_extras() -> None:
    watch = Watch()
    run(seeded(), max_epochs=1, callbacks=[watch], **inline(3))
    assert watch.rows == [16, 16, 16, 5]
    assert watch.logits == watch.rows


class Skips(Classifier):
    """Replica 1 skips every step; its share must not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.global_rank == 1 else F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore:training_step returned None")
def test_a_replica_may_return_none() -> None:
    torch.manual_seed(0)
    model, loader = Skips(), make_loader(num_rows=16)
    make_trainer(max_epochs=1, **inline(2, verify="off")).fit(model, loader, loader)
    torch.manual_seed(0)
    one, (rows, labels) = Skips(), next(iter(loader))
    halved = DataLoader([(rows[:8], labels[:8])], batch_size=None)
    make_trainer(max_epochs=1).fit(one, halved, halved)
    assert_equal(dict(model.state_dict()), dict(one.state_dict()))


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_checkpoint_files_are_those_of_one_device(tmp_path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="dpx", save_weights_only=False)
    first = {"max_epochs": 1, "enable_checkpointing": True, "callbacks": [saver]}
    make_trainer(**first, **inline(3)).fit(seeded(optimizer="adam"), make_loader(), make_loader())
    content = torch.load(tmp_path / "dpx.ckpt", weights_only=True)
    assert list(content["state_dict"]) == list(seeded().state_dict())
    results = []
    for options in ({}, inline(2), {"strategy": "dpx", "devices": 4}):
        model = seeded(optimizer="adam")
        resumed = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, filename="again")]}
        make_trainer(max_epochs=2, **resumed, **options).fit(
            model, make_loader(), make_loader(), ckpt_path=tmp_path / "dpx.ckpt"
        )
        results.append(dict(model.state_dict()))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


def test_early_stopping_stops_where_one_device_does() -> None:
    def stopped(**options: Any) -> int:
        stop = EarlyStopping("val_loss", patience=1, min_delta=0.05)
        trainer = make_trainer(max_epochs=20, callbacks=[stop], **options)
        trainer.fit(seeded(), make_loader(), make_loader())
        return trainer.current_epoch

    assert stopped(**inline(2)) == stopped() < 20


class TunableData(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> DataLoader[Any]:
        return make_loader(batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return make_loader(batch_size=self.batch_size)


def test_the_batch_size_finder_works() -> None:
    def found(**options: Any) -> int:
        tuner = Tuner(make_trainer(max_epochs=1, **options))
        return tuner.scale_batch_size(seeded(), datamodule=TunableData(), max_trials=3, steps_per_trial=1)

    assert found(**inline(2)) == found() > 2


def test_the_learning_rate_finder_works() -> None:
    def suggested(**options: Any) -> torch.Tensor:
        finder = Tuner(make_trainer(max_epochs=1, **options)).lr_find(
            Tunable(), make_loader(), make_loader(), num_training=20, update_attr=False
        )
        return torch.tensor(finder.results["loss"])

    torch.testing.assert_close(suggested(**inline(2)), suggested(), rtol=1e-4, atol=1e-5)


class Tunable(Classifier):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class FrozenThenNot(Classifier):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def test_freezing_is_followed() -> None:
    def weights(**options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = FrozenThenNot()
        make_trainer(**options).fit(model, make_loader(), make_loader())
        return dict(model.state_dict())

    assert_equal(weights(**inline(3)), weights())


def test_mean_buffers_are_the_mean_over_the_replicas() -> None:
    def running_mean(buffers: str) -> torch.Tensor:
        model = seeded(norm=True)
        options = inline(2, buffers=buffers)
        make_trainer(max_epochs=1, limit_train_batches=1, **options).fit(model, make_loader(), make_loader())
        return model.net[1].running_mean

    torch.manual_seed(0)
    plain = Classifier(norm=True).net
    # The step runs the net twice, so two updates of momentum 0.1 give 0.19.
    halves = [plain[0](half).mean(0) * 0.19 for half in next(iter(make_loader()))[0].split(8)]
    torch.testing.assert_close(running_mean("broadcast"), halves[0])
    torch.testing.assert_close(running_mean("mean"), (halves[0] + halves[1]) / 2)


class Dropped(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3))


def test_two_fits_in_one_process_and_validate_before_fit() -> None:
    model, loader = seeded(), make_loader()
    trainer = make_trainer(**inline(2))
    before = trainer.validate(model, loader, verbose=False)[0]["val_loss"]
    trainer.fit(model, loader, loader)
    assert trainer.validate(model, loader, verbose=False)[0]["val_loss"] < before
    assert trainer.test(model, loader, verbose=False)[0]["test_loss"] < before
