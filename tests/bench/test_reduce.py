import json
import math

import pytest

import lightning_dpx as dpx
from lightning_dpx.bench import reduce
from lightning_dpx.bench.reduce import compare_reductions, format_reductions, plot_reductions, shapes_of
from lightning_dpx.cli import main
from lightning_dpx.errors import BenchError
from tests.conftest import SIMULATED


def num_elements(size: str) -> int:
    return sum(math.prod(shape) for shape in shapes_of(size))


def test_real_models_have_their_published_sizes() -> None:
    assert num_elements("resnet50") == 25_557_032
    assert num_elements("gpt2") == 124_439_808
    assert num_elements("1e6") == 1_000_000
    assert num_elements("37") == 37
    for size in ("resnet", "3", "-1e6"):
        with pytest.raises(BenchError, match=f"size '{size}' is not allowed"):
            shapes_of(size)


def test_the_command_prints_json_with_every_contestant(capsys, tmp_path) -> None:
    plot = tmp_path / "reduce.png"
    few = ["--devices", "cpu", "cpu", "--rounds", "1"]
    assert main(["bench", "reduce", "--sizes", "1000", "5000", *few, "--json", "--plot", str(plot)]) == 0
    printed = json.loads(capsys.readouterr().out)
    modes = {row["mode"] for row in printed["results"]}
    assert modes == {
        "dpx, to owners", "dpx, to all", "ddp all-reduce", "copy limit, to owners", "copy limit, to all",
    }  # fmt: skip
    assert {row["elements"] for row in printed["results"]} == {1000, 5000}
    assert all(row["ms"] > 0 and row["than_peer"] > 0 for row in printed["results"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_size_ends_the_command_with_a_message(capsys) -> None:
    assert main(["bench", "reduce", "--sizes", "huge"]) == 1
    assert "size 'huge' is not allowed" in capsys.readouterr().err


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_several_devices_are_measured_in_every_mode(tmp_path) -> None:
    dpx.simulate(8)
    results = compare_reductions(["2000"], ["sim:0", "sim:1"], rounds=1)
    modes = {row.mode.partition(",")[0] for row in results}
    assert modes == {"naive", "collective", "hierarchical", "colocate", "ddp all-reduce"}
    assert all(row.than_limit is None for row in results)
    table = format_reductions(results)
    assert len(table.splitlines()) == 1 + len(results)
    plot_reductions(results, tmp_path / "reduce.svg")
    assert (tmp_path / "reduce.svg").read_text().count("<path") > 5


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_nccl_is_left_out_where_a_device_comes_twice(sim, monkeypatch) -> None:
    """It takes none of them twice, neither between processes nor within one."""
    monkeypatch.setattr(reduce, "has_nccl", lambda devices: True)
    told: list[str] = []
    results = compare_reductions(["2000"], ["sim:0", "sim:0", "sim:1"], rounds=1, progress=told.append)
    assert told[0].endswith("(gloo)")
    assert "nccl" not in {row.mode.partition(",")[0] for row in results}
