"""The second run of a job finds the plan of the first, and notices where it does not fit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.memory.plan_cache import default_folder
from tests.conftest import assert_equal, make_trainer
from tests.lightning.memory.test_micro_batch_choice import KeepsAll

MIB = 2**20
WIDTH = 256
BATCH = 256 * (4 * WIDTH + 8)  # bytes, which a budget on the host counts


class Tower(LightningModule):
    """Blocks over rows (B, 256); how often they run is known to the environment alone."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.net = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0]
        for _ in range(int(os.environ.get("TOWER_TURNS", "1"))):
            for layer in self.net:
                rows = layer(rows)
        return F.cross_entropy(self.head(rows), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Squared(Tower):
    """The same shapes, and other code."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx).square()


def loader(rows: int = 256) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(3 * rows, WIDTH, generator=generator)
    return DataLoader(TensorDataset(data, torch.randint(3, (3 * rows,), generator=generator)), rows)


def fit(
    caplog: Any,
    *,
    kind: type[Tower] = Tower,
    rows: int = 256,
    depth: int = 4,
    devices: int = 1,
    callback: dpx.ActivationPlanner | None = None,
    **options: Any,
) -> tuple[str, dict[str, torch.Tensor]]:
    """What a run has said, and where it ends."""
    torch.manual_seed(0)
    model = kind(depth)
    caplog.clear()
    with caplog.at_level("INFO"):
        if callback is None:
            chosen = {
                "strategy": dpx.DPXStrategy(**{"memory_budget": 2_750_000 + BATCH, **options}),
                "devices": devices,
            }
        else:
            chosen = {"callbacks": [callback]}
        make_trainer(max_epochs=1, **chosen).fit(model, loader(rows))
    return caplog.text, {name: value.clone() for name, value in model.state_dict().items()}


def planned_anew(said: str) -> bool:
    assert ("profiles a step" in said) != ("found in the cache" in said)
    return "profiles a step" in said


@pytest.mark.parametrize("devices", [1, 2])
def test_the_second_run_of_a_job_plans_nothing(caplog: Any, devices: int) -> None:
    options: dict[str, Any] = {"devices": devices, "execution": "inline", "memory_budget": 5 * MIB}
    first, expected = fit(caplog, **options)
    assert planned_anew(first)
    second, weights = fit(caplog, **options)
    assert not planned_anew(second)
    assert str(default_folder()) in second
    assert_equal(weights, expected, bitwise=True)
    assert second.count("of a step (") == first.count("of a step (")  # the plan is announced as ever


def test_the_second_run_chooses_its_micro_batches_without_a_profile(caplog: Any) -> None:
    options = {"memory_budget": 2_750_000 + BATCH, "micro_batches": "auto"}
    said, state = fit(caplog, **options)
    assert "profiles a step on 64 rows" in said, "the premise: several numbers of micro-batches were tried"
    again, state_again = fit(caplog, **options)
    assert "profiles a step" not in again
    assert_equal(state_again, state, bitwise=True)


class SlowOnFewer(Tower):
    """Takes several times as long on a part of its rows."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) < 1024:
            small = torch.ones(64, 64)
            for _ in range(2000):
                small @ small
        return super().training_step(batch, batch_idx)


def test_a_time_of_micro_batches_is_no_profile_of_them_for_later_runs(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_DPX_TIMING", "full")  # else every plan of one piece is as fast as any cut
    options = {"kind": SlowOnFewer, "rows": 1024, "memory_budget": 8_000_000 + 4 * BATCH}
    said, _state = fit(caplog, **options)
    assert "profiles a step on 512 rows" in said
    assert "micro-batches of" not in said
    again, _state = fit(caplog, **options)
    assert "profiles a step" not in again, "the time is known, and decides as before"
    cut, _state = fit(caplog, planner=KeepsAll(), **options)  # which has no plan of one piece
    assert "profiles a step on 512 rows" in cut
    assert "2 micro-batches of 512 rows" in cut


def test_so_it_does_where_the_budget_is_what_happens_to_be_free(
    caplog: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where that is a little less or more than then; not where it is far more, or the plan no longer fits."""

    def said_with(free: float) -> str:
        monkeypatch.setattr("lightning_dpx.lightning.memory.budgets.free_bytes", lambda _: int(free * MIB))
        return fit(caplog, memory_budget="auto", plan_cache=tmp_path)[0]

    assert planned_anew(said_with(3.6))
    for free in (3.6, 3.59, 3.7):
        assert not planned_anew(said_with(free)), free
    for free in (5.0, 3.2):
        assert "found in the cache" not in said_with(free), free
    assert "found in the cache" not in fit(caplog, memory_budget=int(0.95 * 3.2 * MIB), plan_cache=tmp_path)[0]


def test_a_plan_that_keeps_all_does_for_any_room(caplog: Any) -> None:
    assert planned_anew(fit(caplog, memory_budget="auto")[0])
    assert not planned_anew(fit(caplog, memory_budget="auto")[0])


def test_another_job_is_planned_by_itself(caplog: Any) -> None:
    fit(caplog)
    for other in ({"rows": 192}, {"depth": 3}, {"kind": Squared}, {"plan_cache": False}):
        assert planned_anew(fit(caplog, **other)[0]), other
    for other in ({"memory_budget": 2_850_000 + BATCH}, {"planner": "search"}):  # the same step, planned in another way
        said = fit(caplog, **other)[0]
        assert "profiles a step" not in said, other
        assert "found in the cache" not in said, other


def test_a_plan_that_does_not_fit_the_steps_is_made_anew(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(caplog, memory_budget=5 * MIB)
    monkeypatch.setenv("TOWER_TURNS", "2")
    _, expected = fit(caplog, memory_budget=5 * MIB, plan_cache=False)
    said, weights = fit(caplog, memory_budget=5 * MIB)
    assert "does not fit the steps of this run: it is planned anew" in said
    assert "profiles a step" in said
    assert_equal(weights, expected, bitwise=True)
    assert planned_anew(
        fit(caplog, memory_budget=5 * MIB)[0]
    )  # what did not fit is gone, and this run profiles its first step
    assert not planned_anew(fit(caplog, memory_budget=5 * MIB)[0])


def test_under_other_strategies_as_well(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, expected = fit(caplog, callback=dpx.ActivationPlanner(0.6))
    assert "found in the cache" not in first
    planner = dpx.ActivationPlanner(0.6)
    second, weights = fit(caplog, callback=planner)
    assert "found in the cache" in second
    assert planner.profile is not None
    assert_equal(weights, expected, bitwise=True)
    assert "found in the cache" not in fit(caplog, callback=dpx.ActivationPlanner(0.6, plan_cache=False))[0]
    assert "found in the cache" not in fit(caplog, callback=dpx.ActivationPlanner(0.7))[0]
    monkeypatch.setenv("TOWER_TURNS", "2")
    planner = dpx.ActivationPlanner(0.6)
    third, _ = fit(caplog, callback=planner)
    assert "does not fit the steps of this run: it is planned anew" in third
    assert planner.plan is not None
    assert any("#2" in name for name in planner.plan.dropped)


def test_nothing_is_kept_where_that_is_not_wanted(caplog: Any) -> None:
    fit(caplog, plan_cache=False)
    assert not default_folder().exists()


def test_a_folder_that_cannot_be_written_costs_one_line(caplog: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said, _ = fit(caplog, plan_cache=tmp_path / "file" / "plans")
    assert said.count("cannot be kept in") == 1
    assert "of a step (" in said


def test_a_broken_entry_is_made_anew(caplog: Any, tmp_path: Path) -> None:
    _, expected = fit(caplog, plan_cache=str(tmp_path))
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text()[:-40])
    said, weights = fit(caplog, plan_cache=str(tmp_path))
    assert "is not whole, and is made anew" in said
    assert planned_anew(said)
    assert_equal(weights, expected, bitwise=True)
    assert not planned_anew(fit(caplog, plan_cache=str(tmp_path))[0])


def test_what_is_no_folder_is_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"plan_cache=3 is not allowed; give True, False, or the path"):
        dpx.DPXStrategy(memory_budget=1, plan_cache=3)  # type: ignore[arg-type]
