"""``dpx bench step --scale``: a table of time over K plain steps."""

import json

from lightning_dpx.bench import ScaleResult, format_scale, measure_scale
from lightning_dpx.cli import main


def test_every_size_and_number_of_replicas_is_measured(sim) -> None:
    results = measure_scale([2], [1, 2], where=["inline", "simulated"], rounds=1)
    assert [(result.where, result.parameters, result.replicas) for result in results] == [
        ("inline", 2, 1), ("inline", 2, 2), ("simulated", 2, 1), ("simulated", 2, 2),
    ]  # fmt: skip
    assert all(result.step_ms > 0 and result.plain_ms > 0 for result in results)


def test_the_command_prints_what_was_measured(capfd) -> None:
    assert main(["bench", "step", "--scale", "2", "--rounds", "1", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    in_line = [result for result in report["results"] if result["where"] == "inline"]
    assert [result["replicas"] for result in in_line] == [1, 2, 4, 8]
    assert all(result["ratio"] == result["step_ms"] / result["plain_ms"] for result in in_line)


def test_the_table_has_a_row_for_each_module_and_a_column_for_each_k() -> None:
    results = [
        ScaleResult(parameters=2000, replicas=count, where="inline", step_ms=count * 33.0, plain_ms=count * 30.0)
        for count in (1, 8)
    ]
    _, heads, row = format_scale(results).splitlines()
    assert heads.split() == ["where", "parameters", "K", "=", "1", "K", "=", "8"]
    assert row.split() == ["inline", "2,000", "1.10", "(33.0/30.0)", "1.10", "(264.0/240.0)"]
