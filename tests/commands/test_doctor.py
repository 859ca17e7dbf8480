"""``dpx doctor`` tells what is here; ``python -m lightning_dpx`` is the same program."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

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


def test_as_installed_and_as_a_module() -> None:
    command = [str(Path(sys.executable).with_name("dpx")), "doctor"]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    for printed in (installed, programs.run("-m", "lightning_dpx", "doctor").stdout):
        assert printed.splitlines()[0].startswith("Python ")
        assert "reducer='auto'" in printed
