"""When each gradient of a step would be there, on a device that is not: times by FLOPs and bytes, on fake tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_dpx.errors import DPXError, PlanError
from lightning_dpx.memory.profile.fake import NO_ANSWER, faked, with_or_without_numbers
from lightning_dpx.memory.profile.profiler import Run
from lightning_dpx.memory.profile.roofline import Rates


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
    module: nn.Module, batch: Any, target: torch.device, step: Callable[[Any], Run], rates: Rates
) -> StepSeconds:
    """The times of a step of ``module`` on ``batch`` on a device with these ``rates``; nothing is allocated.

    Args:
        module: Its parameters and buffers are fakes meanwhile.
        batch: Its input.
        target: What is planned for; it need not be there.
        step: The step on such a batch.
        rates: Of that device.

    Raises:
        PlanError: fake tensors cannot run the step.
    """

    def on_fakes(numbers: bool) -> StepSeconds:
        with faked(module, batch, target, torch.device("cpu"), numbers=numbers) as (inputs, meter):
            trace: Any = meter.trace()
            trace.rates = rates
            with meter.preserve_module_state(module), torch.enable_grad():
                return _timed(module, step(inputs), meter.as_on_target, trace)

    try:
        return with_or_without_numbers(on_fakes)
    except DPXError:  # about the step itself
        raise
    except NO_ANSWER as error:
        first = str(error).strip().partition("\n")[0]
        raise PlanError(
            f"The time of a step is predicted on fake tensors, and they cannot run this one of {type(module).__name__} "
            f"({type(error).__name__}: {first}). Take what needs numbers out of the step, such as .item() and branches "
            "on tensors, or leave out what asks for times; memory is predicted all the same."
        ) from error


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
