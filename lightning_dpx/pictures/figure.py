"""What all pictures share: matplotlib where it is installed, colors, and ways out."""

import html
import io
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dpx.errors import UnsupportedError

KIND_COLORS = {
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
        # Not pyplot, which chooses a window system and keeps every figure until it is closed.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("A picture needs matplotlib; pip install 'lightning-dpx[plots]'.") from error
    # Legends outside of the axes get their room only in this layout.
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """As PNG, SVG or PDF, by the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


@dataclass(frozen=True, slots=True)
class Hover:
    """What a page says of the place under the pointer.

    Attributes:
        axes: Of the picture.
        texts: From which place of the horizontal axis on, and what.
    """

    axes: Any
    texts: Sequence[tuple[float, str]]


# By weak keys, so that a note keeps no figure alive.
_HOVERS: "weakref.WeakKeyDictionary[Any, Hover]" = weakref.WeakKeyDictionary()  # by figure


def name_places(axes: Any, texts: Sequence[tuple[float, str]]) -> None:
    """From each of these places of the horizontal axis on, a page says that text under the pointer."""
    _HOVERS[axes.figure] = Hover(axes, texts)


def pixels_of(figure: Any) -> Any:
    """The figure as an array of rows x columns x 4 bytes: red, green, blue and how opaque."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # A figure made without pyplot has a canvas that cannot draw.
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    # The canvas draws the next time into the same memory.
    return np.array(canvas.buffer_rgba())


def svg_of(figure: Any) -> str:
    """The figure as an ``<svg>`` element; its text stays text."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        # Without a date the same figure gives the same file.
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    # Within HTML an XML declaration and a document type have no place.
    text = text[text.index("<svg") :]
    hover = _HOVERS.get(figure)
    if hover is None:
        return text
    return text.replace("<svg", f"<svg data-hover='{_as_attribute(hover)}'", 1)


def _as_attribute(hover: Hover) -> str:
    """As JSON, with where the axes lie in the picture, as shares of its width."""
    # Asked after the figure was drawn, which is when the layout is known.
    box = hover.axes.get_position()
    first, last = hover.axes.get_xlim()
    content = {"left": box.x0, "right": box.x1, "first": first, "last": last, "texts": list(hover.texts)}
    # It stands in an attribute, between quotes.
    return html.escape(json.dumps(content, separators=(",", ":")), quote=True)


def plain_axes(axes: Any) -> Any:
    """Without the frame's upper and right lines, on a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    # Or the grid would be drawn over the bars.
    axes.set_axisbelow(True)
    return axes
