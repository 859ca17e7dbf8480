"""The picture of batch sizes shows the numbers that it was given."""

from lightning_dpx.pictures import BatchSizePoint, draw_batch_sizes
from lightning_dpx.units import MIB


def test_an_axis_of_slow_steps_has_fractions() -> None:
    for speed, whole in ((1200.0, True), (1.5, False)):
        above = draw_batch_sizes([BatchSizePoint("", 32, speed, 0.0, MIB, 0, True)]).axes[0]
        above.figure.canvas.draw()
        labels = [label.get_text() for label in above.get_yticklabels()]
        assert all("." not in label for label in labels) is whole
        assert len(set(labels)) == len(labels)


def test_speeds_peaks_and_what_does_not_fit() -> None:
    points = [
        BatchSizePoint("bf16", 32, 100.0, 90.0, 10 * MIB, 30 * MIB, False),
        BatchSizePoint("bf16", 64, 150.0, 0.0, 20 * MIB, 30 * MIB, True),
        BatchSizePoint("bf16", 128, 0.0, 0.0, 40 * MIB, 30 * MIB, False),
    ]
    above, below = draw_batch_sizes(points).axes
    drawn = {line.get_label(): line for line in above.lines}
    assert list(drawn["predicted, bf16"].get_xdata()) == [32, 64]
    assert list(drawn["predicted, bf16"].get_ydata()) == [100, 150]
    assert list(drawn["measured"].get_ydata()) == [90]
    assert list(drawn["best"].get_xdata()) == [64]
    assert above.get_ylim()[1] > 1.05 * 150, "the mark of the fastest is within the picture"
    assert list(below.lines[0].get_ydata()) == [10, 20, 40]
    assert below.lines[1].get_ydata()[0] == 30
    shaded = [patch.get_x() for patch in above.patches if patch.get_label() == "does not fit"]
    assert len(shaded) == 1
    assert 64 < shaded[0] < 128
