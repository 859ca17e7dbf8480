"""What all pictures share: matplotlib where it is installed, colours, and ways out."""

import io
from pathlib import Path
from typing import Any

from lightning_dpx.errors import UnsupportedError

KIND_COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#f2b447",
    "optimizer": "#b279a2",
    "buffers": "#9d9d9d",
    "activations": "#54a24b",
}
PLANNED = "#2a7d2e"
UNPLANNED = "#9d9d9d"
LIMIT = "#c8372d"


def new_figure(width: float, height: float) -> Any:
    """An empty figure of ``width`` x ``height`` inches.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("A picture needs matplotlib; pip install 'lightning-dpx[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """As PNG, SVG or PDF, by the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def svg_of(figure: Any) -> str:
    """The figure as an ``<svg>`` element; its text stays text."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def plain_axes(axes: Any) -> Any:
    """Without the frame's upper and right lines, on a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    return axes
