"""Pictures show the numbers that they were given, and a page needs nothing else."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.memory import MemoryPlan, Profile, plan_profile, profile_module, timeline_of
from lightning_dpx.pictures import DeviceStep, Section, draw_devices, draw_plan, draw_prices, save_figure, write_page

MIB = 2**20
DEVICES = [
    DeviceStep(
        f"cuda:{index}",
        {"parameters": 10 * MIB, "gradients": 10 * MIB, "optimizer": 20 * MIB, "buffers": MIB},
        {"forward": 50 * MIB, "backward": (60 - index) * MIB, "optimizer": 41 * MIB},
        planned=61 * MIB,
        budget=64 * MIB,
        capacity=80 * MIB,
    )
    for index in range(5)
]


def planned() -> tuple[Profile, MemoryPlan]:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(4)))
    profile = profile_module(module, torch.randn(64, 32))
    return profile, plan_profile(module, profile, int(0.7 * profile.peak))


def test_bars_stack_up_to_the_peaks_and_the_lines_are_where_they_belong() -> None:
    figure = draw_devices(DEVICES)
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [f"cuda:{index}" for index in range(5)]
    tops = [0.0, 0.0, 0.0]
    for bar in panels[3].patches:
        place = round(bar.get_x() + bar.get_width() / 2)
        tops[place] = max(tops[place], bar.get_y() + bar.get_height())
    assert tops == [50, 57, 41]
    lines = {line.get_label(): line.get_ydata()[0] for line in panels[0].lines}
    assert lines == {"planned peak": 61, "budget": 64, "capacity": 80}


def test_the_curve_of_a_plan_reaches_its_predicted_peak() -> None:
    profile, plan = planned()
    curve = timeline_of(profile, plan)
    assert max(curve) == plan.peak
    assert len(curve) == len(profile.curve)
    above, below = draw_plan(profile, plan).axes
    drawn = {line.get_label(): max(line.get_ydata()) for line in above.lines if not line.get_label().startswith("_")}
    assert drawn["with the plan"] == plan.peak / MIB
    assert drawn["everything kept"] == profile.peak / MIB
    assert {text.get_text() for text in below.get_legend().get_texts()} == {d.action for d in plan.decisions}


def test_prices_hold_every_plan_and_the_one_that_is_free() -> None:
    figure = draw_prices([(10 * MIB, 0.2), (20 * MIB, 0.1)], 40 * MIB, chosen=(20 * MIB, 0.1))
    line = figure.axes[0].lines[0]
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(10, 20), (20, 10), (40, 0)]


class Elements(HTMLParser):
    """Counts elements, and collects what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loaded += [value for key, value in attrs if key in ("src", "href", "xlink:href") and value[:1] != "#"]


def test_a_page_is_one_file_with_escaped_text(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "report.html"
    section = Section("A <b>heading", "x < y", ["a", "b"], [["1", "<2>"]], [draw_devices(DEVICES)], "a & b")
    write_page(path, "Title & more", [section, Section("Empty")])
    page = Elements()
    text = path.read_text(encoding="utf-8")
    page.feed(text)
    assert page.counts["svg"] == page.counts["table"] == page.counts["pre"] == 1
    assert page.counts["h2"] == 2
    assert not page.loaded
    assert "script" not in page.counts
    assert "b" not in page.counts
    assert all(part in text for part in ("A &lt;b&gt;heading", "x &lt; y", "&lt;2&gt;", "a &amp; b", "cuda:4"))


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_figures_become_files(suffix: str, begins: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"devices{suffix}"
    save_figure(draw_devices(DEVICES[:1]), path)
    assert path.read_bytes().startswith(begins)
