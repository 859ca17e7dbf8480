"""Speed and peak of training with several batch sizes, as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dpx.pictures.figure import KIND_COLORS, LIMIT, PLANNED, new_figure, plain_axes
from lightning_dpx.units import MIB

_WHOLE = 10  # samples per second, from which on an axis needs no fractions


@dataclass(frozen=True, slots=True)
class BatchSizePoint:
    """One batch size.

    Attributes:
        series: What it is a part of, such as a precision; may be empty.
        batch_size: B, rows over all devices.
        samples_per_second: Predicted; 0 where it does not fit.
        measured: Samples per second of a run; 0 where there was none.
        peak: Bytes on the tightest device.
        budget: Bytes that are allowed there; 0 without a budget.
        is_best: Whether it is the one to take.
    """

    series: str
    batch_size: int
    samples_per_second: float
    measured: float
    peak: int
    budget: int
    is_best: bool


def draw_batch_sizes(points: Sequence[BatchSizePoint]) -> Any:
    """Above, samples per second over the batch size; below, the peak beside the budget. What does not fit is shaded.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    figure = new_figure(7, 5.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    colors = [PLANNED, *KIND_COLORS.values()]
    names = list(dict.fromkeys(point.series for point in points))
    for number, name in enumerate(names):
        color = colors[number % len(colors)]
        series = [point for point in points if point.series == name]
        _draw_series(plain_axes(above), plain_axes(below), series, color, name)
    _mark_best(above, points)
    _shade_what_does_not_fit((above, below), points)
    if points[0].budget:
        below.axhline(points[0].budget / MIB, color=LIMIT, linewidth=1.2, label="budget")
        below.legend(frameon=False, fontsize=9)
    below.set_xscale("log", base=2)
    sizes = sorted({point.batch_size for point in points})
    # A logarithmic axis would name powers of 2 as powers.
    below.set_xticks(sizes, [str(size) for size in sizes])
    below.set(xlabel="batch size", ylabel="peak, MiB", ylim=(0, None))
    # A tenth more than the fastest, or its mark would be cut off.
    fastest = max(max(point.samples_per_second, point.measured) for point in points)
    above.set(ylabel="samples per second", ylim=(0, 1.1 * fastest or None))
    # As numbers that are read, and not as multiples of a power of ten.
    above.yaxis.set_major_formatter("{x:,.0f}" if fastest >= _WHOLE else "{x:.3g}")
    above.set_title("Speed and memory by batch size")
    above.legend(frameon=False, fontsize=9)
    return figure


def _draw_series(above: Any, below: Any, series: Sequence[BatchSizePoint], color: str, name: str) -> None:
    # What does not fit has a peak, and no speed.
    fitting = [point for point in series if point.samples_per_second]
    label = f"predicted, {name}" if name else "predicted"
    sizes = [point.batch_size for point in fitting]
    above.plot(sizes, [point.samples_per_second for point in fitting], "o-", color=color, ms=4, label=label)
    measured = [point for point in series if point.measured]
    if measured:
        speeds = [point.measured for point in measured]
        above.plot([point.batch_size for point in measured], speeds, "x", color=color, ms=8, label="measured")
    below.plot([point.batch_size for point in series], [point.peak / MIB for point in series], "o-", color=color, ms=4)


def _mark_best(axes: Any, points: Sequence[BatchSizePoint]) -> None:
    for point in points:
        if point.is_best:
            axes.plot(point.batch_size, point.samples_per_second, "D", color=LIMIT, ms=8, label="best")


def _shade_what_does_not_fit(both: Sequence[Any], points: Sequence[BatchSizePoint]) -> None:
    fitting = [point.batch_size for point in points if point.samples_per_second]
    # With several precisions a size is shaded only where it fits in none of them.
    others = [point.batch_size for point in points if point.batch_size > max(fitting, default=0)]
    if not others:
        return
    for axes in both:
        # Sizes double from one to the next, so on this axis a root of 2 is midway between them.
        axes.axvspan(min(others) / 2**0.5, max(others) * 2**0.5, color=LIMIT, alpha=0.08, label="does not fit")
