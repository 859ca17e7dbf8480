"""Where a class or a file comes from."""

import collections
import sys
import types

import lightning.pytorch as pl
import pytest
import torch
import yaml

import lightning_dpx as dpx
from lightning_dpx.python_objects import origin


class Own:
    """Of a user."""


def test_frameworks_are_libraries_and_only_what_runs_steps_leads_everywhere() -> None:
    for kind in (int, collections.deque, torch.nn.Linear, pl.Trainer, dpx.DPXStrategy):
        assert origin.is_library(kind), kind
    assert not origin.is_library(Own)
    assert not origin.is_library(yaml.YAMLError), "installed, but nobody's framework"
    assert origin.runs_steps(pl.Trainer)
    assert origin.runs_steps(dpx.DPXStrategy)
    assert not origin.runs_steps(torch.nn.Linear)


@pytest.mark.parametrize(
    ("name", "installed"),
    [("yaml.nodes", True), ("torch.nn", True), ("json", True), ("sys", True), (__name__, False), (None, True)],
)
def test_files_of_installed_packages_are_not_the_user_s(name: str | None, installed: bool) -> None:
    assert origin.is_installed(name) == installed


def test_packages_of_an_environment_beneath_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a virtual environment has them that is laid on another one by a .pth file."""
    for folder, installed in (("/elsewhere/lib/site-packages/", True), ("/elsewhere/project/", False)):
        name = f"a_file_below_{'an_environment' if installed else 'a_project'}"
        module = types.ModuleType(name)
        module.__file__ = f"{folder}{name}.py"
        monkeypatch.setitem(sys.modules, name, module)
        assert origin.is_installed(name) == installed


def test_packages_are_told_apart_by_their_top_level_name() -> None:
    assert origin.package_of("a.b.c") == "a"
    assert origin.package_of(None) == "builtins"
    assert origin.without_libraries(frozenset({"torch", "numpy", "mine"})) == {"mine"}
