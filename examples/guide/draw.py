"""Makes the pictures of the README and of this guide: ``python examples/guide/draw.py``."""

from pathlib import Path

import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure
from torch import nn

import lightning_dpx as dpx
from examples.digits import DigitClassifier, DigitData
from lightning_dpx.lightning import Settings, dry_run
from lightning_dpx.memory import plan_profile, profile_module
from lightning_dpx.pictures import BatchSizePoint, DeviceStep, draw_batch_sizes, draw_devices, draw_plan, save_figure

FOLDER = Path(__file__).parent / "pictures"


def transformer(blocks: int = 3, width: int = 256) -> nn.Module:
    """(B, T, width) to (B, T, width)."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)


def one_process() -> Figure:
    """One process, K replicas: a batch is cut, losses and gradients come together, one optimizer steps."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set(xlim=(0, 10), ylim=(0, 4))

    def box(x: float, y: float, text: str, color: str, width: float = 1.7) -> None:
        style = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": "#555"}
        axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=9, bbox=style)

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#555"})

    box(0, 2, "batch\n(B, ...)", "#f2f2f2", 1.2)
    for number, height in enumerate((3.4, 2.0, 0.6)):
        name = ("first device", "second device", "last device")[number]
        arrow((1.0, 2), (2.6, height))
        box(2.6, height, f"replica on the {name}:\ntraining_step(slice)", "#dbe8f5", 2.6)
        arrow((5.2, height), (6.4, 2))
    box(6.4, 2, "one loss,\nsummed gradients", "#dff0dc", 1.7)
    arrow((8.1, 2), (8.6, 2))
    box(8.6, 2, "one optimizer\nstep", "#f8e6c4", 1.4)
    axes.set_title("one process", fontsize=10)
    return figure


def plan() -> Figure:
    """The memory of a step with and without a plan."""
    module, batch = transformer(), torch.randn(8, 128, 256)
    profile = profile_module(module, batch)
    return draw_plan(profile, plan_profile(module, profile, profile.peak // 2))


def devices() -> Figure:
    """The peak of every device by kind, with a budget."""
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False)
    names = ("cuda:0", "cuda:1", "cuda:2")
    settings = Settings(tuple(map(torch.device, names)), workload=[2, 1, 1], budget=8 * 2**20)
    found = dry_run(trainer, DigitClassifier(), DigitData(256), settings)
    steps = []
    for one in found.forecasts:
        lasting = {kind: getattr(one, kind) for kind in ("parameters", "gradients", "optimizer", "buffers")}
        peaks = {"everything kept": one.static + one.unplanned, "planned": one.peak}
        steps.append(DeviceStep(one.device, lasting, peaks, budget=one.budget))
    return draw_devices(steps, "A training step on unequal shares, predicted")


def batch_sizes() -> Figure:
    """What ``dpx tune`` finds for one device with 24 MiB."""
    found = dpx.tune(DigitClassifier(), DigitData(64), devices=["cuda:0"], budget="24MiB")
    points = []
    for one in found.batch_sizes:
        tightest = one.tightest
        speed = one.samples_per_second
        points.append(
            BatchSizePoint("", one.batch_size, speed, 0.0, tightest.needed, tightest.budget, one is found.best)
        )
    return draw_batch_sizes(points)


def main() -> None:
    torch.manual_seed(0)
    for make in (one_process, plan, devices, batch_sizes):
        save_figure(make(), FOLDER / f"{make.__name__}.png")


if __name__ == "__main__":
    main()
