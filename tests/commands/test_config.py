"""Lightning's command line, with simulated devices and this package's words for wrong values."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule

import lightning_dpx as dpx
from lightning_dpx.cli import main
from lightning_dpx.commands.config import InstantiateOnlyCLI
from tests.conftest import SIMULATED, Classifier

pytestmark = pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def cli(*arguments: str, model: type[LightningModule] = Classifier) -> InstantiateOnlyCLI:
    return InstantiateOnlyCLI(QUIET, model_class=model, seed_everything_default=False, args=["fit", *arguments])


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")
def test_everything_is_made_on_simulated_devices_and_nothing_runs(sim: Any) -> None:
    made = cli("--simulate.num_devices=3", "--trainer.accelerator=sim", "--trainer.devices=3", "--trainer.strategy=dpx")
    assert sim.device_count() == 3
    assert isinstance(made.trainer.strategy, dpx.DPXStrategy)
    assert len(made.trainer.strategy.parallel_devices) == 3
    assert isinstance(made.model, Classifier)
    assert made.trainer.state.fn is None, "no stage has begun"


class Picky(Classifier):
    def __init__(self, width: int = 3) -> None:
        if width < 0:
            raise ValueError(f"width={width} is negative")
        super().__init__()


def test_a_value_that_is_refused_is_an_error_of_this_package() -> None:
    with pytest.raises(dpx.ConfigurationError, match="width=-1 is negative"):
        cli("--model.width=-1", model=Picky)


@pytest.mark.parametrize(
    ("written", "way_out"),
    [
        ("model: {width: 3}", "'model: {class_path: FILE.CLASS, init_args: ...}'"),
        (
            "model: {class_path: tests.conftest.Classifier}\ndata: {batch_size: 3}",
            "'data: {class_path: FILE.CLASS, init_args: ...}'",
        ),
        ("trainer: {max_epochs: 1}", "'model: {class_path: FILE.CLASS}' in it"),
        ("fit: {model: {class_path: tests.conftest.Classifier}}", "what a config has below 'fit:', without that line"),
    ],
    ids=["model", "data", "none", "section"],
)
def test_a_config_of_a_program_of_ones_own_is_refused_with_what_to_write(
    written: str, way_out: str, tmp_path: Path, capsys: Any
) -> None:
    """Such a program knows its classes, and its command line has sections."""
    path = tmp_path / "run.yaml"
    path.write_text(written)
    assert main(["plan", "--config", str(path)]) == 1
    assert way_out in capsys.readouterr().err
