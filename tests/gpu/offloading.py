"""Saved tensors that rest in the host's memory: the budget is kept, the bits are, and the copies run beside kernels."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_dpx import MemoryPlan
from lightning_dpx.memory import apply_plan, forecast_plan, remove_plan, search_plan
from tests.gpu.models import Subject
from tests.gpu.place import Event, Place, read_recording

_ROUNDS = 5


def budget_kept_and_copies_hidden(place: Place) -> dict[str, Any]:
    """Everything that can be offloaded is; with and without fetching ahead."""
    width, rows, depth = (4096, 8192, 8) if place.is_real else (64, 256, 4)
    subject = _layers(place, width, rows, depth)
    subject.step()
    expected, plain = subject.gradients(), place.seconds_of(subject.step, _ROUNDS)
    profile = subject.profile()
    place.keep("offloading.profile", profile)
    figures: dict[str, Any] = {"link GB/s": _link(place, 2**28 if place.is_real else 2**20), "plain ms": 1e3 * plain}
    offloaded = _all_offloaded(subject)
    place.keep("offloading.plan", offloaded)
    for prefetch_depth in (0, 2):
        plan = replace(offloaded, prefetch_depth=prefetch_depth)
        apply_plan(subject.module, plan)
        try:
            given, seconds = subject.gradients(), place.seconds_of(subject.step, _ROUNDS)
            measured = subject.activations(place)
            with place.recording(f"overlap_{prefetch_depth}"):
                subject.step()
        finally:
            remove_plan(subject.module)
        assert all(map(torch.equal, given, expected)), f"prefetch_depth={prefetch_depth}: other bits"
        predicted = forecast_plan(profile, plan).peak
        figures[f"prefetch_depth {prefetch_depth}"] = {
            "time": round(seconds / plain, 3),
            "predicted over measured": round(predicted / measured, 4),
            **_hidden(place.traces / f"overlap_{prefetch_depth}.json.gz"),
        }
    return figures


def _layers(place: Place, width: int, rows: int, depth: int) -> Subject:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return Subject(nn.Sequential(*layers).to(place.device), (torch.randn(rows, width, device=place.device),))


def _all_offloaded(subject: Subject) -> MemoryPlan:
    plan = search_plan(subject.module, *subject.inputs, budget=1.0, accumulates=True)
    return plan.with_actions({decision.name: "offload" for decision in plan.decisions})


def _link(place: Place, num_bytes: int) -> dict[str, float]:
    """What a plain copy of pinned memory reaches, each way."""
    there = torch.empty(num_bytes, dtype=torch.uint8, device=place.device)
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=place.is_real)
    found = {}
    for name, target, source in (("out", here, there), ("back", there, here)):
        place.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=place.is_real)
        place.synchronize()
        found[name] = round(num_bytes / (time.perf_counter() - start) / 1e9, 2)
    return found


def _hidden(path: Path) -> dict[str, float]:
    """Of the time of copies, the share during which a kernel ran; nothing without a recording."""
    if not path.exists():
        return {}
    events = read_recording(path)["events"]
    copies = [_span(event) for event in events if event[0] == "gpu_memcpy"]
    kernels = sorted(_span(event) for event in events if event[0] == "kernel")
    total = sum(end - begin for begin, end in copies)
    beside = sum(_common(copy, kernels) for copy in copies)
    return {"ms of copies": total / 1e3, "share beside kernels": round(beside / total, 3) if total else 0.0}


def _span(event: Event) -> tuple[float, float]:
    begin, lasts = float(event[3]), float(event[4])
    return begin, begin + lasts


def _common(copy: tuple[float, float], kernels: list[tuple[float, float]]) -> float:
    """Microseconds of ``copy`` in which at least one of ``kernels``, sorted by their begin, ran."""
    covered, reached = 0.0, copy[0]
    for begin, end in kernels:
        first, last = max(begin, reached), min(end, copy[1])
        if last > first:
            covered += last - first
            reached = last
    return covered
