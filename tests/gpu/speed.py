"""Time of steps: what the host spends on several replicas of one device, and plans beside other ways to recompute."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpx import PlanError, ReplicaGroup
from lightning_dpx.bench.models import TransformerBlock
from lightning_dpx.bench.plan_peers import PEERS, compiled_models
from lightning_dpx.memory import Profile, apply_plan, plan_profile, remove_plan
from lightning_dpx.memory.plan.make_plan import make_planner
from tests.gpu.models import Subject, large_gpt
from tests.gpu.place import Place

_ROUNDS = 7


def host_time_of_a_step(place: Place) -> dict[str, Any]:
    """A step of many small kernels on K replicas of one device, per replica, over a plain step of one."""
    width, depth = (256, 24) if place.is_real else (32, 2)

    def module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(TransformerBlock(width, 4) for _ in range(depth))).to(place.device)

    plain_module, rows = module(), torch.randn(2, 16, width, device=place.device)
    plain = _host_seconds(place, lambda: _plain_step(plain_module, rows))
    figures: dict[str, Any] = {"plain ms": 1e3 * plain}
    for replicas in (1, 2, 4):
        batch = torch.randn(2 * replicas, 16, width, device=place.device)
        group = ReplicaGroup(module(), [place.device] * replicas, execution="threads")
        try:
            seconds = _host_seconds(place, lambda group=group, batch=batch: _group_step(group, batch))
        finally:
            group.close()
        figures[f"K={replicas}"] = round(seconds / replicas / plain, 3)
    return figures


def step_time_at_the_peak_of_peers(place: Place) -> dict[str, Any]:
    """Each peer's peak is measured, a plan made for just that, and both are timed; batches are small."""
    return _of_sizes(place, rows_times=1)


def step_time_of_a_filled_device(place: Place) -> dict[str, Any]:
    """The same with so many rows that the device, and not the host, is what a step waits for."""
    return _of_sizes(place, rows_times=4)


def step_time_at_the_peak_of_compiled_code(place: Place) -> dict[str, Any]:
    """What ``torch.compile`` saves and takes by its own budget, and what a plan without it takes at the same peak."""
    width, depth, rows = (1024, 8, 8) if place.is_real else (64, 3, 2)
    subject = large_gpt(place, width=width, depth=depth, rows=rows, context=1024 if place.is_real else 32)
    subject.step()
    plain = _PlainStep.of(place, subject)
    figures: dict[str, Any] = {"plain ms": 1e3 * plain.seconds}
    backend = "inductor" if place.is_real else "aot_eager_decomp_partition"
    for mode, compiled in compiled_models(subject.module, (0.5, 0.3), backend).items():
        peer = Subject(compiled, subject.inputs)
        peer.step()
        peak, entry = plain.beside(peer)
        figures[mode] = entry | plain.planned(peak)
        place.tell(figures)
    return figures


@dataclass(frozen=True, slots=True)
class _PlainStep:
    """A step without a plan, by which others are measured.

    Attributes:
        place: Where it runs.
        subject: Whose step.
        profile: Of it.
        profiling: Seconds that the profile took.
        seconds: That it takes.
        peak: Bytes of its activations.
    """

    place: Place
    subject: Subject
    profile: Profile
    profiling: float
    seconds: float
    peak: int

    @classmethod
    def of(cls, place: Place, subject: Subject) -> "_PlainStep":
        """That of ``subject``."""
        start = time.perf_counter()
        profile = subject.profile()
        profiling = time.perf_counter() - start
        place.keep(f"{profile.peak}_bytes.profile", profile)
        seconds = place.seconds_of(subject.step, _ROUNDS)
        return cls(place, subject, profile, profiling, seconds, subject.activations(place))

    def beside(self, peer: Subject) -> tuple[int, dict[str, Any]]:
        """The peak of another step of the same arithmetic; peak and time over those of this one."""
        peak, seconds = peer.activations(self.place), self.place.seconds_of(peer.step, _ROUNDS)
        return peak, {"peak": round(peak / self.peak, 3), "time": round(seconds / self.seconds, 3)}

    def planned(self, peak: int) -> dict[str, Any]:
        """Peak and time of a plan for that peak, over those of this step."""
        module = self.subject.module
        start = time.perf_counter()
        try:
            plan = plan_profile(module, self.profile, peak, make_planner("auto"))
        except PlanError as error:
            return {"ours": f"refused: {error}"}
        planning = (time.perf_counter() - start) / self.seconds
        self.place.keep(f"{self.profile.peak}_within_{peak}_bytes.plan", plan)
        apply_plan(module, plan)
        try:
            _, found = self.beside(self.subject)
        finally:
            remove_plan(module)
        predicted = round(1 + (plan.recompute_share or 0.0), 3)
        ours = {"our peak": found["peak"], "our time": found["time"], "predicted": predicted}
        return ours | {"steps to plan": round(planning, 1)}


def _of_sizes(place: Place, rows_times: int) -> dict[str, Any]:
    sizes = (
        {"0.1B": (1024, 8, 8), "0.4B": (1536, 14, 8), "1B": (2048, 20, 4)} if place.is_real else {"tiny": (64, 3, 2)}
    )
    context = 1024 if place.is_real else 32
    figures: dict[str, Any] = {}
    for name, (width, depth, rows) in sizes.items():
        subject = large_gpt(place, width=width, depth=depth, rows=rows_times * rows, context=context)
        subject.step()
        figures[name] = _beside_peers(place, subject)
        place.tell(figures)
        del subject
        place.module.empty_cache()
    return figures


def _beside_peers(place: Place, subject: Subject) -> dict[str, Any]:
    plain, module = _PlainStep.of(place, subject), subject.module
    parameters = sum(one.numel() for one in module.parameters())
    steps = round(plain.profiling / plain.seconds, 1)
    figures: dict[str, Any] = {"parameters": parameters, "plain ms": 1e3 * plain.seconds, "steps to profile": steps}
    for name, runner in PEERS.items():
        module.runner = runner
        try:
            peak, entry = plain.beside(subject)
        finally:
            del module.runner
        figures[name] = entry | plain.planned(peak)
    return figures


def _plain_step(module: nn.Module, rows: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    module(rows).square().mean().backward()


def _group_step(group: ReplicaGroup, batch: Tensor) -> None:
    group.forward(batch, is_train=True)
    outputs = group.outputs_merged()
    group.backward(torch.ones_like(outputs))


def _host_seconds(place: Place, step: Callable[[], None]) -> float:
    """Median seconds until the host has queued a step; the device is idle when it begins."""
    times = []
    for number in range(_ROUNDS + 3):
        place.synchronize()
        start = time.perf_counter()
        step()
        if number >= 3:
            times.append(time.perf_counter() - start)
    return median(times)
