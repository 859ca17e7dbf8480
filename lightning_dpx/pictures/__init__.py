"""Pictures of what was planned and what happened, and the page that holds them. They need matplotlib, an extra."""

from lightning_dpx.pictures.batch_sizes import BatchSizePoint, draw_batch_sizes
from lightning_dpx.pictures.devices import DeviceStep, draw_devices
from lightning_dpx.pictures.figure import new_figure, pixels_of, save_figure, svg_of
from lightning_dpx.pictures.page import Section, write_page
from lightning_dpx.pictures.plan import draw_plan, draw_prices
from lightning_dpx.pictures.step_times import StepPoint, draw_step_times

__all__ = [
    "BatchSizePoint",
    "DeviceStep",
    "Section",
    "StepPoint",
    "draw_batch_sizes",
    "draw_devices",
    "draw_plan",
    "draw_prices",
    "draw_step_times",
    "new_figure",
    "pixels_of",
    "save_figure",
    "svg_of",
    "write_page",
]
