"""Pictures of a measured step and of the plans that it followed, for a page and for loggers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lightning_dpx.devices import canonical_device
from lightning_dpx.lightning.lightning_api import Logger, Trainer
from lightning_dpx.lightning.memory.activation_planner import ActivationPlanner
from lightning_dpx.lightning.memory.device_memory import KINDS, PHASES, DeviceMemory
from lightning_dpx.lightning.monitors.base import short_name, warn_unless_written
from lightning_dpx.lightning.monitors.pictures import log_picture
from lightning_dpx.lightning.session import Session
from lightning_dpx.lightning.strategy import DPXStrategy
from lightning_dpx.memory import MemoryPlan, Profile, format_plan
from lightning_dpx.pictures import DeviceStep, Section, draw_devices, draw_plan, write_page

_TEXT = (
    "The last measured step. What is no parameter, gradient, optimizer state or buffer is drawn as activations and "
    "temporary tensors. What the process held beside tensors of the host before the step is in the table's peaks, and "
    "not in the picture."
)


MemoryPlans = dict[torch.device, tuple[MemoryPlan, Profile | None]]


def draw_report(
    step: int,
    last: Mapping[torch.device, DeviceMemory],
    table: tuple[str, Sequence[str], Sequence[Sequence[str]]],
    plans: MemoryPlans,
    loggers: Sequence[Logger],
    page: Path | None,
) -> None:
    """Draws the devices in ``step`` and the plans that it followed, for ``loggers`` and into ``page``.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    devices = draw_devices([_as_picture(device, memory) for device, memory in last.items()])
    # A plan that was given has no profile, so there is nothing to draw it over.
    drawn = {device: draw_plan(profile, plan) for device, (plan, profile) in plans.items() if profile is not None}
    for logger in loggers:
        log_picture(logger, ("memory",), devices, step)
        for device, figure in drawn.items():
            log_picture(logger, ("plan", short_name(device)), figure, step)
    if page is None:
        return
    title, heads, rows = table
    said = title.removeprefix("dpx: ")
    # Its first letter alone: the others are those of units, too.
    heading = said[:1].upper() + said[1:]
    sections = [Section(heading, _TEXT, heads, rows, [devices])]
    for device, (plan, _) in plans.items():
        figures = [drawn[device]] if device in drawn else []
        sections.append(Section(f"Plan of {device}", figures=figures, printed=format_plan(plan, most_rows=1000)))
    with warn_unless_written(page):
        write_page(page, "dpx: device memory", sections)


def planned_activations(trainer: Trainer, device: torch.device) -> tuple[int, int]:
    """Bytes of activations that a plan predicts on ``device`` at their peak, and the budget for all; 0 without."""
    if isinstance(trainer.strategy, DPXStrategy):
        return trainer.strategy.planned_activations(device)
    followed = memory_plans(trainer).get(device)
    # The callback's budget is one for activations, and the figure here is for
    # everything on the device.
    if followed is None:
        return (0, 0)
    return (followed[0].peak or 0, 0)


def micro_batches_on(trainer: Trainer, device: torch.device) -> int:
    """Into how many micro-batches the slices of a device are cut in training; 1 under other strategies."""
    session = trainer.strategy.session if isinstance(trainer.strategy, DPXStrategy) else None
    # OneDevice stands for a session where nothing is cut.
    if not isinstance(session, Session) or session.micro_batches is None:
        return 1
    replicas = session.replicas
    most = 1
    for home, number in zip(replicas.devices, replicas.partition.numbers(training=True), strict=True):
        # Replicas may share a device, and each has its own number.
        if home == device:
            most = max(most, number)
    return most


def memory_plans(trainer: Trainer) -> MemoryPlans:
    """By device, the plan that is followed under any strategy, and the step that it was made from."""
    if isinstance(trainer.strategy, DPXStrategy):
        return trainer.strategy.memory_plans
    # Under other strategies a plan can come from the callback alone.
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ActivationPlanner) and callback.plan is not None:
            return {canonical_device(trainer.strategy.root_device): (callback.plan, callback.profile)}
    return {}


def _as_picture(device: torch.device, memory: DeviceMemory) -> DeviceStep:
    static = {kind: getattr(memory, kind) for kind in KINDS if kind != "activations"}
    # The interpreter and its libraries would press everything else flat, and no budget is for them.
    peaks: dict[str, int] = {phase: max(0, memory.peak_by_phase.get(phase, 0) - memory.process) for phase in PHASES}
    return DeviceStep(str(device), static, peaks, memory.planned, memory.budget, memory.total)
