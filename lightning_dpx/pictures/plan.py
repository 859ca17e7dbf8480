"""A memory plan as a picture: bytes through the step, what is kept from when to when, and the price of a budget."""

from collections.abc import Sequence
from typing import Any

from lightning_dpx.memory import MemoryPlan, Profile, timeline_of
from lightning_dpx.pictures.figure import KIND_COLORS, LIMIT, PLANNED, UNPLANNED, name_places, new_figure, plain_axes
from lightning_dpx.units import MIB

_ACTIONS = {
    "keep": KIND_COLORS["parameters"],
    "recompute": KIND_COLORS["activations"],
    "recompute each time": "#8cc27f",
    "compress": KIND_COLORS["gradients"],
    "compress each time": "#b98fc9",
    "offload": KIND_COLORS["optimizer"],
    "replay": "#4f8f5b",
}
_MOST_ROWS = 48


def draw_plan(profile: Profile, plan: MemoryPlan, title: str = "") -> Any:
    """Above, the bytes of activations through forward and backward, with and without the plan. Below, the largest
    values: a bar from the end of a value's use in forward to the end of its use in backward, in the color of what the
    plan does with it; a bar is solid where memory is occupied, and a tick marks a recomputation.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    rows = _largest(profile, plan)
    figure = new_figure(9, 3.4 + 0.13 * len(rows))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, max(1.0, 0.13 * len(rows))])
    _draw_bytes(plain_axes(above), profile, plan)
    name_places(above, _steps_of(profile))
    _draw_values(below, profile, rows)
    for axes in (above, below):
        axes.axvline(profile.forward_events, color="black", linewidth=0.8, alpha=0.5)
    count = sum(decision.action != "keep" for decision in plan.decisions)
    above.set_title(title or f"{plan.model}: {count} of {len(plan.decisions)} values are not kept")
    return figure


def _draw_bytes(axes: Any, profile: Profile, plan: MemoryPlan) -> None:
    unplanned = timeline_of(profile)
    with_plan = timeline_of(profile, plan)
    events = range(len(unplanned))
    axes.fill_between(events, [size / MIB for size in unplanned], step="post", color=UNPLANNED, alpha=0.25)
    # Bytes change at an event and stay until the next one.
    axes.step(events, [size / MIB for size in unplanned], where="post", color=UNPLANNED, label="everything kept")
    axes.fill_between(events, [size / MIB for size in with_plan], step="post", color=PLANNED, alpha=0.35)
    axes.step(events, [size / MIB for size in with_plan], where="post", color=PLANNED, label="with the plan")
    # Room at the top for the two words.
    top = 1.12 * max(unplanned, default=1)
    if plan.budget:
        # A budget far above the step is not in the picture, and is told all the same.
        label = "budget" if plan.budget <= top else f"budget: {plan.budget / MIB:,.4g} MiB, above"
        axes.axhline(plan.budget / MIB, color=LIMIT, linewidth=1.2, label=label)
    axes.set_ylabel("activations, MiB")
    axes.set_ylim(0, top / MIB)
    middle = profile.forward_events
    for position, text in ((middle / 2, "forward"), ((middle + len(unplanned)) / 2, "backward")):
        axes.annotate(
            text, (position, 1), (0, -12), ("data", "axes fraction"), "offset points", ha="center", fontsize=9
        )
    axes.legend(loc="upper right", frameon=False, fontsize=9)


def _steps_of(profile: Profile) -> list[tuple[float, str]]:
    """What the step is at, from event to event: the module whose value is saved, or asked for."""
    steps: dict[int, str] = {}
    for value in profile.values:
        if value.name and value.saved:
            steps[value.saved] = f"forward of {_module_of(value.name)}"
    for request in profile.requests:
        value = profile.values[request.value]
        if value.name:
            steps[request.event] = f"backward of {_module_of(value.name)}"
    found: list[tuple[float, str]] = []
    for event, text in sorted(steps.items()):
        # A module is named once for all that it does in a row.
        if not found or found[-1][1] != text:
            found.append((float(event), text))
    return found


def _module_of(name: str) -> str:
    return name.partition(":")[0] or "the step itself"


def _largest(profile: Profile, plan: MemoryPlan) -> list[tuple[str, str, int, int]]:
    """Name, action, storage and value of the values that occupy most, in the order of forward."""
    actions = {decision.name: decision.action for decision in plan.decisions}
    seen: dict[int, tuple[str, str, int, int]] = {}
    for index, value in enumerate(profile.values):
        if value.name in actions and value.storage >= 0:
            # A storage is drawn once, by the first value that keeps it.
            seen.setdefault(value.storage, (value.name, actions[value.name], value.storage, index))
    by_size = sorted(seen.values(), key=lambda row: profile.storages[row[2]].num_bytes, reverse=True)
    return sorted(by_size[:_MOST_ROWS], key=lambda row: row[3])


def _draw_values(axes: Any, profile: Profile, rows: Sequence[tuple[str, str, int, int]]) -> None:
    if not rows:  # nothing is kept that the plan could drop
        # Axes without anything in them would still show their frame.
        axes.set_visible(False)
        return
    shown: set[str] = set()
    for position, (_, action, number, index) in enumerate(rows):
        storage = profile.storages[number]
        color = _ACTIONS[action]
        # A legend has one entry for each action, not for each bar.
        label = None if action in shown else action
        shown.add(action)
        span = storage.freed - storage.unused
        if action == "keep":
            axes.barh(position, span, left=storage.unused, height=0.7, color=color, label=label)
            continue
        axes.barh(position, span, left=storage.unused, height=0.7, color=color, alpha=0.22, label=label)
        for request in profile.requests:
            if request.value == index:
                # A value that is let go of at once would have a bar without a width.
                used = max(1, request.released - request.event)
                axes.barh(position, used, left=request.event, height=0.7, color=color)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=6)
    # From top to bottom in the order of forward.
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("events of the step: every allocation and release, in order")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False, fontsize=8)


def draw_prices(prices: Sequence[tuple[int, float]], unplanned: int, chosen: tuple[int, float] | None = None) -> Any:
    """What every budget costs: extra time of a step over the predicted peak.

    Args:
        prices: Predicted peak of activations in bytes, and the extra time as a share of a step, of several plans.
        unplanned: Bytes without a plan.
        chosen: The plan that is followed.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    figure = new_figure(6.5, 3.8)
    axes = plain_axes(figure.add_subplot())
    # Keeping everything is a plan, too, and costs nothing.
    points = sorted([*prices, (unplanned, 0.0)])
    axes.plot([size / MIB for size, _ in points], [100 * share for _, share in points], "o-", color=PLANNED, ms=4)
    if chosen is not None:
        axes.plot(chosen[0] / MIB, 100 * chosen[1], "D", color=LIMIT, ms=8, label="this plan")
        axes.legend(frameon=False)
    axes.axvline(unplanned / MIB, color=UNPLANNED, linestyle=":")
    axes.annotate("everything kept", (unplanned / MIB, 0.5), (-4, 0), ("data", "axes fraction"), "offset points",
                  ha="right", rotation=90, fontsize=8, va="center")  # fmt: skip
    # From 0 on, so that lengths compare.
    axes.set(xlabel="peak of activations, MiB", ylabel="extra time of a step, %", xlim=(0, None), ylim=(0, None))
    axes.set_title("What a budget costs")
    return figure
