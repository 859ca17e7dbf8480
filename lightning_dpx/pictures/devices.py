"""Memory of every device over one step, stacked by kind, measured against planned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dpx.pictures.figure import KIND_COLORS, LIMIT, PLANNED, new_figure, plain_axes
from lightning_dpx.units import MIB

_LOW = 0.15  # of the largest peak
_BEFORE_BACKWARD = "forward"  # the phase in which there are no gradients yet


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One device in one step, in bytes.

    Attributes:
        name: The device.
        static: By kind: ``"parameters"``, ``"gradients"``, ``"optimizer"``, ``"buffers"``.
        peaks: By phase, in order, the most that was allocated in it.
        planned: The predicted peak; 0 without a plan.
        budget: What was allowed; 0 without a budget.
        capacity: What the device has; 0 where that is unknown.
    """

    name: str
    static: Mapping[str, int]
    peaks: Mapping[str, int]
    planned: int = 0
    budget: int = 0
    capacity: int = 0


def draw_devices(devices: Sequence[DeviceStep], title: str = "Memory of a training step") -> Any:
    """A panel per device: a bar per phase, up to its peak, stacked by kind, with what was planned and allowed.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    columns = min(4, len(devices))
    rows = -(-len(devices) // columns)
    # The legend stands below; a narrow picture has it in fewer columns, which take more height.
    legend_columns = {1: 1, 2: 2}.get(columns, 4)
    figure = new_figure(1.2 + 2.6 * columns, 0.5 + 3.2 * rows + 1.6 / legend_columns)
    # On one scale, so that devices compare at a glance.
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    # The last row of panels may have room left.
    for axes in panels[len(devices) :]:
        axes.set_visible(False)
    # Panels have one scale, so a line that fits into one of them fits into all.
    top = max((peak for device in devices for peak in device.peaks.values()), default=0)
    for axes, device in zip(panels, devices, strict=False):
        _draw_device(plain_axes(axes), device, top)
    for axes in panels[::columns]:
        axes.set_ylabel("MiB")
    figure.suptitle(title)
    handles: dict[str, Any] = {}
    for axes in panels[: len(devices)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            # Devices share one legend, in which every label stands once.
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=legend_columns, frameon=False, fontsize=9
    )
    return figure


def _draw_device(axes: Any, device: DeviceStep, top: int) -> None:
    """Its bars, and the lines that are not far above ``top``, the largest peak of all devices, in bytes."""
    positions = range(len(device.peaks))
    bottoms = [0.0] * len(device.peaks)
    for kind in ("parameters", "buffers", "optimizer", "gradients"):
        sizes = []
        for phase in device.peaks:
            # The first backward makes them.
            is_there = kind != "gradients" or phase != _BEFORE_BACKWARD
            sizes.append(device.static.get(kind, 0) / MIB if is_there else 0.0)
        axes.bar(positions, sizes, bottom=bottoms, width=0.7, color=KIND_COLORS[kind], label=kind)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    rest = [max(0.0, peak / MIB - bottom) for peak, bottom in zip(device.peaks.values(), bottoms, strict=True)]
    label = "activations and temporary tensors, at the peak"
    axes.bar(positions, rest, bottom=bottoms, width=0.7, color=KIND_COLORS["activations"], label=label)
    for value, color, style, name in (
        (device.planned, PLANNED, "--", "planned peak"),
        (device.budget, LIMIT, "-", "budget"),
        (device.capacity, "black", ":", "capacity"),
    ):
        # A line far above the bars would press them flat.
        if value and value < 3 * top:
            axes.axhline(value / MIB, color=color, linestyle=style, linewidth=1.4, label=name)
    for position, peak in zip(positions, device.peaks.values(), strict=True):
        size = f"{peak / MIB:,.0f}" if peak >= 100 * MIB else f"{peak / MIB:.3g}"
        # In a low bar there is no room for its size, so that stands above it.
        offset, side = ((0, -3), "top") if peak > _LOW * top else ((0, 2), "bottom")
        axes.annotate(
            size, (position, peak / MIB), offset, textcoords="offset points", ha="center", va=side, fontsize=8
        )
    axes.set_xticks(list(positions), list(device.peaks), fontsize=9)
    axes.set_title(device.name, fontsize=10)
