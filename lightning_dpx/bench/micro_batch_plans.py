"""``dpx bench plan --micro-batches``: a plan of all rows, micro-batches by hand, and both as the planner mixes them.

Each at the same shares of the unplanned peak. Peaks are those of the allocator (``bench/allocations.py``), times those
of the processor, in one thread; steps take turns, and medians of the ratios within a turn are compared. Dropout is off,
so that cutting changes no random numbers; batch norm computes its statistics per micro-batch, as by hand.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.bench.plan import agreement, keep_freed_memory, loss_of_output
from lightning_dpx.bench.staged import STAGED_MODELS
from lightning_dpx.bench.turns import rotated
from lightning_dpx.errors import PlanError
from lightning_dpx.memory import MemoryPlan, Profile, apply_plan, plan_in_micro_batches, plan_profile, profile_step
from lightning_dpx.pictures import new_figure, save_figure
from lightning_dpx.units import MIB

SHARES = (0.5, 0.34, 0.16)
WAYS = ("plan alone", "micro-batches", "both")
_ROWS = {"gpt": 12, "unet": 16}  # enough of them to be cut
# Its input is a sequence of rows, with time first.
_BATCH_DIMS = {"lstm": 1}
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class MicroBatchContest:
    """What a way to meet a budget costs.

    Attributes:
        model: Name of the model.
        way: ``"plain"``, or one of ``WAYS``.
        budget_share: What was allowed, as a share of the unplanned peak.
        number: M, the micro-batches.
        rows: Of the largest of them.
        values_recomputed: By the plan.
        peak_mib: Peak of activations, in MiB, measured.
        peak_share: As a share of the unplanned peak.
        predicted_share: The same as predicted; ``None`` by hand.
        step_ms: Processor time of a step, in milliseconds.
        time_ratio: Over that of the plain step.
        predicted_ratio: The same as predicted; ``None`` by hand.
        close: Whether gradients are those of the plain step, up to a twentieth of the largest element of each.
    """

    model: str
    way: str
    budget_share: float
    number: int
    rows: int
    values_recomputed: int
    peak_mib: float
    peak_share: float
    predicted_share: float | None
    step_ms: float
    time_ratio: float
    predicted_ratio: float | None
    close: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Step:
    """A step of a model in micro-batches, written by hand.

    Args:
        model: Which may follow a plan.
        batch: All rows.
        dim: Of the rows.
        number: M, the micro-batches.
    """

    def __init__(self, model: nn.Module, batch: Tensor, dim: int, number: int) -> None:
        self._model = model
        self._rows = batch.shape[dim]
        self.parts = batch.tensor_split(number, dim)
        self._dim = dim
        self.seconds: list[float] = []

    def run(self) -> None:
        """Forward and backward of one micro-batch after the other."""
        for part in self.parts:
            # Each loss is a mean, so they are weighted by their rows: the last part may have fewer.
            loss = loss_of_output(self._model, part) * (part.shape[self._dim] / self._rows)
            torch.autograd.backward(loss)
            # The graph hangs on it, and would still be there in the next forward.
            del loss

    def time(self) -> None:
        """Notes the processor time of a step."""
        self._model.zero_grad(set_to_none=True)
        start = time.process_time()
        self.run()
        self.seconds.append(time.process_time() - start)

    def peak(self) -> int:
        """The peak of activations of a step, in bytes."""
        self._model.zero_grad(set_to_none=True)
        return peak_of_passing(self.run)

    def gradients(self) -> list[Tensor]:
        """The gradients of a step."""
        self._model.zero_grad(set_to_none=True)
        self.run()
        return [parameter.grad.clone() for parameter in self._model.parameters() if parameter.grad is not None]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A step that takes part, and what is known of it before it is timed."""

    way: str
    budget_share: float
    step: _Step
    peak: int
    plan: MemoryPlan | None = None


class _Model:
    """A model of the bench with its batch, its profiles and its contestants.

    Args:
        name: One of ``STAGED_MODELS``.
        missing: Told which contestant is left out, and why.
    """

    def __init__(self, name: str, missing: Callable[[str], None]) -> None:
        torch.manual_seed(0)
        staged = STAGED_MODELS[name]
        self.name = name
        self._missing = missing
        self.module = staged.build()
        for part in self.module.modules():
            if isinstance(part, nn.Dropout):
                # A cut step draws other masks than a whole one, and its gradients could
                # not be compared.
                part.p = 0.0
        self.dim = _BATCH_DIMS.get(name, 0)
        self.rows = _ROWS.get(name, staged.rows)
        self.batch = staged.make_input(self.rows)
        self._profiles: dict[tuple[int, bool], Profile] = {}
        # Both are asked for again with every budget, and measured once.
        self._peaks: dict[int, int] = {}
        plain = self._step(self.module, 1)
        plain.run()  # warms up
        self.plain = _Entry("plain", 1.0, plain, plain.peak())

    def entries(self, share: float) -> list[_Entry]:
        """The three ways to take no more than a share of the unplanned peak."""
        budget = int(share * self.plain.peak)
        found = list[_Entry]()
        number = self._number_by_hand(budget)
        if number is not None:
            step = self._step(self.module, number)
            found.append(_Entry("micro-batches", share, step, self._peaks[number]))
        plans: dict[str, Callable[[], MemoryPlan]] = {
            "plan alone": lambda: plan_profile(self.module, self._profile(self.rows, accumulates=False), budget),
            "both": lambda: plan_in_micro_batches(self.rows, self._profile, self._plan, budget)[0],
        }
        for way, make in plans.items():
            try:
                plan = make()
            except PlanError as error:
                # A budget that one way cannot meet is a result, and the others are measured
                # all the same.
                self._missing(f"{self.name}: {way} at {share:.2f}: {error}")
                continue
            found.append(self._planned(way, share, plan))
        # The table has all budgets in the same order, whichever way was found first.
        return sorted(found, key=lambda entry: WAYS.index(entry.way))

    def _step(self, module: nn.Module, number: int) -> _Step:
        return _Step(module, self.batch, self.dim, number)

    def _number_by_hand(self, budget: int) -> int | None:
        """The fewest micro-batches that meet the budget without a plan."""
        for number in range(2, self.rows + 1):
            if number not in self._peaks:
                self._peaks[number] = self._step(self.module, number).peak()
            if self._peaks[number] <= budget:
                return number
        self._missing(f"{self.name}: no number of micro-batches takes {budget} bytes without a plan")
        return None

    def _profile(self, rows: int, /, *, accumulates: bool) -> Profile:
        # From the second micro-batch on gradients are added to those that are there, which takes
        # memory of its own: hence two profiles for a number of rows.
        if (rows, accumulates) not in self._profiles:
            self.module.zero_grad(set_to_none=True)
            part = self.batch.narrow(self.dim, 0, rows)
            self._profiles[rows, accumulates] = profile_step(
                self.module, lambda: loss_of_output(self.module, part), _CPU, accumulates=accumulates
            )
        return self._profiles[rows, accumulates]

    def _plan(self, profile: Profile, budget: int | None) -> MemoryPlan:
        return plan_profile(self.module, profile, budget)

    def _planned(self, way: str, share: float, plan: MemoryPlan) -> _Entry:
        """On a copy that follows the plan for good: in its first steps it learns where hooks are needed."""
        own = copy.deepcopy(self.module)
        # The copy has copies of the gradients, too.
        own.zero_grad(set_to_none=True)
        apply_plan(own, plan)
        step = self._step(own, plan.micro_batches)
        # Peak and time are those of a plan that has learned.
        for _ in range(2):
            step.run()
        return _Entry(way, share, step, step.peak(), plan)


def compare_micro_batches(
    models: Sequence[str] = ("gpt", "lstm", "unet"),
    shares: Sequence[float] = SHARES,
    rounds: int = 7,
    progress: Callable[[str], None] = lambda _: None,
    missing: Callable[[str], None] = lambda _: None,
) -> list[MicroBatchContest]:
    """Measures the three ways on every model, in one thread.

    Args:
        models: Names from ``STAGED_MODELS``.
        shares: Of the unplanned peak.
        rounds: Turns of every contestant.
        progress: Told what happens next.
        missing: Told which contestant is left out, and why.
    """
    # Before the first model is made, as blocks keep the rule under which they were given out.
    keep_freed_memory()
    threads = torch.get_num_threads()
    # With several threads processor time would count those that only wait for work.
    torch.set_num_threads(1)
    results = list[MicroBatchContest]()
    try:
        for name in models:
            model = _Model(name, missing)
            entries = [model.plain]
            for share in shares:
                progress(f"{name}: planning for {share:.2f} of the peak")
                entries += model.entries(share)
            for turn in range(rounds):
                progress(f"{name}: round {turn + 1} of {rounds}")
                for entry in rotated(entries, turn):
                    entry.step.time()
            results += [_result(model, entry) for entry in entries]
    finally:
        torch.set_num_threads(threads)
    return results


def _result(model: _Model, entry: _Entry) -> MicroBatchContest:
    plan = entry.plan
    whole = model.plain.peak
    plain = model.plain.step
    ratios = [mine / theirs for mine, theirs in zip(entry.step.seconds, plain.seconds, strict=True)]
    share = None if plan is None or plan.peak is None else plan.peak / whole
    ratio = None if plan is None or plan.recompute_share is None else 1 + plan.recompute_share
    # Sums over parts have another order than those over all rows, so bits are not expected.
    _same_bits, close = agreement(entry.step.gradients(), plain.gradients())
    return MicroBatchContest(
        model=model.name,
        way=entry.way,
        budget_share=entry.budget_share,
        number=len(entry.step.parts),
        rows=max(part.shape[model.dim] for part in entry.step.parts),
        values_recomputed=0 if plan is None else plan.num_recomputed,
        peak_mib=entry.peak / MIB,
        peak_share=entry.peak / whole,
        predicted_share=share,
        step_ms=statistics.median(entry.step.seconds) * 1e3,
        time_ratio=statistics.median(ratios),
        predicted_ratio=ratio,
        close=close,
    )


def format_micro_batches(results: Sequence[MicroBatchContest]) -> str:
    """One row per model, budget and way."""
    lines = [
        f"{'model':6} {'budget':>6} {'way':14} {'M x rows':>9} {'values':>6} {'peak MiB':>9} {'share':>6} {'pred.':>6} "
        f"{'step ms':>9} {'time':>6} {'pred.':>6}  gradients"
    ]
    for row in results:
        share = "" if row.predicted_share is None else f"{row.predicted_share:.3f}"
        ratio = "" if row.predicted_ratio is None else f"{row.predicted_ratio:.3f}"
        cut = f"{row.number} x {row.rows}"
        lines.append(
            f"{row.model:6} {row.budget_share:6.2f} {row.way:14} {cut:>9} {row.values_recomputed:6} "
            f"{row.peak_mib:9.1f} {row.peak_share:6.3f} {share:>6} {row.step_ms:9.1f} {row.time_ratio:6.3f} "
            f"{ratio:>6}  {'close' if row.close else 'differ'}"
        )
    return "\n".join(lines)


def plot_micro_batches(results: Sequence[MicroBatchContest], path: Path) -> None:
    """Time over peak, a panel per model, a line per way.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    models = list(dict.fromkeys(row.model for row in results))
    figure = new_figure(4.5 * len(models), 4)
    all_axes = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(all_axes, models, strict=True):
        for way in WAYS:
            rows = [row for row in results if row.model == model and row.way in (way, "plain")]
            rows.sort(key=lambda row: row.peak_share)
            axes.plot([row.peak_share for row in rows], [row.time_ratio for row in rows], "o-", label=way)
        axes.set(title=model, xlabel="peak of activations / unplanned", ylabel="step time / plain", xlim=(0, None))
        axes.grid(alpha=0.3)
    all_axes[0].legend()
    save_figure(figure, path)
