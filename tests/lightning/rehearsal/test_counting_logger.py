"""What a step does with its logger itself is counted, named, and written by no rehearsal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.lightning.rehearsal.counting_logger import counting_logger
from tests.conftest import make_loader, make_trainer

OPTIONS = {"max_epochs": 1, "log_every_n_steps": 1}
REPLICAS = pytest.mark.parametrize("num_replicas", [2, 3])


class Rows(Logger):
    """Keeps what it is given."""

    name = "rows"
    version = 3

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows += [(name, round(float(value), 4), step) for name, value in metrics.items()]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not looked at."""

    def log_image(self, key: str, images: Any) -> None:
        self.rows.append((key, len(images)))

    @property
    def experiment(self) -> Any:
        return self

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.rows.append((name, round(float(value), 4), step))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.tell(loss.detach())
        return loss

    def tell(self, loss: torch.Tensor) -> None:
        """Told to the logger."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ToExperiment(Model):
    def tell(self, loss: torch.Tensor) -> None:
        self.logger.experiment.add_scalar("loss", loss, self.global_step)


class ToLogger(Model):
    def tell(self, loss: torch.Tensor) -> None:
        self.logger.log_metrics({"loss": loss}, self.global_step)


class ToItsKind(Model):
    def tell(self, loss: torch.Tensor) -> None:
        for logger in self.loggers:
            if isinstance(logger, Rows):
                logger.log_image(f"{logger.name} {logger.version}", [loss])


class AfterTheBatch(Model):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logger.log_metrics({"loss": outputs["loss"]}, self.global_step)


@REPLICAS
@pytest.mark.parametrize(
    ("kind", "named"), [(ToExperiment, "add_scalar"), (ToLogger, "log_metrics"), (ToItsKind, "log_image")]
)
def test_calls_of_each_slice_are_named(hardware, kind, named, num_replicas) -> None:
    logger = Rows()
    strategy = dpx.DPXStrategy(execution="inline")
    trainer = make_trainer(**OPTIONS, logger=logger, strategy=strategy, devices=num_replicas)
    said = rf"calls its logger itself \({named}\), 1 time on one device, {num_replicas} times from slices"
    with pytest.warns(UserWarning, match=said):
        trainer.fit(kind(), make_loader(32, 16))
    assert len(logger.rows) == 2 * num_replicas, "the rehearsal has written nothing"


@pytest.mark.parametrize("kind", [ToExperiment, ToLogger, ToItsKind])
def test_the_first_replica_calls_it_as_one_device_does(hardware, kind) -> None:
    ours = Rows()
    plain = Rows()
    strategy = dpx.DPXStrategy(execution="inline", verify="first")
    with pytest.warns(UserWarning, match="training_step gets all of its batches whole"):
        make_trainer(**OPTIONS, logger=ours, strategy=strategy, devices=2).fit(kind(), make_loader(32, 16))
    make_trainer(**OPTIONS, logger=plain).fit(kind(), make_loader(32, 16))
    assert len(ours.rows) == len(plain.rows) == 2
    assert ours.rows == plain.rows


def test_a_hook_that_sees_the_whole_batch_calls_it_once(hardware) -> None:
    ours = Rows()
    plain = Rows()
    strategy = dpx.DPXStrategy(execution="inline", verify="raise")
    make_trainer(**OPTIONS, logger=ours, strategy=strategy, devices=2).fit(AfterTheBatch(), make_loader(32, 16))
    make_trainer(**OPTIONS, logger=plain).fit(AfterTheBatch(), make_loader(32, 16))
    assert ours.rows == plain.rows


def test_a_stand_in_is_of_the_kind_shows_plain_attributes_and_takes_any_call(tmp_path: Path) -> None:
    calls: list[str] = []
    stand_in: Any = counting_logger(CSVLogger(tmp_path, name="mine", version=7), calls.append)
    assert isinstance(stand_in, CSVLogger)
    assert (stand_in.name, stand_in.version, stand_in.save_dir) == ("mine", 7, str(tmp_path))
    stand_in.log_metrics({"a": 1.0}, step=0)
    stand_in.experiment.add_image("x", None)
    stand_in.experiment["run/loss"] = 1.0
    stand_in.anything_else(1, two=2)
    stand_in[0].experiment.add_text("y")
    stand_in.save()
    assert calls == ["log_metrics", "add_image", "run/loss", "anything_else", "add_text", "save"]
    assert not list(tmp_path.iterdir())
