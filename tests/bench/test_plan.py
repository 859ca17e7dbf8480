import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.bench.micro_batch_plans import MicroBatchContest, format_micro_batches
from lightning_dpx.bench.plan import Contest, compare_plans, format_contests
from lightning_dpx.bench.plan_peers import PEERS
from lightning_dpx.bench.staged import STAGED_MODELS, Block, Chain, Patches, StagedModel
from lightning_dpx.bench.zoo_contest import compare_zoo, format_zoo
from lightning_dpx.cli import main
from lightning_dpx.commands import bench


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, model in STAGED_MODELS.items():
        monkeypatch.setitem(STAGED_MODELS, name, replace(model, rows=2))


def test_the_command_prints_json_with_every_contestant(capsys, tmp_path) -> None:
    plot = tmp_path / "plan.png"
    arguments = ["--models", "unet", "--budgets", "0.7", "--rounds", "1", "--json", "--plot", str(plot)]
    assert main(["bench", "plan", *arguments]) == 0
    rows = {row["mode"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert set(rows) == {"none", *PEERS, "dpx 0.70", *(f"dpx at {peer}" for peer in PEERS)}
    assert all(row["same_bits"] for row in rows.values())
    assert rows["none"]["peak_share"] == rows["none"]["time_ratio"] == 1
    for mode, row in rows.items():
        if mode.startswith("dpx"):
            assert row["peak_share"] == pytest.approx(row["predicted_share"], rel=0.02)
    for peer in PEERS:
        assert rows[peer]["peak_share"] < 1
        assert rows[f"dpx at {peer}"]["peak_share"] <= rows[peer]["peak_share"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_budget_that_cannot_be_met_and_a_peer_that_cannot_run_are_left_out_and_named(capsys) -> None:
    assert main(["bench", "plan", "--models", "lstm", "--budgets", "0.01", "--rounds", "1"]) == 0
    printed = capsys.readouterr()
    assert "dpx 0.01" not in printed.out
    assert "selective operators" not in printed.out
    assert "dpx: lstm: dpx 0.01: A budget of" in printed.err
    assert "dpx: lstm: selective operators cannot run this model: Tensor cached" in printed.err


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own
def test_compiled_peers_are_measured_with_and_without_budgets_and_plans(monkeypatch) -> None:
    def perceptrons() -> Chain:
        layers = [(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)) for _ in range(4)]
        return Chain(*(nn.Sequential(*each) for each in layers))

    tiny = StagedModel(perceptrons, lambda rows: torch.randn(rows, 64), rows=512)
    monkeypatch.setitem(STAGED_MODELS, "tiny", tiny)
    told: list[str] = []
    found = compare_plans(
        ["tiny"], [0.7], 1, compile_budgets=[0.5], compile_backend="aot_eager_decomp_partition", missing=told.append
    )
    assert told == []
    rows = {row.mode: row for row in found}
    modes = ["compiled", "compiled 0.50"]
    assert all(rows[mode].close and rows[mode].predicted_share is None for mode in modes)
    assert 1.001 > rows["compiled"].peak_share > rows["compiled 0.50"].peak_share
    for mode in modes:
        assert rows[f"dpx at {mode}"].same_bits
        assert rows[f"dpx at {mode}"].peak_share <= rows[mode].peak_share
    ours = rows["compiled dpx at compiled 0.50"]
    assert ours.close
    assert ours.predicted_share == pytest.approx(ours.peak_share, rel=0.05)
    assert ours.peak_share <= 1.05 * rows["compiled 0.50"].peak_share
    torch.compiler.reset()


def test_a_budget_of_the_compiler_is_a_share(capsys) -> None:
    assert main(["bench", "plan", "--compile", "1.5"]) == 1
    assert "argument --compile: 1.5 is not allowed; give 0 to 1" in capsys.readouterr().err


def test_a_compiler_that_is_not_there_is_refused_before_anything_runs(capsys) -> None:
    assert main(["bench", "plan", "--compile", "--compile-backend", "quick"]) == 1
    assert "dpx: torch.compile has no backend 'quick'; there are " in capsys.readouterr().err


def test_the_table_tells_same_bits_from_close_and_other_gradients() -> None:
    rows = [Contest("gpt", "none", 1.0, 1.0, 1.0, 1.0, *same) for same in ((True, True), (False, True), (False, False))]
    assert [line.rsplit("  ", 1)[1] for line in format_contests(rows).splitlines()[1:]] == [
        "same bits",
        "close",
        "differ",
    ]


@pytest.mark.parametrize("name", STAGED_MODELS)
def test_the_models_give_an_output_for_every_row(name: str) -> None:
    model = STAGED_MODELS[name]
    torch.manual_seed(0)
    output = model.build()(model.make_input(2))
    assert len(output) == 2
    assert output.isfinite().all()


def test_models_of_the_zoo_stand_beside_their_own_checkpointing(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric", None)  # as if it were not installed
    assert main(["bench", "plan", "--zoo", "flow", "graph", "patchtst", "--rounds", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert "graph needs torch_geometric, which is not installed; pip install torch_geometric" in captured.err
    flow, patchtst = json.loads(captured.out)["results"]
    for row in (flow, patchtst):
        assert row["same_bits"]
        assert row["share"] <= 1.002 * row["budget_share"]
        assert row["planning_seconds"] > 0
    assert flow["own_share"] is None
    assert flow["of_own"] is None


def test_a_library_that_checkpoints_by_itself_sets_the_budget() -> None:
    (row,) = compare_zoo(["bart"], rounds=1)
    assert row.own_share is not None
    assert row.own_share < 1
    assert row.budget_share == row.own_share
    assert row.of_own == row.ratio / row.own_ratio
    table = format_zoo([row, replace(row, share=None, ratio=None, same_bits=None, smallest_share=0.6)])
    assert table.splitlines()[2].split()[0] == "bart"
    assert ">0.60" in table.splitlines()[3]
    assert "1 budgets are refused" in table


def test_options_of_other_models_are_refused_with_the_zoo(capsys: Any) -> None:
    assert main(["bench", "plan", "--zoo", "flow", "--budgets", "0.5"]) == 1
    assert "--budgets is for the bench's own models" in capsys.readouterr().err


def test_plans_stand_beside_micro_batches_and_both(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STAGED_MODELS, "vit", replace(STAGED_MODELS["vit"], build=_small_vit))
    plot = tmp_path / "micro.png"
    arguments = ["--micro-batches", "--models", "vit", "--budgets", "0.75", "--rounds", "1", "--plot", str(plot)]
    assert main(["bench", "plan", "--json", *arguments]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    rows = {row["way"]: row for row in results}
    assert list(rows) == ["plain", "plan alone", "micro-batches", "both"]
    assert [rows[way]["number"] for way in ("plain", "plan alone", "micro-batches")] == [1, 1, 2]
    assert rows["plan alone"]["values_recomputed"] > 0 == rows["micro-batches"]["values_recomputed"]
    for way in ("plan alone", "micro-batches", "both"):
        assert rows[way]["close"]
        assert rows[way]["peak_share"] <= 0.75
    for way in ("plan alone", "both"):
        assert rows[way]["peak_share"] == pytest.approx(rows[way]["predicted_share"], rel=0.02)
    assert rows["both"]["number"] * rows["both"]["rows"] == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = format_micro_batches([MicroBatchContest(**row) for row in results]).splitlines()
    assert lines[3].split()[:6] == ["vit", "0.75", "micro-batches", "2", "x", "1"]


def _small_vit() -> Chain:
    """Four blocks, whose gradients are small beside the activations of one row."""
    wide = [Block(32, 2, 0.0, causal=False) for _ in range(4)]
    return Chain(Patches(32, 1), *wide, nn.Linear(32, 10))


def test_without_matplotlib_the_table_is_all(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGED_MODELS, "vit", replace(STAGED_MODELS["vit"], build=_small_vit))
    monkeypatch.setattr(bench, "find_spec", lambda name: None)  # as if it were not installed
    arguments = ["--micro-batches", "--models", "vit", "--budgets", "0.9", "--rounds", "1"]
    assert main(["bench", "plan", *arguments, "--plot", str(tmp_path / "micro.png")]) == 0
    captured = capsys.readouterr()
    assert "M x rows" in captured.out
    assert "is not drawn: pictures need matplotlib" in captured.err
    assert not (tmp_path / "micro.png").exists()


def test_what_micro_batches_are_not_compared_with(capsys: Any) -> None:
    assert main(["bench", "plan", "--micro-batches", "--compile"]) == 1
    assert "--compile is for other ways of checkpointing" in capsys.readouterr().err
