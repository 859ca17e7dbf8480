"""Pictures need matplotlib, which is an extra."""

from typing import Any

from lightning_dpx.errors import UnsupportedError


def new_figure(width: float, height: float) -> Any:
    """An empty figure of ``width`` x ``height`` inches.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("A plot needs matplotlib; pip install 'lightning-dpx[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")
