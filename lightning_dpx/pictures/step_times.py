"""The time of a step and the samples per second over the number of nodes, as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dpx.pictures.figure import KIND_COLORS, PLANNED, UNPLANNED, new_figure, plain_axes


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step on so many nodes.

    Attributes:
        nodes: N.
        seconds: By what they are spent on, in the order in which they are stacked.
        samples_per_second: Over all nodes.
        efficiency: A share of what as many devices do that need not wait for each other.
    """

    nodes: int
    seconds: Mapping[str, float]
    samples_per_second: float
    efficiency: float


def draw_step_times(points: Sequence[StepPoint]) -> Any:
    """Above, what a step spends its time on, a bar per number of nodes; below, samples per second beside the ideal.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    figure = new_figure(7, 5.6)
    above, below = figure.subplots(2, 1, height_ratios=[3, 2])
    # Each number of nodes is a place of its own, as they double from one to the next.
    places = list(range(len(points)))
    names = [str(point.nodes) for point in points]
    _draw_bars(plain_axes(above), points, places)
    speeds = [point.samples_per_second for point in points]
    ideal = [point.samples_per_second / point.efficiency for point in points]
    plain_axes(below).plot(places, ideal, ":", color=UNPLANNED, label="if no device waited")
    below.plot(places, speeds, "o-", color=PLANNED, ms=4, label="predicted")
    below.set_yscale("log")
    below.set(xlabel="nodes", ylabel="samples per second")
    below.legend(frameon=False, fontsize=9)
    for axes in (above, below):
        axes.set_xticks(places, names)
    return figure


def _draw_bars(axes: Any, points: Sequence[StepPoint], places: Sequence[int]) -> None:
    bottoms = [0.0] * len(points)
    colors = [KIND_COLORS[kind] for kind in ("activations", "gradients", "optimizer", "parameters")]
    for kind, color in zip(points[0].seconds, colors, strict=True):
        heights = [1e3 * point.seconds[kind] for point in points]
        axes.bar(places, heights, bottom=bottoms, width=0.7, color=color, label=kind)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, point, top in zip(places, points, bottoms, strict=True):
        axes.annotate(f"{point.efficiency:.0%}", (place, top), (0, 2), textcoords="offset points", ha="center",
                      fontsize=8)  # fmt: skip
    axes.set(ylabel="milliseconds of a step")
    axes.set_title("Time of a step, and the share of it in which devices compute")
    # Bars fill the axes, so their names stand beside these.
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
