"""``dpx bench plan --zoo``: real models under plans of ours, beside their libraries' own checkpointing.

For each model the library's own way is switched on, its peak and its time are measured, and a plan is made for exactly
that peak. A model without a way of its own is planned for a share of its unplanned peak. Peaks are the allocator's,
times are processor time: of each step over that of the same step without a plan, a median over turns.
"""

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.bench.turns import rotated
from lightning_dpx.bench.zoo import ZOO, Animal
from lightning_dpx.errors import PlanError
from lightning_dpx.memory import MemoryPlan, apply_plan, search_plan
from lightning_dpx.units import MIB

SHARE = 0.5  # of the unplanned peak, where a library has no way of its own
_WARM = 3  # steps: a plan learns in its first ones where hooks are needed, and libraries fill caches
_MISSING = "needs {}, which is not installed; pip install {}"


@dataclass(frozen=True, slots=True)
class ZooContest:
    """What a model's own checkpointing costs, and a plan for the same peak.

    Attributes:
        model: Name of the model.
        peak_mib: Peak of activations without either, in MiB.
        step_ms: Processor time of such a step, in milliseconds.
        own_share: Peak with the library's own checkpointing, as a share of that; ``None`` where it has none.
        own_ratio: Its time over that of the step without it; ``None`` likewise.
        budget_share: What the plan was made for.
        share: Its peak as measured; ``None`` where no plan meets the budget.
        ratio: Its time, likewise.
        predicted_share: Its peak as predicted.
        predicted_ratio: Its time as predicted.
        smallest_share: The least that a plan could have; ``None`` where the budget is met.
        planning_seconds: Processor time of making the plan, profile and all.
        planning_steps: The same in steps of the model.
        same_bits: Whether the gradients are those of the step without a plan, bit by bit.
    """

    model: str
    peak_mib: float
    step_ms: float
    own_share: float | None
    own_ratio: float | None
    budget_share: float
    share: float | None
    ratio: float | None
    predicted_share: float | None
    predicted_ratio: float | None
    smallest_share: float | None
    planning_seconds: float
    planning_steps: float
    same_bits: bool | None

    @property
    def of_own(self) -> float | None:
        """The plan's time over that of the library's own checkpointing."""
        if self.ratio is None or self.own_ratio is None:
            return None
        return self.ratio / self.own_ratio

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "of_own": self.of_own}


class _Runner:
    """A model that is run in turns with others."""

    def __init__(self, animal: Animal) -> None:
        self._animal = animal
        self.seconds: list[float] = []

    def step(self) -> None:
        """A forward and its backward, from the same random numbers; notes its processor time."""
        # Before the clock starts: it is no part of a forward and its backward.
        self._animal.module.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        # Processor time: other programs of the machine would show in any other.
        start = time.process_time()
        self._run()
        self.seconds.append(time.process_time() - start)

    def warm_up(self) -> None:
        """Runs steps that do not count."""
        for _ in range(_WARM):
            self.step()
        self.seconds.clear()

    def peak(self) -> int:
        """The peak of activations of a step, in bytes."""
        self._animal.module.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        return peak_of_passing(self._run)

    def gradients(self) -> list[Tensor]:
        """The gradients of a step, which is no turn."""
        self.step()
        self.seconds.pop()
        return [one.grad.clone() for one in self._animal.module.parameters() if one.grad is not None]

    def _run(self) -> None:
        loss: Tensor = self._animal.module(*self._animal.inputs)
        loss.backward()  # type: ignore[no-untyped-call]


def compare_zoo(
    models: Sequence[str] = tuple(ZOO),
    rounds: int = 7,
    progress: Callable[[str], None] = lambda _: None,
    missing: Callable[[str], None] = lambda _: None,
) -> list[ZooContest]:
    """Measures every model without a plan, with its library's own checkpointing, and with a plan for the same peak.

    Args:
        models: Names from ``ZOO``.
        rounds: Turns of each.
        progress: Told what happens next.
        missing: Told which model is left out, and why.
    """
    found: list[ZooContest] = []
    for name in models:
        progress(f"{name}: without a plan")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of the libraries
                warnings.simplefilter("ignore", FutureWarning)
                found.append(_compare(name, rounds, progress))
        except ModuleNotFoundError as error:
            package = (error.name or str(error)).partition(".")[0]
            missing(f"{name} {_MISSING.format(package, package)}")
        # A model may be held in reference cycles only, and the next one should not find its memory.
        gc.collect()
    return found


def _made(name: str) -> Animal:
    # All copies of a model begin with the same weights.
    torch.manual_seed(0)
    return ZOO[name]()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What planning for a budget has given.

    Attributes:
        plan: ``None`` where the budget is refused.
        runner: Of a model that follows the plan, if there is one.
        smallest: Bytes of the smallest budget, where that was refused and this is known.
        seconds: Processor time of planning; a budget that is refused has taken its time, too.
    """

    plan: MemoryPlan | None
    runner: _Runner | None
    smallest: int | None
    seconds: float


def _compare(name: str, rounds: int, progress: Callable[[str], None]) -> ZooContest:
    plain = _Runner(_made(name))
    # A model of its own, on which the library's checkpointing stays on.
    own = _own_runner(name)
    plain.warm_up()
    unplanned = plain.peak()
    own_peak = None if own is None else own.peak()
    # At the same peak only the time is left to compare.
    budget = own_peak if own_peak is not None else int(SHARE * unplanned)
    progress(f"{name}: planning for {budget / unplanned:.2f} of its peak")
    planned = _plan_for(name, budget)
    plan = planned.plan
    ours = planned.runner
    progress(f"{name}: {rounds} turns")
    runners = [runner for runner in (plain, own, ours) if runner is not None]
    for turn in range(rounds):
        for runner in rotated(runners, turn):
            runner.step()
    step_seconds = statistics.median(plain.seconds)
    return ZooContest(
        model=name,
        peak_mib=unplanned / MIB,
        step_ms=step_seconds * 1e3,
        own_share=_share(own_peak, unplanned),
        own_ratio=_ratio(own, plain),
        budget_share=budget / unplanned,
        share=_share(None if ours is None else ours.peak(), unplanned),
        ratio=_ratio(ours, plain),
        predicted_share=_share(None if plan is None else plan.peak, unplanned),
        predicted_ratio=None if plan is None or plan.recompute_share is None else 1 + plan.recompute_share,
        smallest_share=_share(planned.smallest, unplanned),
        planning_seconds=planned.seconds,
        planning_steps=planned.seconds / step_seconds,
        same_bits=None if ours is None or plan is None else _same_bits(name, plan),
    )


def _plan_for(name: str, budget: int) -> _Planned:
    """Plans for a budget, on a model of its own: the plain one has to stay without a plan."""
    subject = _made(name)
    _Runner(subject).warm_up()  # what a library makes in its first step is no part of the plan
    subject.module.zero_grad(set_to_none=True)
    start = time.process_time()
    try:
        plan = search_plan(subject.module, *subject.inputs, budget=budget, progress=False)
    except PlanError as error:
        # A refusal is a result, too: the table shows how far down a plan could have gone.
        seconds = time.process_time() - start
        return _Planned(plan=None, runner=None, smallest=getattr(error, "smallest", None), seconds=seconds)
    seconds = time.process_time() - start
    apply_plan(subject.module, plan)
    runner = _Runner(subject)
    runner.warm_up()
    return _Planned(plan=plan, runner=runner, smallest=None, seconds=seconds)


def _share(num_bytes: int | None, unplanned: int) -> float | None:
    """Of the peak without a plan."""
    if num_bytes is None:
        return None
    return num_bytes / unplanned


def _own_runner(name: str) -> _Runner | None:
    """The model with its library's own checkpointing on."""
    animal = _made(name)
    if animal.checkpoint is None:
        return None
    animal.checkpoint()
    animal.module.train()  # some libraries checkpoint in training only
    runner = _Runner(animal)
    runner.warm_up()
    return runner


def _same_bits(name: str, plan: MemoryPlan) -> bool:
    """Of models that have run as often as each other, for whatever they keep from step to step."""
    expected = _Runner(_made(name)).gradients()
    planned = _made(name)
    apply_plan(planned.module, plan)
    given = _Runner(planned).gradients()
    return len(given) == len(expected) and all(map(torch.equal, given, expected))


def _ratio(runner: _Runner | None, plain: _Runner) -> float | None:
    """How many times as long the turns of a runner take; ``None`` without one."""
    if runner is None:
        return None
    # Within a turn the machine is about the same for both, so their ratio says more
    # than two medians.
    return statistics.median(a / b for a, b in zip(runner.seconds, plain.seconds, strict=True))


_BITS = {None: "-", True: "same", False: "differ"}


def format_zoo(results: Sequence[ZooContest]) -> str:
    """One row for each model, and how many of them are ahead of their library."""
    lines = [
        f"{'':13} {'without a plan':>17}   {'own checkpointing':>17}   {'dpx at that peak':^33}   {'planning':>14}",
        f"{'model':13} {'MiB':>8} {'step ms':>8}   {'peak':>8} {'time':>8}   {'peak':>6} {'time':>6} {'said':>6} "
        f"{'of own':>6} {'bits':>5}   {'s':>6} {'steps':>7}",
    ]
    for row in results:
        peak = f"{row.share:6.3f}" if row.share is not None else f"{_cell(row.smallest_share, '>{:.2f}'):>6}"
        lines.append(
            f"{row.model:13} {row.peak_mib:8.2f} {row.step_ms:8.1f}   {_cell(row.own_share, '{:.3f}'):>8} "
            f"{_cell(row.own_ratio):>8}   {peak} {_cell(row.ratio):>6} {_cell(row.predicted_ratio):>6} "
            f"{_cell(row.of_own):>6} {_BITS[row.same_bits]:>5}   {row.planning_seconds:6.2f} {row.planning_steps:7.1f}"
        )
    beside = [row.of_own for row in results if row.of_own is not None]
    refused = sum(row.share is None for row in results)
    within = sum(row.planning_seconds <= max(2.0, 0.01 * row.step_ms) for row in results)
    lines.append(
        f"dpx takes at most 1.02 of the library's own time on {sum(one <= 1.02 for one in beside)} of {len(beside)} "
        f"models, at most 0.95 on {sum(one <= 0.95 for one in beside)}; {refused} budgets are refused; planning takes "
        f"at most 2 s or 10 steps on {within} of {len(results)}."
    )
    return "\n".join(lines)


def _cell(value: float | None, how: str = "{:.2f}") -> str:
    if value is None:
        return "-"
    return how.format(value)
