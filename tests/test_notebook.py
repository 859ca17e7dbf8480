"""What notebooks show of plans, profiles, tunings and monitors."""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from lightning_dpx.memory import profile_step
from lightning_dpx.notebook import html_table
from tests.conftest import make_trainer

formatters = pytest.importorskip("IPython.core.formatters")


def shown_by_notebook(value: object) -> str:
    shown = formatters.HTMLFormatter()(value)
    assert isinstance(shown, str)
    return shown


def texts(table: str) -> list[str]:
    return re.findall(r">([^<>]+)<", table)


def test_texts_are_escaped_and_what_is_left_out_is_counted() -> None:
    table = html_table("a < b", ("name", "bytes"), [(f"<{number}>", "1") for number in range(5)], most_rows=3)
    assert "a &lt; b" in table
    assert "&lt;2&gt;" in table
    assert "&lt;3&gt;" not in table
    assert texts(table)[-1] == "2 more"
    assert table.count("<tr>") == table.count("</tr>") == 5


def test_one_row_may_be_marked() -> None:
    table = html_table("", ("name",), [("one",), ("two",)], marked=1)
    assert re.findall(r'bold">(\w+)<', table) == ["two"]


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))


def test_a_plan_shows_its_peaks_and_what_is_dropped_of_each_module() -> None:
    plan = dpx.search_plan(blocks(), torch.ones(64, 64), budget=0.7, progress=False)
    shown = texts(shown_by_notebook(plan))
    assert "activations: peak" in shown[0]
    assert shown[1:5] == ["module", "values", "saves KiB", "costs ms"]
    dropped = {decision.module for decision in plan.decisions if decision.action != "keep"}
    assert dropped
    assert dropped <= set(shown)


def test_a_profile_shows_its_largest_values() -> None:
    model = blocks()
    rows = torch.ones(64, 64)
    profile = profile_step(model, lambda: model(rows).sum(), torch.device("cpu"))
    shown = texts(shown_by_notebook(profile))
    assert "values are kept for backward; peak" in shown[0]
    named = {value.name for value in profile.values if value.name}
    assert named & set(shown)


def test_a_tuning_shows_the_best_batch_size_in_bold() -> None:
    found = dpx.tune(BoringModel(), DataLoader(torch.ones(64, 32), batch_size=4), batch_sizes=[4, 8])
    assert f'bold">{found.best.batch_size}<' in shown_by_notebook(found)


@pytest.mark.parametrize("kind", [dpx.DeviceMemoryMonitor, dpx.DeviceThroughputMonitor])
def test_a_monitor_shows_the_last_measured_step(kind: Any) -> None:
    monitor = kind(table=False)
    assert texts(shown_by_notebook(monitor))[0] == "dpx: no step has been measured"
    make_trainer(callbacks=[monitor], max_steps=2).fit(BoringModel())
    title, *cells = texts(shown_by_notebook(monitor))
    assert title.startswith("dpx: ")
    assert "of the last step" in title
    assert "device" in cells
    assert "cpu" in cells
