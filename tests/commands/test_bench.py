"""Arguments of ``dpx bench``."""

import subprocess
import sys
from typing import Any

import pytest

from lightning_dpx.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--devices", "0"], "0 is not allowed; give 1 or more"),
        (["step", "--models", "huge"], "invalid choice: 'huge'"),
        (["step", "--devices", "two"], "two is not allowed; give 1 or more"),
        (["plan", "--compile", "1.5"], "1.5 is not allowed; give 0 to 1"),
        (["plan", "--compile", "half"], "half is not allowed; give 0 to 1"),
        (["plan", "--budgets", "0"], "0 is not allowed; give more than 0 and at most 1"),
        (["reduce", "--plot", "bandwidth.doc"], "bandwidth.doc is not allowed; name a .png, .svg or .pdf file"),
        (["reduce", "--plot", "nowhere/a.png"], "nowhere/a.png is not allowed: there is no folder nowhere"),
        (["plan", "--zoo", "alexnet"], "invalid choice: 'alexnet'"),
        ([], "required: bench"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--scale", "--models", "tiny"], "--models is for the bench's own models; leave it out with --scale"),
        (["step", "--scale", "--devices", "2"], "--devices is for the bench's own models; leave it out with --scale"),
        (["reduce", "--sizes", "100", "--devices", "gpu"], "'gpu' names no device here; give a type and an index"),
        (["reduce", "--sizes", "100", "--devices", "cuda:98"], "The device 'cuda:98' is not there: torch finds"),
    ],
)
def test_arguments_without_a_meaning_are_told_in_a_line(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for bench in ("reduce", "plan"):
        assert main(["bench", bench, "--plot", "a.png"]) == 1
        assert "Pictures need matplotlib; pip install 'lightning-dpx[plots]'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_growth_of_host_time_is_measured_in_a_process_of_its_own() -> None:
    """Where simulated devices can be built, they come before the first backward."""
    command = [sys.executable, "-m", "lightning_dpx", "bench", "step", "--scale", "20", "--rounds", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "inline" in ended.stdout
