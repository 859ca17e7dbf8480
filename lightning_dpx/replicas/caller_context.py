"""The thread-local state of torch that a worker thread takes over from its caller.

Grad mode, inference mode, autocast, saved-tensor hooks, modes that see every function or operator, the default device
and the stream that is current on each device are of a thread, so a worker re-enters those of its caller for every task.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_dpx.devices import autocast_types, chosen_streams, stream_context
from lightning_dpx.replicas.executor import Task, TaskResult
from lightning_dpx.torch_compat import (
    DeviceContext,
    TorchDispatchMode,
    dispatch_modes,
    function_modes,
    len_torch_dispatch_stack,
    len_torch_function_stack,
    top_saved_tensors_hooks,
)

Mode = TorchFunctionMode | TorchDispatchMode


def _modes_in_force() -> tuple[Mode, ...]:
    """Of functions, and then of operators, the outermost first."""
    return (*function_modes(), *dispatch_modes())


def watching_modes() -> list[Mode]:
    """Modes of the calling thread that see every function or operator, such as a counter of FLOPs.

    What they note is seldom made for several threads at once.
    """
    # Asked before every stage of every step, and most have none.
    if not len_torch_function_stack() and not len_torch_dispatch_stack():
        return []
    # A default device sees all functions as well, and notes nothing.
    return [mode for mode in _modes_in_force() if not isinstance(mode, DeviceContext)]


def default_device() -> torch.device | None:
    """The device that ``torch.set_default_device`` was given in the calling thread, if it has an index."""
    for mode in function_modes():
        # Without an index it means whichever device is current, as that of a replica is in its task.
        if isinstance(mode, DeviceContext) and mode.device.index is not None:
            return mode.device
    return None


@dataclass(slots=True, eq=False)  # not frozen: two are made in every step
class CallerContext:
    """The thread-local state of torch in the calling thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    saved_tensor_hooks: Any
    modes: tuple[Mode, ...]
    streams: tuple[torch.Stream, ...]

    @classmethod
    def capture(cls, devices: Sequence[torch.device] = ()) -> "CallerContext":
        """The state as it is now, in this thread.

        Args:
            devices: Those whose current streams another thread is to use.
        """
        # Asked first: to make the lists takes longer than all the rest.
        has_modes = len_torch_function_stack() or len_torch_dispatch_stack()
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            # Of every device type: a replica may use the host beside its accelerator.
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind)) for kind in autocast_types() if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            saved_tensor_hooks=top_saved_tensors_hooks(True),
            modes=_modes_in_force() if has_modes else (),
            streams=chosen_streams(devices) if devices else (),
        )

    def entered(self) -> AbstractContextManager[None]:
        """Puts the caller's state in place in the current thread, for a while."""
        plain = self.inference == torch.is_inference_mode_enabled() and not self.autocast
        if plain and self.saved_tensor_hooks is None and not self.modes and not self.streams:
            return torch.set_grad_enabled(self.grad)  # nothing else to carry, as in most steps: 4 us instead of 20
        return self._all_entered()

    @contextmanager
    def _all_entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            # Inference mode first, as it sets the grad mode by itself.
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            if self.saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
            for stream in self.streams:
                stack.enter_context(stream_context(stream))
            # The thread may be the caller itself.
            here = _modes_in_force()
            for mode in self.modes:
                if not any(mode is other for other in here):
                    stack.enter_context(_in_force(mode))
            yield


@contextmanager
def _in_force(mode: Mode) -> Iterator[None]:
    """Puts a mode in force in this thread, without what entering it does: a counter would begin at zero again."""
    base = TorchFunctionMode if isinstance(mode, TorchFunctionMode) else TorchDispatchMode
    base.__enter__(mode)  # type: ignore[arg-type]
    try:
        yield
    finally:
        base.__exit__(mode, None, None, None)  # type: ignore[arg-type]


def attempt_in(context: CallerContext, task: Task) -> TaskResult:
    """What a task of the caller's returns or raises in this thread."""
    with context.entered():
        return task.attempt()
