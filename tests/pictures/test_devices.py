"""Bars of devices stack up to the peaks."""

from dataclasses import replace

import pytest

from lightning_dpx.pictures import draw_devices, pixels_of
from tests.pictures.made_up import DEVICES, MIB


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


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_the_legend_lies_within_the_picture_however_few_devices_there_are(number: int) -> None:
    figure = draw_devices(DEVICES[:number])
    rows, columns, _ = pixels_of(figure).shape
    box = figure.legends[0].get_window_extent()
    assert (box.x0 >= 0, box.x1 <= columns, box.y0 >= 0, box.y1 <= rows) == (True, True, True, True)
    for text in figure.legends[0].get_texts():
        assert text.get_window_extent().x1 <= columns


def test_a_budget_is_drawn_for_all_devices_or_for_none() -> None:
    small = replace(DEVICES[0], peaks={"forward": 20 * MIB, "backward": 30 * MIB}, budget=100 * MIB)
    large = replace(DEVICES[1], budget=100 * MIB)
    for devices, shown in ([small, large], True), ([small, small], False):
        for axes in draw_devices(devices).axes:
            assert ("budget" in {line.get_label() for line in axes.lines}) is shown


def test_the_size_of_a_low_bar_stands_above_it() -> None:
    device = replace(DEVICES[0], peaks={"forward": 50 * MIB, "backward": 60 * MIB, "optimizer": MIB})
    sides = [text.get_verticalalignment() for text in draw_devices([device]).axes[0].texts]
    assert sides == ["top", "top", "bottom"]
