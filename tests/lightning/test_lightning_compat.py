"""Every private name of Lightning and torchmetrics that the package uses is still there; one that is gone is named."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torchmetrics import MeanMetric

from lightning_dpx.lightning import lightning_compat
from lightning_dpx.lightning.lightning_compat import PRIVATE_NAMES
from tests.conftest import make_trainer


@pytest.fixture(scope="module")
def specimens() -> dict[str, Any]:
    """What the first part of a path may be called as."""
    return {
        "Trainer": make_trainer,
        "LightningModule": LightningModule,
        "Strategy": SingleDeviceStrategy,
        "DDPStrategy": DDPStrategy,
        "ModelParallelStrategy": ModelParallelStrategy,
        "Precision": Precision,
        "Metric": MeanMetric,
        "lightning": importlib.import_module("lightning"),
    }


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_name_is_there(name: str, specimens: dict[str, Any]) -> None:
    for module in ("lightning.pytorch.cli", "lightning.pytorch.loops.fetchers", "lightning.pytorch.utilities.imports"):
        importlib.import_module(module)
    eval(name, specimens)  # raises AttributeError with the name


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_the_entry_says_why_and_what_breaks_and_on_which_version_it_was_seen(name: str) -> None:
    entry = PRIVATE_NAMES[name]
    assert entry.why
    assert entry.without
    assert entry.checked_on.startswith(("lightning ", "torchmetrics "))


def test_the_table_lists_what_the_file_uses() -> None:
    tree = ast.parse(Path(lightning_compat.__file__).read_text())
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("attrgetter", "getattr")
        ):
            paths = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            used.update(part for path in paths if isinstance(path, str) for part in path.split("."))
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    listed = {part.strip("()") for path in PRIVATE_NAMES for part in path.split(".")}
    assert private - listed == set()


def test_what_it_exports_is_there() -> None:
    assert [name for name in lightning_compat.__all__ if not hasattr(lightning_compat, name)] == []
