"""``dpx bench plan``: our planners next to other ways of checkpointing, on the same model in one process.

Each contestant's peak of activations is measured once, by the blocks that its step allocates and frees again; the
steps are timed in turns, and medians compared. For every peer our plan is made for that peer's own peak.
"""

import copy
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.bench.plan_peers import PEERS, compiled_models, compiled_regions, require_compiler
from lightning_dpx.bench.staged import STAGED_MODELS, Runner, Staged, run_plainly
from lightning_dpx.bench.turns import rotated
from lightning_dpx.errors import PlanError
from lightning_dpx.memory import MemoryPlan, apply_plan, plan_profile, profile_step
from lightning_dpx.pictures import new_figure, save_figure
from lightning_dpx.torch_compat import dynamo_config
from lightning_dpx.units import MIB

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
        close: Whether they are, up to a twentieth of the largest element of each: rounding passes, other random numbers
            do not.
        predicted_share: For a plan, the peak that was predicted.
    """

    model: str
    mode: str
    peak_mib: float
    peak_share: float
    step_ms: float
    time_ratio: float
    same_bits: bool
    close: bool
    predicted_share: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Contestant:
    """A mode on a model, and its times."""

    def __init__(self, mode: str, model: nn.Module, around: Callable[[], Any], predicted: int | None = None) -> None:
        self.mode = mode
        self._model = model
        # Peers share one model, and each is put around it for its own steps.
        self._around = around
        self.predicted = predicted
        self.seconds: list[float] = []

    def step(self, x: Tensor) -> float:
        """Forward and backward, in seconds."""
        with self._around():
            self._model.zero_grad(set_to_none=True)
            # Dropout draws the same masks for all, or gradients could not be compared.
            torch.manual_seed(0)
            # Freeing the gradients of the step before is no part of this one.
            start = time.perf_counter()
            self._run(x)
            return time.perf_counter() - start

    def peak(self, x: Tensor) -> int:
        """The peak of activations of a step, in bytes."""
        with self._around():
            self._model.zero_grad(set_to_none=True)
            # Begun without gradients, so that those of parameters last beyond the step and
            # do not count.
            return peak_of_passing(lambda: self._run(x))

    def _run(self, x: Tensor) -> None:
        loss_of_output(self._model, x).backward()  # type: ignore[no-untyped-call]

    def gradients(self, x: Tensor) -> list[Tensor]:
        """The gradients of a step from the same random numbers."""
        self.step(x)
        return [parameter.grad.clone() for parameter in self._model.parameters() if parameter.grad is not None]


def loss_of_output(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over all that the model gives for ``x``."""
    loss: Tensor = model(x).float().pow(2).mean()
    return loss


@contextmanager
def _running(model: Staged, runner: Runner) -> Iterator[None]:
    model.runner = runner
    try:
        yield
    finally:
        # The one of the class shows again.
        del model.runner


def _planned(mode: str, own: nn.Module, plan: MemoryPlan, x: Tensor) -> _Contestant:
    """A copy of the model that follows ``plan`` for good: in its first step it learns where hooks are needed."""
    apply_plan(own, plan)
    contestant = _Contestant(mode, own, nullcontext, plan.peak)
    for _ in range(2):
        contestant.step(x)
    return contestant


def compare_plans(
    models: Sequence[str] = tuple(STAGED_MODELS),
    budgets: Sequence[float] = BUDGETS,
    rounds: int = 7,
    progress: Callable[[str], None] = lambda _: None,
    *,
    compile_budgets: Sequence[float] | None = None,
    compile_backend: str = "inductor",
    missing: Callable[[str], None] = lambda _: None,
) -> list[Contest]:
    """Measures peers and plans on every model.

    Args:
        models: Names from ``STAGED_MODELS``.
        budgets: Shares of the unplanned peak, beside those of the peers.
        rounds: Turns of every contestant.
        progress: Told what happens next.
        compile_budgets: Adds ``torch.compile`` without a budget, and with each of these: ``activation_memory_budget``
            from 0 to 1; and plans of a model whose parts are compiled one by one, at the peaks of these. Compiling
            takes minutes; what is compiled in this process is forgotten (torch.compiler.reset).
        compile_backend: What compiles.
        missing: Told which contestant is left out, and why.

    Raises:
        ConfigurationError: there is no such backend.
        UnsupportedError: ``torch.compile`` finds no C++ compiler.
    """
    if compile_budgets is not None:
        # Before minutes of measuring that would end in this error.
        require_compiler(compile_backend)
    keep_freed_memory()
    results: list[Contest] = []
    for name in models:
        torch.manual_seed(0)
        model = STAGED_MODELS[name].build()
        peers = [_Contestant(mode, model, partial(_running, model, runner)) for mode, runner in PEERS.items()]
        compiles: Callable[[], nn.Module] | None = None
        limit = 1
        if compile_budgets is not None:
            torch.compiler.reset()  # models before would count as recompilations of this one
            modules = compiled_models(model, compile_budgets, compile_backend)
            peers += [_Contestant(mode, module, nullcontext) for mode, module in modules.items()]
            compiles = partial(compiled_regions, model, compile_backend)
            limit = len(modules) + len(list(model.modules()))  # each is compiled once
        with dynamo_config().patch(recompile_limit=limit):
            contest = _ModelContest(name, model, progress, missing)
            _fill(contest, model, peers, budgets, compiles)
            results += contest.results(rounds)
    return results


def keep_freed_memory() -> None:
    """Glibc hands large blocks back to the system and asks for them again, by rules that depend on the order of events.

    Whether a step pays for that is chance, so for the time of the bench no step does.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # Both are names of glibc's malloc.h, M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
        trim_threshold = -1
        mmap_threshold = -3
        libc.mallopt(mmap_threshold, 32 * MIB)
        libc.mallopt(trim_threshold, 2**31 - 1)


class _ModelContest:
    """Ways of checkpointing on one model, compared with its step without any.

    Args:
        name: Of the model.
        model: With the weights that all begin with.
        progress: Told what happens next.
        missing: Told which contestant is left out, and why.

    Attributes:
        peaks: Peak of activations of each that takes part, in bytes, by its mode.
    """

    def __init__(
        self, name: str, model: Staged, progress: Callable[[str], None], missing: Callable[[str], None]
    ) -> None:
        self._name = name
        self._progress = partial(_told, name, progress)
        self._missing = partial(_told, name, missing)
        self._x = STAGED_MODELS[name].make_input(STAGED_MODELS[name].rows)
        self._unplanned = _Contestant("none", model, partial(_running, model, run_plainly))
        self._unplanned.step(self._x)  # warms up
        self._contestants = [self._unplanned]
        self.peaks: dict[str, int] = {}

    def add_peers(self, peers: Sequence[_Contestant]) -> None:
        """Those of them take part that can run the model; then all peaks are measured."""
        for peer in peers:
            started = time.perf_counter()
            try:
                peer.step(self._x)
            # A peer that cannot run a model, as torch.compile may not, costs its own row and no more.
            except RuntimeError as error:
                self._missing(f"{peer.mode} cannot run this model: {error}")
                continue
            # Where a model is compiled, its first step is hardly anything else.
            self._progress(f"{peer.mode} first ran in {time.perf_counter() - started:.2f} s")
            self._contestants.append(peer)
        self._measure_peaks(self._contestants)

    def add_plans(self, make: Callable[[], nn.Module], targets: Mapping[str, float]) -> None:
        """Copies of the model that follow plans take part.

        Args:
            make: Makes a copy.
            targets: Bytes of activations that each is planned for, by its mode.
        """
        planned = list(_plans(make, targets, self._x, self._progress, self._missing))
        # Measured and not taken from the plan, whose own figure stands beside it.
        self._measure_peaks(planned)
        self._contestants += planned

    def results(self, rounds: int) -> list[Contest]:
        """What each costs, from as many steps of each as there are rounds."""
        expected = self._unplanned.gradients(self._x)
        agreements = {one.mode: agreement(one.gradients(self._x), expected) for one in self._contestants}
        for turn in range(rounds):
            self._progress(f"round {turn + 1} of {rounds}")
            for contestant in rotated(self._contestants, turn):
                contestant.seconds.append(contestant.step(self._x))
        return [self._result(contestant, *agreements[contestant.mode]) for contestant in self._contestants]

    def _measure_peaks(self, contestants: Sequence[_Contestant]) -> None:
        for contestant in contestants:
            self.peaks[contestant.mode] = contestant.peak(self._x)

    def _result(self, contestant: _Contestant, same_bits: bool, close: bool) -> Contest:
        peak = self.peaks[contestant.mode]
        unplanned_peak = self.peaks[self._unplanned.mode]
        # Turn by turn: a machine that is slow for a while is slow for all of them.
        ratios = [mine / plain for mine, plain in zip(contestant.seconds, self._unplanned.seconds, strict=True)]
        predicted_share = None
        if contestant.predicted is not None:
            predicted_share = contestant.predicted / unplanned_peak
        return Contest(
            model=self._name,
            mode=contestant.mode,
            peak_mib=peak / MIB,
            peak_share=peak / unplanned_peak,
            step_ms=statistics.median(contestant.seconds) * 1e3,
            time_ratio=statistics.median(ratios),
            same_bits=same_bits,
            close=close,
            predicted_share=predicted_share,
        )


def _fill(
    contest: _ModelContest,
    model: Staged,
    peers: Sequence[_Contestant],
    budgets: Sequence[float],
    compiles: Callable[[], nn.Module] | None,
) -> None:
    """All that are to take part in a contest do: peers, and a plan for each budget and for the peak of each peer."""
    contest.add_peers(peers)
    peaks = dict(contest.peaks)
    targets = {f"dpx {budget:.2f}": budget * peaks["none"] for budget in budgets}
    # For each peer a plan at its peak, so that only times are left to compare.
    for mode, peak in peaks.items():
        if mode != "none":
            targets[f"dpx at {mode}"] = float(peak)
    contest.add_plans(partial(copy.deepcopy, model), targets)
    if compiles is not None:
        rivals = [mode for mode in peaks if mode.startswith("compiled ")]
        contest.add_plans(compiles, {f"compiled dpx at {mode}": float(peaks[mode]) for mode in rivals})


def _told(name: str, tell: Callable[[str], None], text: str) -> None:
    tell(f"{name}: {text}")


def _plans(
    make: Callable[[], nn.Module],
    targets: Mapping[str, float],
    x: Tensor,
    progress: Callable[[str], None],
    missing: Callable[[str], None],
) -> Iterator[_Contestant]:
    """Copies of a model that follow plans, each for the bytes of a target."""
    model = make()
    started = time.perf_counter()
    # One profile serves all budgets.
    profile = _profile(model, x)
    progress(f"profiled in {time.perf_counter() - started:.2f} s")
    for mode, target in targets.items():
        started = time.perf_counter()
        try:
            plan = plan_profile(model, profile, int(target))
        except PlanError as error:
            missing(f"{mode}: {error}")
            continue
        progress(f"{mode} planned in {time.perf_counter() - started:.2f} s")
        yield _planned(mode, make(), plan, x)


def _profile(model: nn.Module, x: Tensor) -> Any:
    """The profile of the very step that is timed, which begins without gradients."""
    model.zero_grad(set_to_none=True)
    return profile_step(model, lambda: loss_of_output(model, x), torch.device("cpu"))


def agreement(given: list[Tensor], expected: list[Tensor]) -> tuple[bool, bool]:
    """Whether gradients are the same bits, and whether they are close."""

    def close(a: Tensor, b: Tensor) -> bool:  # eager gradients of 200 batch norms are 1.4% away from those in float64
        return float((a - b).abs().max()) <= 0.05 * float(b.abs().max())

    # Against the largest element, as rounding of small ones may be many times their own size.
    return all(map(torch.equal, given, expected)), all(map(close, given, expected))


def format_contests(results: Sequence[Contest]) -> str:
    """One row per model and mode."""
    head = f"{'model':6} {'mode':29} {'peak MiB':>9} {'share':>6} {'pred.':>6} {'step ms':>9} {'ratio':>6}  gradients"
    lines = [head]
    for row in results:
        gradients = "close" if row.close else "differ"
        if row.same_bits:
            gradients = "same bits"
        predicted = "" if row.predicted_share is None else f"{row.predicted_share:.3f}"
        lines.append(
            f"{row.model:6} {row.mode:29} {row.peak_mib:9.1f} {row.peak_share:6.3f} {predicted:>6} {row.step_ms:9.1f} "
            f"{row.time_ratio:6.2f}  {gradients}"
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
        # Panels in a row have one label on the left.
        axes.set_ylabel("" if number else "step time / unplanned")
        axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)
