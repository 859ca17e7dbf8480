"""``dpx doctor`` tells what is here; ``python -m lightning_dpx`` is the same program."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.cli import main
from tests import programs


def test_versions_devices_choices_and_what_is_missing(capsys: Any) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {finding["topic"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["torch"]["value"] == torch.__version__
    assert "GiB" in found["cpu"]["value"]
    assert found["reducer='auto'"]["value"]
    assert found["matplotlib"]["value"].endswith("for pictures and reports")
    for finding in found.values():
        assert ("missing" in finding["value"]) == bool(finding["remedy"])


def test_a_checkout_that_is_not_installed_is_told_of(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    known = importlib.metadata.version

    def version(package: str) -> str:
        if package == "lightning_dpx":
            raise importlib.metadata.PackageNotFoundError(package)
        return known(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["doctor"]) == 0
    checkout = Path(dpx.__file__).parents[1]
    assert f"{dpx.__version__}, not installed: run from {checkout}\n" in capsys.readouterr().out


def test_as_a_module() -> None:
    assert_is_report(programs.run("-m", "lightning_dpx", "doctor").stdout)


def test_as_installed() -> None:
    script = Path(sys.executable).with_name("dpx")
    if not script.exists():
        pytest.skip(f"the package is not installed: there is no {script}")
    command = [str(script), "doctor"]
    assert_is_report(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)


def assert_is_report(printed: str) -> None:
    assert printed.splitlines()[0].startswith("Python ")
    assert "reducer='auto'" in printed
