"""``dpx bench step --scale``: what a step costs beside the model, as parameters and replicas grow.

K replicas take one slice each; the yardstick is K plain steps (zero the gradients, forward, backward, optimizer) on
such slices in a loop of PyTorch's own, without Lightning. Time is processor time of all threads, because a busy machine
would blur any other. Both take turns in one process.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dpx.lightning import DPXStrategy
from lightning_dpx.lightning.lightning_api import Callback, LightningModule, Trainer
from lightning_dpx.simulate import simulate

Where = Literal["inline", "simulated"]

SCALE_PARAMETERS = (20, 200, 2000)
SCALE_REPLICAS = (1, 2, 4, 8)
WIDTH = 8  # small enough that a parameter costs what an operator costs
ROWS = 2  # of a slice; fewer than two are not cut
WARM_UP = 6  # steps: the rehearsal of the first one, and the checks of the first three
STEPS_BY_PARAMETERS = 2000  # measured steps of a turn: this many parameters' worth, within the bounds below
FEWEST_STEPS = 4
MOST_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleResult:
    """What one step of K replicas cost.

    Attributes:
        parameters: Of the module.
        replicas: K.
        where: In line on the host, or on simulated devices, one per replica.
        step_ms: Processor time of a step, in milliseconds.
        plain_ms: Processor time of K plain steps, in milliseconds.
    """

    parameters: int
    replicas: int
    where: Where
    step_ms: float
    plain_ms: float

    @property
    def ratio(self) -> float:
        """Time over K plain steps."""
        return self.step_ms / self.plain_ms

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio}


class ManyParameters(LightningModule):
    """A chain of small layers: half as many as there are parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        # A layer has two parameters, its weight and its bias.
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2)]
        self.net: nn.Sequential = nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """A mean over the batch."""
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class _OneBatch(Dataset[torch.Tensor]):
    """The same batch again and again, so that the loader costs nothing."""

    def __init__(self, rows: int, steps: int) -> None:
        self._batch = torch.randn(rows, WIDTH)
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batch


class _ProcessorTime(Callback):
    """Notes what every step took, from the end of the one before."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._last = 0.0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._last = time.process_time()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        now = time.process_time()
        self.steps.append(now - self._last)
        # Read again, so that this callback's own work does not count.
        self._last = time.process_time()


def measure_scale(
    parameters: Sequence[int] = SCALE_PARAMETERS,
    replicas: Sequence[int] = SCALE_REPLICAS,
    *,
    where: Sequence[Where] = ("inline",),
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> list[ScaleResult]:
    """Measures every number of parameters with every number of replicas.

    Args:
        parameters: Even numbers, from 2.
        replicas: Numbers of replicas, from 1.
        where: In line, and on simulated devices.
        rounds: Turns of both sides of a comparison.
        progress: Told what happens next.
    """
    results: list[ScaleResult] = []
    # Before the first backward of the process, which that of the replicas in line would be.
    if "simulated" in where:
        simulate(max(replicas))
    for kind in where:
        for size in parameters:
            for count in replicas:
                progress(f"{kind}: {size} parameters, {count} replicas")
                results.append(_compare(size, count, kind, rounds))
    return results


def _compare(parameters: int, replicas: int, where: Where, rounds: int) -> ScaleResult:
    num_steps = min(MOST_STEPS, max(FEWEST_STEPS, STEPS_BY_PARAMETERS // parameters))
    steps: list[float] = []
    plain: list[float] = []
    for _ in range(rounds):
        # Both sides in every round, so that a machine that changes its speed does so for both.
        plain += _plain_steps(parameters, num_steps)
        steps += _our_steps(parameters, replicas, where, num_steps)
    return ScaleResult(
        parameters=parameters,
        replicas=replicas,
        where=where,
        step_ms=statistics.median(steps) * 1e3,
        # One plain step was timed; K replicas are compared with K of them.
        plain_ms=statistics.median(plain) * 1e3 * replicas,
    )


def _plain_steps(parameters: int, num_steps: int) -> list[float]:
    """Seconds of each step of a loop without Lightning."""
    module = ManyParameters(parameters)
    optimizer = module.configure_optimizers()
    batch = torch.randn(ROWS, WIDTH)
    steps: list[float] = []
    for index in range(WARM_UP + num_steps):
        start = time.process_time()
        optimizer.zero_grad()
        module.training_step(batch, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps.append(time.process_time() - start)
    return steps[WARM_UP:]


def _our_steps(parameters: int, replicas: int, where: Where, num_steps: int) -> list[float]:
    clock = _ProcessorTime()
    total = WARM_UP + num_steps
    trainer = Trainer(
        accelerator="cpu" if where == "inline" else "sim",
        devices=replicas,
        # On the host "auto" may merge the slices of all replicas into one step.
        strategy=DPXStrategy(execution="inline" if where == "inline" else "auto"),
        max_steps=total,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about a loader without workers
        # An item of the data set is a batch, so there is nothing to collate.
        trainer.fit(ManyParameters(parameters), DataLoader(_OneBatch(ROWS * replicas, total), batch_size=None))
    return clock.steps[WARM_UP:]


def format_scale(results: Sequence[ScaleResult]) -> str:
    """One row per number of parameters, and for every K the time of a step over K plain steps."""
    counts = sorted({result.replicas for result in results})
    rows: dict[tuple[str, int], dict[int, ScaleResult]] = {}
    for result in results:
        rows.setdefault((result.where, result.parameters), {})[result.replicas] = result
    heads = "".join(f"{f'K = {count}':>20}" for count in counts)
    lines = [
        "Processor time of a step of K replicas, over K plain steps on such slices (milliseconds of each)",
        f"{'where':10} {'parameters':>10}{heads}",
    ]
    for (where, parameters), by_count in rows.items():
        cells = "".join(_cell(by_count[count]) for count in counts)
        lines.append(f"{where:10} {parameters:>10,}{cells}")
    return "\n".join(lines)


def _cell(result: ScaleResult) -> str:
    times = f"({result.step_ms:.1f}/{result.plain_ms:.1f})"
    return f"{result.ratio:>6.2f} {times:>13}"
