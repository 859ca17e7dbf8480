"""A planned step as a table, and as JSON has it."""

import itertools
from dataclasses import asdict, replace
from typing import Any

from lightning_dpx.lightning import (
    DeviceForecast,
    DryRun,
)
from lightning_dpx.lightning.monitors.base import format_rows
from lightning_dpx.memory import describe_cut, format_plan
from lightning_dpx.units import format_part, unit_of_table

HEADS = (
    "device", "rows", "parameters", "gradients", "optimizer", "buffers", "inputs", "activations", "planned",
    "peak", "budget", "extra time", "fits",
)  # fmt: skip
_MOST_ROWS = 8  # of the table; where there are more devices, equal ones share a row
_GRADIENTS_COME = (
    "Gradients count among activations, from when the backward makes them: those of the step before are freed."
)
_OTHERS_STAY = "Others: what else the device holds once the step has run, such as workspaces that its libraries keep."
CHECKED_BY_A_RUN = "Whether micro-batches give what one device gives is checked before the first step of a run."


def format_dry_run(found: DryRun) -> str:
    """A table, and the plan of the tightest device."""
    unit, _ = unit_of_figures(found)
    how = f" {found.basis}" if found.basis else ""
    table = format_rows(f"a training step, in {unit}, predicted{how}:", heads_of_table(found), rows_of_table(found))
    table = "\n".join([table, *notes_below(found)])
    tightest = found.tightest
    if tightest is None or tightest.plan is None or tightest.plan.keeps_all:
        return table
    return f"{table}\n\nplan of {tightest.device}:\n{format_plan(tightest.plan)}"


def heads_of_table(found: DryRun) -> tuple[str, ...]:
    # Most runs have neither, and the table is wide already.
    heads = list(HEADS)
    if _holds_others(found):
        heads.insert(heads.index("activations"), "others")
    if _communicates(found):
        heads.insert(heads.index("activations"), "communication")
    if _is_cut(found):
        heads.append("micro-batches")
    return tuple(heads)


def rows_of_table(found: DryRun) -> list[list[str]]:
    rows = []
    is_cut = _is_cut(found)
    _, unit = unit_of_figures(found)
    for one in found.forecasts:
        # Without a plan there is a dash, as zero would say that a plan takes no time.
        share = one.plan.recompute_share if one.plan is not None else None
        sizes = [one.parameters, one.gradients, one.optimizer, one.buffers, one.inputs]
        if _communicates(found):
            sizes.append(one.communication)
        if _holds_others(found):
            sizes.append(one.others)
        sizes.append(one.unplanned)
        planned = None if one.plan is None else one.plan.peak
        rows.append(
            [
                *(one.device, str(one.rows), *(f"{size / unit:.1f}" for size in sizes)),
                f"{planned / unit:.1f}" if planned is not None else "-",
                f"{one.peak / unit:.1f}",
                f"{one.budget / unit:.1f}" if one.budget else "-",
                f"{share:.1%}" if share is not None else "-",
                "yes" if one.fits else f"needs {one.smallest / unit:.1f}",
                *([_micro_batches(one)] if is_cut else []),
            ]
        )
    if len(rows) <= _MOST_ROWS:
        return rows
    return _with_equal_rows_joined(rows)


def _with_equal_rows_joined(rows: list[list[str]]) -> list[list[str]]:
    """The rows, those of devices in a row that differ in nothing but their names as one."""
    joined: list[list[str]] = []
    for _, group in itertools.groupby(rows, key=lambda row: row[1:]):
        first, *others = group
        name = f"{first[0]} to {others[-1][0]}" if others else first[0]
        joined.append([name, *first[1:]])
    return joined


def _micro_batches(one: DeviceForecast) -> str:
    if one.plan is None or one.plan.micro_batches == 1:
        return "-"
    return f"{one.plan.micro_batches} x {one.plan.micro_batch_rows}"


def notes_below(found: DryRun) -> list[str]:
    """A sentence for every device whose slice is cut, and what the figures of gradients are."""
    lines = []
    for one in found.forecasts:
        if one.plan is not None and one.plan.micro_batches > 1:
            peak = f"peak {format_part(one.peak, one.budget or one.static + one.unplanned)}"
            lines.append(f"{one.device}: {describe_cut(one.plan)}, {peak}")
    if lines:
        lines.append(CHECKED_BY_A_RUN)
    if any(one.counted for one in found.forecasts):
        lines.append(_GRADIENTS_COME)
    if _holds_others(found):
        lines.append(_OTHERS_STAY)
    return lines


def _communicates(found: DryRun) -> bool:
    return any(one.communication for one in found.forecasts)


def _holds_others(found: DryRun) -> bool:
    return any(one.others for one in found.forecasts)


def _is_cut(found: DryRun) -> bool:
    return any(one.plan is not None and one.plan.micro_batches > 1 for one in found.forecasts)


def unit_of_figures(found: DryRun) -> tuple[str, int]:
    return unit_of_table(max(max(one.peak, one.smallest) for one in found.forecasts))


def forecast_as_dict(forecast: DeviceForecast) -> dict[str, Any]:
    # A plan has an entry for each value of a step; JSON gets its few numbers alone.
    values = asdict(replace(forecast, plan=None))
    del values["plan"]
    plan = forecast.plan
    return {
        **values,
        # These are properties, which asdict leaves out.
        "peak": forecast.peak,
        "fits": forecast.fits,
        "extra_time_share": None if plan is None else plan.recompute_share,
        "micro_batches": None if plan is None else plan.micro_batches,
        "micro_batch_rows": None if plan is None else plan.micro_batch_rows or forecast.rows,
        "values_recomputed": None if plan is None else plan.num_recomputed,
    }
