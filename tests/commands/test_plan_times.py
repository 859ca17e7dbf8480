"""``dpx plan`` with rates predicts the time of a step, on 1, 2, 4, ... nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_dpx.cli import main
from tests.commands.test_plan import config

pytestmark = pytest.mark.filterwarnings("default::jsonargparse._deprecated.JsonargparseDeprecationWarning")
RATES = ["--link", "50GB/s", "--network", "200Gb/s", "--flops", "100TF/s", "--memory-bandwidth", "2TB/s"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a quick config, whose profile is found again in a cache."""
    folder = tmp_path_factory.mktemp("times")
    return ["plan", "--config", config(folder, model="Shallow"), "--plan-cache", str(folder / "plans")]


def test_a_table_over_nodes_and_a_picture_in_the_page(own: list[str], tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "report.html"
    assert main([*own, *RATES, "--num-nodes", "16", "--report", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(number for number, line in enumerate(lines) if line.startswith("a training step, predicted with"))
    assert "100 TFLOP/s and 2000 GB/s of memory on a device, 50 GB/s within a node, 25 GB/s between" in lines[heading]
    rows = [line.split() for line in lines[heading + 2 : heading + 7]]
    assert [row[:2] for row in rows] == [["1", "4"], ["2", "8"], ["4", "16"], ["8", "32"], ["16", "64"]]
    assert lines[heading + 7].startswith("step = compute + reduction")
    text = page.read_text()
    assert "Time of a step" in text
    assert "The rows of a device stay the same" in text


def test_json_has_the_numbers(own: list[str], capsys: Any) -> None:
    assert main([*own, *RATES, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["nodes"] for step in steps] == [2**power for power in range(11)], "to 1024 nodes unless told otherwise"
    for step in steps:
        parts = step["compute"] + step["reduction"] + step["between_nodes"] + step["parameters"]
        assert step["seconds"] == pytest.approx(parts)
        assert step["samples_per_second"] == pytest.approx(step["samples"] / step["seconds"])
    assert steps[0]["between_nodes"] == 0
    efficiencies = [step["efficiency"] for step in steps]
    assert sorted(efficiencies, reverse=True) == efficiencies
    assert steps[3]["samples"] == 8 * 1024


def test_without_rates_no_times_are_told(own: list[str], capsys: Any) -> None:
    assert main([*own, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"fits", "basis", "devices"}


def test_latencies_and_slow_networks_make_steps_longer(own: list[str], capsys: Any) -> None:
    found = []
    for more in ([], ["--network-latency", "1ms"], ["--link-latency", "1ms"], ["--network", "1MB/s"]):
        assert main([*own, *RATES, "--num-nodes", "2", "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["steps"][1])
    usual, network, link, slow = found
    # Two rounds of two messages: what nodes have, and the gradients.
    assert network["between_nodes"] == pytest.approx(usual["between_nodes"] + 4e-3)
    assert link["parameters"] > usual["parameters"] + 2e-3
    assert slow["between_nodes"] > 100 * usual["between_nodes"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "50"], "--link='50' is not allowed; give a positive number with a unit per second: 50GB/s"),
        (["--network", "fast"], "--network='fast' is not allowed"),
        (
            ["--flops", "100"],
            "--flops='100' is not allowed; give a positive number with a unit per second, such as 100TF",
        ),
        (["--memory-bandwidth", "2TB"], "--memory-bandwidth='2TB' is not allowed"),
        (["--link-latency", "5"], "--link-latency='5' is not allowed; give a number with a unit, such as 5us"),
        (["--network-latency", "-1us"], "--network-latency"),
        (["--num-nodes", "0"], "--num-nodes 0 is not allowed; give a positive number"),
        (["--num-nodes", "2"], "The time of a step on 4 devices needs --link"),
        (["--num-nodes", "2", "--link", "50GB/s"], "The time of a step on 2 nodes needs --network"),
        (["--flops", "100TF/s"], "needs --link"),
    ],
)
def test_what_is_missing_or_not_allowed_is_said(own: list[str], options: list[str], said: str, capsys: Any) -> None:
    assert main([*own, *options]) == 1
    assert said in capsys.readouterr().err
