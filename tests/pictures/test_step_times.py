"""The picture of steps on many nodes shows the numbers that it was given."""

import pytest

from lightning_dpx.pictures import StepPoint, draw_step_times, pixels_of


def test_bars_add_up_to_the_step_and_speeds_stand_beside_the_ideal() -> None:
    points = []
    for nodes, network, efficiency in ((1, 0.0, 0.8), (2, 0.002, 0.5)):
        seconds = {"compute": 0.004, "reduction within a node": 0.001, "between nodes": network, "parameters": 0.0}
        points.append(StepPoint(nodes, seconds, nodes * 100.0, efficiency))
    figure = draw_step_times(points)
    above, below = figure.axes
    tops = [max(bar.get_y() + bar.get_height() for bar in above.patches if bar.get_x() + 0.35 == at) for at in (0, 1)]
    assert tops == pytest.approx([5.0, 7.0]), "milliseconds"
    assert [text.get_text() for text in above.texts] == ["80%", "50%"]
    drawn = {line.get_label(): list(line.get_ydata()) for line in below.lines}
    assert drawn == {"predicted": [100, 200], "if no device waited": [125, 400]}
    assert [label.get_text() for label in below.get_xticklabels()] == ["1", "2"]
    # Where the layout has put them when the picture is drawn.
    pixels_of(figure)
    bars = max(bar.get_window_extent().x1 for bar in above.patches)
    assert above.get_legend().get_window_extent().x0 > bars, "names beside the bars, not on them"
