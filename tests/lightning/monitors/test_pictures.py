"""Loggers that take pictures get those of the memory monitor, in their own way; keys are grouped alike in all."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from matplotlib.image import imread

import lightning_dpx as dpx
from lightning_dpx.lightning.monitors.pictures import log_picture, takes_pictures
from lightning_dpx.pictures import new_figure
from tests.conftest import make_loader, make_trainer, seeded


class Metrics(Logger):
    """A user's own logger, which groups by dots."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.pictures: list[tuple[Any, ...]] = []

    name = "own"
    version = 0
    group_separator = "."

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.keys |= set(metrics)

    def log_hyperparams(self, *_: Any) -> None:
        pass


class TakesImages(Metrics):
    """Has the method of a WandbLogger."""

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        self.pictures.append((key, [image.shape for image in images], step))


class TakesFiles(Metrics):
    """Has what an MLFlowLogger has: a run, and a client that is told which one."""

    run_id = "run 1"

    @property
    def experiment(self) -> "TakesFiles":
        return self

    def log_figure(self, run_id: str, figure: Any, artifact_file: str, **_: Any) -> None:
        self.pictures.append((run_id, type(figure).__name__, artifact_file))


class TakesOtherImages(Metrics):
    """Has methods of the same names that want something else."""

    run_id = "run 1"

    def log_image(self, path: str) -> None:
        self.pictures.append((path,))

    @property
    def experiment(self) -> "TakesOtherImages":
        return self

    def log_figure(self, figure_name: str, figure: Any) -> None:
        self.pictures.append((figure_name,))


def test_pictures_and_keys_of_a_fit_reach_loggers_of_any_class(tmp_path: Path) -> None:
    images, files, other = TakesImages(), TakesFiles(), TakesOtherImages()
    loggers = [images, files, other, CSVLogger(tmp_path)]
    monitors = [dpx.DeviceMemoryMonitor(table=False), dpx.DeviceThroughputMonitor(table=False)]
    trainer = make_trainer(callbacks=monitors, logger=loggers, max_epochs=1, log_every_n_steps=1)
    trainer.fit(seeded(), make_loader(), make_loader())
    (picture,) = images.pictures
    assert picture[0] == "dpx.memory"
    ((_, _, channels),) = picture[1]
    assert channels == 4
    assert picture[2] == trainer.global_step
    assert files.pictures == [("run 1", "Figure", "dpx/memory.png")]
    assert other.pictures == []
    assert {"dpx.memory.cpu.peak_gib", "dpx.throughput.replica0.idle_pct"} <= images.keys
    assert images.keys == files.keys == other.keys


def test_only_loggers_with_a_method_for_pictures_take_them(tmp_path: Path) -> None:
    figure = new_figure(1, 1)
    # A fast_dev_run puts the dummy in the place of every logger, and it answers to any name.
    for logger in (CSVLogger(tmp_path), DummyLogger(), Metrics(), TakesOtherImages()):
        assert not takes_pictures(logger)
        log_picture(logger, ("memory",), figure, 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.filterwarnings("default")  # of a library that is not this package's
def test_mlflow_keeps_pictures_among_the_artifacts_of_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}/runs")
    fit_with(logger)
    run = logger.experiment.get_run(logger.run_id)
    assert "dpx/memory/cpu/peak_gib" in run.data.metrics
    (file,) = tmp_path.rglob("artifacts/dpx/memory.png")
    assert imread(file).shape[2] == 4


@pytest.mark.filterwarnings("default")
def test_weights_and_biases_gets_pictures_without_a_connection(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    fit_with(logger)
    assert "dpx/memory/cpu/peak_gib" in logger.experiment.summary.keys()  # noqa: SIM118  it is no mapping
    logger.experiment.finish()
    (file,) = tmp_path.rglob("media/images/dpx/memory_*.png")
    assert imread(file).shape[2] == 4


def fit_with(logger: Logger) -> None:
    monitor = dpx.DeviceMemoryMonitor(table=False)
    make_trainer(callbacks=[monitor], logger=logger, max_epochs=1).fit(seeded(), make_loader(), make_loader())
