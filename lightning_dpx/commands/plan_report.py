"""A planned step as a page with pictures."""

from pathlib import Path

import torch

from lightning_dpx.commands.plan_table import heads_of_table, notes_below, rows_of_table, unit_of_figures
from lightning_dpx.commands.plan_times import section_of
from lightning_dpx.commands.progress import progress
from lightning_dpx.errors import BudgetError
from lightning_dpx.lightning import (
    DeviceForecast,
    DryRun,
)
from lightning_dpx.lightning.memory.step_times import Machines
from lightning_dpx.memory import format_plan, plan_profile
from lightning_dpx.pictures import DeviceStep, Section, draw_devices, draw_plan, draw_prices, save_figure, write_page


def write_report(found: DryRun, path: Path, machines: Machines | None = None) -> None:
    """A page with everything, or the first of its pictures.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    steps = []
    for one in found.forecasts:
        lasting = {kind: getattr(one, kind) for kind in ("parameters", "gradients", "optimizer", "buffers")}
        # Where no plan fits, the least that one would need stands in its place.
        second = "planned" if one.fits else "the least"
        peaks = {"everything kept": one.static + one.unplanned, second: one.needed}
        steps.append(DeviceStep(one.device, lasting, peaks, budget=one.budget))
    devices = draw_devices(steps, "Memory of a training step, predicted")
    # A picture file has room for one figure, and the devices come first.
    if path.suffix != ".html":
        save_figure(devices, path)
        return
    sections = [
        Section(
            "Devices",
            f"Predicted for one training step, in {unit_of_figures(found)[0]}.",
            heads_of_table(found),
            rows_of_table(found),
            [devices],
            printed="\n".join(notes_below(found)),
        ),
    ]
    tightest = found.tightest
    if tightest is not None and tightest.plan is not None:
        profile = found.profile_of(tightest)
        plan = tightest.plan
        progress("planning for other budgets")
        chosen = (plan.peak or 0, plan.recompute_share or 0.0)
        prices = draw_prices([chosen, *prices_of(found, tightest)], tightest.unplanned, chosen)
        sections += [
            Section("Other budgets", "Activations alone; the rest of a device's memory comes on top.",
                    figures=[prices]),
            Section("The plan", f"For {tightest.device}, whose room is the least.",
                    figures=[draw_plan(profile, plan)], printed=format_plan(plan, most_rows=1000)),
        ]  # fmt: skip
    if machines is not None:
        # Only a prediction of memory needs no rates, so most pages end here.
        sections.append(section_of(found.steps, machines))
    write_page(path, "dpx: memory plan", sections)


def prices_of(found: DryRun, forecast: DeviceForecast, points: int = 8) -> list[tuple[int, float]]:
    """Peaks and extra times of a device's plans between the smallest and the unplanned peak."""
    prices = []
    # Without a budget the planner goes as low as it can. The profile is all that it reads, so an
    # empty module stands for the model.
    smallest = plan_profile(torch.nn.Module(), found.profile_of(forecast), None)
    low = smallest.peak or 0
    for step in range(points + 1):
        # The unplanned peak itself is drawn anyway, at no extra time.
        budget = low + (forecast.unplanned - low) * step // (points + 1)
        try:
            plan = found.plan_at(forecast, budget)
        except BudgetError:
            continue
        prices.append((plan.peak or 0, plan.recompute_share or 0.0))
    return prices
