"""The step bench runs its jobs, ends them, and says what went wrong."""

import json

import pytest

from lightning_dpx.bench import Result, compare_steps, format_table
from lightning_dpx.cli import main
from lightning_dpx.errors import BenchError
from tests import programs


def test_every_mode_reports_time_startup_and_memory(capfd) -> None:
    modes = ["one device", "dpx, watched", "ddp"]
    command = ["bench", "step", "--models", "tiny", "--devices", "2", "--rounds", "1", "--json", "--modes", *modes]
    with programs.quick_interpreter():
        assert main(command) == 0
    report = json.loads(capfd.readouterr().out)
    assert [result["mode"] for result in report["results"]] == modes
    assert all(result["step_ms"] > 0 and result["startup_s"] > 0 for result in report["results"])
    one, dpx, ddp = (result["peak_mib"] for result in report["results"])
    assert dpx < 1.5 * one
    assert ddp > 1.5 * one, "the second process counts"


def test_the_table_gives_ratios_to_the_first_mode() -> None:
    results = [Result("tiny", mode, 4, step, 1.0, 100.0) for mode, step in (("one device", 2.0), ("dpx", 3.0))]
    assert format_table(results).splitlines()[2].split() == ["tiny", "dpx", "3.000", "1.50", "1.00", "100"]


def test_a_job_that_fails_is_an_error_with_its_last_words() -> None:
    with programs.quick_interpreter(), pytest.raises(BenchError, match=r"(?s)'dpx' on 'tiny' ended.*devices"):
        compare_steps(["tiny"], ["dpx"], devices=0, rounds=1)


def test_an_unknown_model_is_refused_with_the_known_ones(capsys) -> None:
    assert main(["bench", "step", "--models", "huge"]) == 1
    assert "'tiny', 'deep', 'wide', 'digits', 'cnn', 'gpt'" in capsys.readouterr().err
