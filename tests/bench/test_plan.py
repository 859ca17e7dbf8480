import json

import pytest
import torch

from lightning_dpx.bench.plan import PEERS, compare_plans, format_contests
from lightning_dpx.bench.staged import STAGED_MODELS
from lightning_dpx.cli import main


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


def test_a_budget_that_cannot_be_met_and_a_peer_that_cannot_run_are_left_out() -> None:
    told: list[str] = []
    table = format_contests(compare_plans(["lstm"], [0.01], 1, told.append))
    assert "dpx 0.01" not in table
    assert "selective operators" not in table
    assert any("dpx 0.01: A budget of" in text for text in told)
    assert any("selective operators cannot run this model" in text for text in told)


@pytest.mark.parametrize("name", STAGED_MODELS)
def test_the_models_give_an_output_for_every_row(name: str) -> None:
    model = STAGED_MODELS[name]
    torch.manual_seed(0)
    output = model.build()(model.make_input(2))
    assert len(output) == 2
    assert output.isfinite().all()
