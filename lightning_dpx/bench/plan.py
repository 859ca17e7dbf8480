"""``dpx bench plan``: our planners next to other ways of checkpointing, on the same model in one process.

Each contestant's peak of activations is measured once, by the storages that its step allocates and frees again; the
steps are timed in turns, and medians compared. For every peer our plan is made for that peer's own peak.
"""

import ctypes
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_dpx.bench.staged import STAGED_MODELS, Runner, Stage, Staged, State, run_plainly
from lightning_dpx.errors import PlanError
from lightning_dpx.pictures import new_figure, save_figure
from lightning_dpx.recompute import MemoryTrace, apply_plan, plan_profile, profile_step, remove_plan

BUDGETS = (0.7, 0.5, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True)
class Contest:
    """What one way of checkpointing costs.

    Attributes:
        model: Name of the model.
        mode: Who.
        peak_mib: Peak of activations, in MiB.
        peak_share: As a share of the unplanned peak.
        step_ms: Median of a forward and backward, in milliseconds.
        time_ratio: The median, over rounds, of the time over that of the unplanned step in the same round.
        same_bits: Whether the gradients are those of the unplanned step, bit by bit.
        predicted_share: For a plan, the peak that was predicted.
    """

    model: str
    mode: str
    peak_mib: float
    peak_share: float
    step_ms: float
    time_ratio: float
    same_bits: bool
    predicted_share: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _each(stages: Sequence[Stage], state: State, **options: Any) -> State:
    for stage in stages:
        state = checkpoint(stage, *state, use_reentrant=False, **options)
    return state


def _segments(stages: Sequence[Stage], state: State) -> State:
    size = max(1, round(math.sqrt(len(stages))))
    for start in range(0, len(stages), size):
        part = stages[start : start + size]
        state = checkpoint(lambda *s, part=part: run_plainly(part, s), *state, use_reentrant=False)
    return state


_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


def _selective(stages: Sequence[Stage], state: State) -> State:
    """As torchtitan does: attention and every second matrix product of a block are kept."""

    def contexts() -> Any:
        seen = {False: 0, True: 0}

        def policy(ctx: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
            if operator in _SAVED:
                seen[ctx.is_recompute] += 1
                if "attention" in str(operator) or seen[ctx.is_recompute] % 2:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    return _each(stages, state, context_fn=contexts)


PEERS: dict[str, Runner] = {
    "each block": _each,
    "sqrt(n) segments": _segments,
    "selective operators": _selective,
}


class _Contestant:
    """A mode on a model, and its times."""

    def __init__(self, mode: str, model: Staged, around: Callable[[], Any], predicted: int | None = None) -> None:
        self.mode, self._model, self._around, self.predicted = mode, model, around, predicted
        self.seconds: list[float] = []

    def step(self, x: Tensor) -> float:
        """Forward and backward, in seconds."""
        with self._around():
            self._model.zero_grad(set_to_none=True)
            torch.manual_seed(0)
            start = time.perf_counter()
            self._model(x).float().pow(2).mean().backward()
            return time.perf_counter() - start

    def peak(self, x: Tensor) -> int:
        """Bytes of activations at the most."""
        with self._around():
            self._model.zero_grad(set_to_none=True)
            trace = MemoryTrace(torch.device("cpu"))
            with trace:
                loss = self._model(x).float().pow(2).mean()
                loss.backward()
            del loss
            return trace.peak_of_passing()

    def gradients(self, x: Tensor) -> list[Tensor]:
        """Of a step from the same random numbers."""
        self.step(x)
        return [parameter.grad.clone() for parameter in self._model.parameters() if parameter.grad is not None]


@contextmanager
def _running(model: Staged, runner: Runner) -> Iterator[None]:
    model.runner = runner
    try:
        yield
    finally:
        del model.runner


@contextmanager
def _planned(model: Staged, plan: Any) -> Iterator[None]:
    apply_plan(model, plan)
    try:
        yield
    finally:
        remove_plan(model)


def compare_plans(
    models: Sequence[str] = tuple(STAGED_MODELS),
    budgets: Sequence[float] = BUDGETS,
    rounds: int = 7,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Contest]:
    """Measures peers and plans on every model.

    Args:
        models: Names from ``STAGED_MODELS``.
        budgets: Shares of the unplanned peak, beside those of the peers.
        rounds: Turns of every contestant.
        progress: Told what happens next.
    """
    _keep_freed_memory()
    results: list[Contest] = []
    for name in models:
        results += _compare(name, budgets, rounds, progress)
    return results


def _keep_freed_memory() -> None:
    """Glibc hands large blocks back to the system and asks for them again, by rules that depend on the order of events.

    Whether a step pays for that is chance, so for the time of the bench nobody does.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 32 * 2**20)
        libc.mallopt(trim_threshold, 2**31 - 1)


def _compare(name: str, budgets: Sequence[float], rounds: int, progress: Callable[[str], None]) -> list[Contest]:
    torch.manual_seed(0)
    description = STAGED_MODELS[name]
    model, x = description.build(), description.make_input(description.rows)
    unplanned = _Contestant("none", model, partial(_running, model, run_plainly))
    unplanned.step(x)  # warms up
    contestants = [unplanned]
    for mode, runner in PEERS.items():
        contestant = _Contestant(mode, model, partial(_running, model, runner))
        try:
            contestant.step(x)
        except RuntimeError as error:
            progress(f"{name}: {mode} cannot run this model: {error}")
            continue
        contestants.append(contestant)
    peaks = {contestant.mode: contestant.peak(x) for contestant in contestants}
    started = time.perf_counter()
    profile = _profile(model, x)
    progress(f"{name}: profiled in {time.perf_counter() - started:.2f} s")
    targets = {f"dpx {budget:.2f}": budget * peaks["none"] for budget in budgets}
    targets |= {f"dpx at {peer}": float(peaks[peer]) for peer in PEERS if peer in peaks}
    for mode, target in targets.items():
        started = time.perf_counter()
        try:
            plan = plan_profile(model, profile, int(target))
        except PlanError as error:
            progress(f"{name}: {mode}: {error}")
            continue
        progress(f"{name}: {mode} planned in {time.perf_counter() - started:.2f} s")
        contestants.append(_Contestant(mode, model, partial(_planned, model, plan), plan.peak))
        peaks[mode] = contestants[-1].peak(x)
    expected = unplanned.gradients(x)
    same = {c.mode: all(map(torch.equal, c.gradients(x), expected)) for c in contestants}
    for turn in range(rounds):
        progress(f"{name}: round {turn + 1} of {rounds}")
        for contestant in contestants[turn % len(contestants) :] + contestants[: turn % len(contestants)]:
            contestant.seconds.append(contestant.step(x))
    return [
        Contest(
            name,
            contestant.mode,
            peaks[contestant.mode] / 2**20,
            peaks[contestant.mode] / peaks["none"],
            statistics.median(contestant.seconds) * 1e3,
            statistics.median(a / b for a, b in zip(contestant.seconds, unplanned.seconds, strict=True)),
            same[contestant.mode],
            None if contestant.predicted is None else contestant.predicted / peaks["none"],
        )
        for contestant in contestants
    ]


def _profile(model: Staged, x: Tensor) -> Any:
    """The profile of the very step that is timed."""
    return profile_step(model, lambda: model(x).float().pow(2).mean(), torch.device("cpu"))


def format_contests(results: Sequence[Contest]) -> str:
    """One row per model and mode."""
    head = f"{'model':6} {'mode':26} {'peak MiB':>9} {'share':>6} {'pred.':>6} {'step ms':>9} {'ratio':>6}  gradients"
    lines = [head]
    for row in results:
        predicted = "" if row.predicted_share is None else f"{row.predicted_share:.3f}"
        lines.append(
            f"{row.model:6} {row.mode:26} {row.peak_mib:9.1f} {row.peak_share:6.3f} {predicted:>6} {row.step_ms:9.1f} "
            f"{row.time_ratio:6.2f}  {'same bits' if row.same_bits else 'differ'}"
        )
    return "\n".join(lines)


def plot_contests(results: Sequence[Contest], path: Path) -> None:
    """Time over memory, a panel per model, as a picture.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    models = list(dict.fromkeys(row.model for row in results))
    figure = new_figure(4 * len(models), 4)
    for number, (axes, model) in enumerate(zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True)):
        rows = [row for row in results if row.model == model]
        ours = sorted((row for row in rows if row.mode.startswith("dpx")), key=lambda row: row.peak_share)
        axes.plot([row.peak_share for row in ours], [row.time_ratio for row in ours], "o-", label="dpx")
        for row in rows:
            if not row.mode.startswith("dpx"):
                axes.plot(row.peak_share, row.time_ratio, "s", label=row.mode)
        axes.set(title=model, xlabel="peak of activations / unplanned")
        axes.set_ylabel("" if number else "step time / unplanned")
        axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)
