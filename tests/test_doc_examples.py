"""``help`` of every public name shows an example, and it runs as it is printed."""

import doctest
import inspect
import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "max_epochs": 1,
}
NAMES = {
    "dpx": dpx,
    "itertools": itertools,
    "torch": torch,
    "nn": nn,
    "DataLoader": DataLoader,
    "Trainer": Trainer,
    "BoringModel": BoringModel,
    "quiet": QUIET,
}


@pytest.mark.parametrize("name", dpx.__all__)
@pytest.mark.usefixtures("own_registries")
def test_the_example_of_a_public_name_runs(name: str, sim: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(dpx, name)) or ""
    found = doctest.DocTestParser().get_doctest(text, dict(NAMES), name, None, None)
    assert found.examples, f"help(lightning_dpx.{name}) has no example"
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(found, out=printed.append)
    assert not runner.failures, "".join(printed)


@pytest.mark.parametrize("name", [name for name in dpx.__all__ if inspect.isfunction(getattr(dpx, name))])
def test_the_help_of_a_public_function_says_its_arguments_and_errors(name: str) -> None:
    function = getattr(dpx, name)
    text = inspect.getdoc(function) or ""
    assert "Raises:\n" in text
    # Arguments of one line may be explained by its sentence.
    missing = [argument for argument in inspect.signature(function).parameters if argument not in text]
    assert missing == []
