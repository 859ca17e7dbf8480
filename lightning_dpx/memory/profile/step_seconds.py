"""When each gradient of a step would be there, on a device that is not: times by FLOPs and bytes, on fake tensors.

Where those cannot run the step (it looks at numbers, or an operator gives as many as its input says), real steps on few
rows are looked at in their place.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.profile.abstract import Cut, device_of_step, on_fakes_or_rows, on_two_sizes
from lightning_dpx.memory.profile.fake import faked
from lightning_dpx.memory.profile.profiled_step import Run
from lightning_dpx.memory.profile.roofline import Rates
from lightning_dpx.memory.profile.roofline_costs import RooflineCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """How long the operators of a step take.

    Attributes:
        forward: Seconds.
        backward: Seconds; none of a step by hand, whose backwards are among its forward.
        gradients: By parameter, seconds from the beginning of backward until its gradient is whole; the end of backward
            for one that gets none.
    """

    forward: float
    backward: float
    gradients: tuple[float, ...]


def step_seconds(
    module: nn.Module,
    batch: Any,
    target: torch.device,
    step: Callable[[Any], Run],
    rates: Rates,
    few: Callable[[], tuple[int, Cut]],
) -> StepSeconds:
    """The times of a step of ``module`` on ``batch`` on a device with these ``rates``.

    Nothing is allocated where fake tensors can run the step. Where they cannot, a warning says why, and the times of
    two real steps on few rows are scaled.

    Args:
        module: Its parameters and buffers are fakes meanwhile.
        batch: Its input.
        target: What is planned for; it need not be there.
        step: The step on such a batch.
        rates: Of that device.
        few: Asked if fakes cannot: the number of rows of ``batch``, and what gives its first rows, as many as wanted.

    Raises:
        PlanError: fake tensors cannot run the step, and there are no numbers to run it on.
    """

    def on_fakes(*, numbers: bool) -> StepSeconds:
        with faked(module, batch, target, torch.device("cpu"), numbers=numbers) as (inputs, costs):
            return _watched(module, step(inputs), costs, rates)

    def on_rows(why: str) -> StepSeconds:
        rows, cut = few()

        def on(count: int) -> StepSeconds:
            given = cut(count)
            costs = RooflineCosts(device_of_step(module, given), target)
            return _watched(module, step(given), costs, rates)

        warnings.warn(
            f"Fake tensors cannot run this step of {type(module).__name__} ({why}): its time is that of the operators "
            f"of a real one on few of its {rows} rows, scaled.",
            stacklevel=6,
        )
        parts = on_two_sizes(on, rows)
        if parts is None:
            return on(rows)
        return _on_line(parts, rows)

    return on_fakes_or_rows(on_fakes, on_rows, module, batch)


def _on_line(parts: tuple[tuple[int, StepSeconds], tuple[int, StepSeconds]], rows: int) -> StepSeconds:
    """The times on ``rows`` rows, each on the line through those on fewer."""
    (few, low), (more, high) = parts

    def line(less: float, larger: float) -> float:
        # More rows never take less time.
        return max(larger, larger + (larger - less) / (more - few) * (rows - more))

    gradients = []
    for pair in zip(low.gradients, high.gradients, strict=True):
        gradients.append(line(*pair))
    return StepSeconds(
        forward=line(low.forward, high.forward),
        backward=line(low.backward, high.backward),
        gradients=tuple(gradients),
    )


def _watched(module: nn.Module, run: Run, costs: RooflineCosts, rates: Rates) -> StepSeconds:
    """The times of one step, which leaves nothing behind."""
    with costs.preserve_module_state(module), torch.enable_grad():
        # Made inside, as it tells the context above of writes, which are put back.
        trace: Any = costs.trace()
        trace.rates = rates
        return _timed(module, run, costs.as_on_target, trace)


def _timed(module: nn.Module, run: Run, context: Callable[[], Any], trace: Any) -> StepSeconds:
    times = _GradientTimes(module, trace)
    with trace, times:
        with context():
            result = run()
        forward = trace.seconds
        if result is not None:
            result.backward()  # type: ignore[no-untyped-call]
    end = trace.seconds
    del result
    # The optimizers of a step by hand would hold these beyond it.
    for parameter in module.parameters():
        parameter.grad = None
    gradients = []
    for at in times.seconds:
        # A step by hand has run its backwards already: nothing is known of what its optimizers waited for.
        gradients.append(max(at - forward, 0.0) if at else end - forward)
    return StepSeconds(forward=forward, backward=end - forward, gradients=tuple(gradients))


class _GradientTimes:
    """Notes when gradients come.

    Args:
        module: Whose parameters.
        trace: The clock.

    Attributes:
        seconds: By parameter, on that clock; 0 for one without a gradient.
    """

    def __init__(self, module: nn.Module, trace: Any) -> None:
        self._parameters = list(module.parameters())
        self._trace = trace
        self._handles: list[Any] = []
        self.seconds = [0.0] * len(self._parameters)

    def __enter__(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                hook = partial(self._note, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, index: int, _: torch.Tensor) -> None:
        # Of several times the last counts: then it is whole.
        self.seconds[index] = self._trace.seconds
