"""What a planned step spends beside its operators: on noting what is dropped, and on finding it again.

It is measured once in a process, on a model of small tensors whose operators cost next to nothing: the time of a
planned step, less that of the same step without a plan and of the operators that are repeated. Where
operators run beside Python, as on accelerators, such time is hidden and does not count.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from lightning_dpx.devices import is_host, synchronize
from lightning_dpx.python_objects.untouched import CopyOnWrite
from lightning_dpx.recompute.call_names import CallNames
from lightning_dpx.recompute.routine import Practised

_WIDTH, _GROUPS, _ROUNDS, _WARM = 1024, 12, 7, 3
_STEPS, _ENOUGH = 2, 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """Seconds of processor time.

    Attributes:
        value: For a value that is dropped, beside the operators that make it again.
    """

    value: float = 0.0


class _Wave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


@cache
def measured_bookkeeping() -> Bookkeeping:
    """On the host, with plans whose values lie partly side by side and partly apart."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        parts = [_Wave() for _ in range(6 * _GROUPS)]
        module = nn.Sequential(*parts)
        x = torch.ones(_WIDTH + 1, device="cpu", requires_grad=True)
        # The first two of six: each saves its input, which the one before has made.
        dropped = [f"{6 * group + place}:1" for group in range(_GROUPS) for place in (1, 2)]
        plain = _seconds(lambda: module(x).sum().backward())
        values = Practised(CallNames(module), {"SinBackward0"}, dropped)
        try:
            planned = _seconds(partial(_planned_step, values, module, x))
        finally:
            values.remove()
        with torch.no_grad():
            again = _seconds(lambda: [torch.sin(x) for _ in dropped])
    return Bookkeeping(value=max(0.0, planned - plain - again) / len(dropped))


def _planned_step(values: Practised, module: nn.Module, x: Tensor) -> None:
    with values.active():
        result = module(x).sum()
    result.backward()


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds that what runs there takes: processor time on the host, where others may be at work at that moment.

    Of this thread, because the others that share in its operators only work while it does.
    """
    return time.thread_time if is_host(device) else time.perf_counter


def step_seconds(
    run: Callable[[], Tensor | None],
    backward: Callable[[Tensor], None],
    device: torch.device,
    alone: Callable[[bool], AbstractContextManager[CopyOnWrite | None]],
) -> tuple[float, float]:
    """The least time of one or two steps, and that of their forward, after one that is not counted.

    Args:
        run: A forward; ``None`` from a step that runs all its backwards itself.
        backward: What to do with its result.
        device: Where it runs.
        alone: Around a step: it begins at the same state as the others, and leaves nothing behind. Given whether
            writes to tensors are watched, it yields what has seen them.
    """
    best, spent, watches = (float("inf"), 0.0), 0.0, True
    for turn in range(1 + _STEPS):
        with alone(watches) as writes:
            whole, forward = _timed_step(run, backward, device)
            watches = writes is not None and writes.has_seen_any  # else the next one writes to nothing either
        if not turn:
            continue
        best = min(best, (whole, forward))
        spent += whole
        if spent > _ENOUGH:
            break
    return best


def _timed_step(
    run: Callable[[], Tensor | None], backward: Callable[[Tensor], None], device: torch.device
) -> tuple[float, float]:
    clock = clock_of(device)
    synchronize(device)
    start = clock()
    result = run()
    synchronize(device)
    middle = clock()
    if result is not None:
        backward(result)
    synchronize(device)
    return clock() - start, middle - start


def _seconds(run: Callable[[], object]) -> float:
    """Of processor time, the median of a few runs after the first ones."""
    found = []
    for turn in range(_WARM + _ROUNDS):
        start = time.thread_time()
        run()
        if turn >= _WARM:
            found.append(time.thread_time() - start)
    return statistics.median(found)
