"""Plans on the device: bits, peaks by the allocator's own account, and times, predicted and measured."""

from typing import Any

import torch

from lightning_dpx import PlanError
from lightning_dpx.memory import apply_plan, bytes_of_budget, plan_profile, remove_plan
from lightning_dpx.memory.plan.make_plan import make_planner
from tests.gpu.models import Subject, subjects
from tests.gpu.place import Place

_BUDGETS = (0.7, 0.5, 0.3)
_RECORDED = 0.5
_ROUNDS = 5
_TOLERANCE = 1e-3  # of the largest gradient, where a plain step has other bits each time


def budgets_are_kept(place: Place) -> dict[str, Any]:
    """Every model with every budget; all of them are tried before the worst is complained of."""
    figures: dict[str, Any] = {}
    faults: list[str] = []
    for name, make in subjects(place).items():
        subject = make()
        subject.step()  # kernels are loaded and workspaces taken before anything is measured
        figures[name] = _of_subject(place, name, subject, faults)
        place.tell(figures)
        del subject
        place.module.empty_cache()
    assert not faults, "; ".join(faults)
    return figures


def dry_plans_against_real_ones(place: Place) -> dict[str, Any]:
    """What fake tensors predict for this kind of device, beside what a step on it takes."""
    figures = {}
    for name, make in subjects(place).items():
        subject = make()
        subject.step()
        dry = subject.profile(place.kind)
        real = subject.profile()
        place.keep(f"{name}.dry", dry)
        measured = subject.activations(place)
        figures[name] = {
            "dry peak over measured": round(dry.peak / measured, 4),
            "profiled peak over measured": round(real.peak / measured, 4),
            "dry time over profiled": round(dry.step_seconds / real.step_seconds, 3),
        }
        del subject
        place.module.empty_cache()
    return figures


def _of_subject(place: Place, name: str, subject: Subject, faults: list[str]) -> dict[str, Any]:
    expected = subject.gradients()
    repeats = all(map(torch.equal, subject.gradients(), expected))  # some backwards add up in any order
    unplanned, plain = subject.activations(place), place.seconds_of(subject.step, _ROUNDS)
    profile = subject.profile()
    found: dict[str, Any] = {
        "unplanned MiB": unplanned / 2**20,
        "profiled over measured": round(profile.peak / unplanned, 4),
        "step ms": 1e3 * plain,
        "profiled ms": 1e3 * profile.step_seconds,
        "repeats its bits": repeats,
    }
    with place.recording(f"{name}_plain"):
        subject.step()
    place.keep(f"{name}.profile", profile)
    for budget in _BUDGETS:
        try:
            plan = plan_profile(subject.module, profile, bytes_of_budget(budget, unplanned), make_planner("auto"))
        except PlanError as error:
            found[str(budget)] = f"refused: {error}"
            continue
        if plan.peak is None:
            raise AssertionError(f"{name}: a plan of this profile has a peak")
        place.keep(f"{name}_{budget}.plan", plan)
        apply_plan(subject.module, plan)
        try:
            measured = subject.activations(place)
            given = subject.gradients()
            seconds = place.seconds_of(subject.step, _ROUNDS)
            if budget == _RECORDED:
                with place.recording(f"{name}_{budget}"):
                    subject.step()
        finally:
            remove_plan(subject.module)
        same = all(map(torch.equal, given, expected))
        off = max(map(_relative_difference, given, expected))
        found[str(budget)] = {
            "predicted over measured": round(plan.peak / measured, 4),
            "measured over budget": round(measured / (budget * unplanned), 4),
            "same bits": same,
            "off by": off,
            "time": round(seconds / plain, 3),
            "predicted time": round(1 + (plan.recompute_share or 0.0), 3),
        }
        if not (same or (off <= _TOLERANCE and not repeats)):
            faults.append(f"{name} at {budget}: other bits, off by {off:.1e}")
        if abs(plan.peak / measured - 1) > 0.02:
            faults.append(f"{name} at {budget}: predicted {plan.peak / measured:.3f} of what was measured")
        if measured > 1.002 * budget * unplanned:
            faults.append(f"{name} at {budget}: {measured / (budget * unplanned):.3f} of the budget")
    return found


def _relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    largest = other.abs().max().clamp(min=1e-12)
    return float((one - other).abs().max() / largest)
