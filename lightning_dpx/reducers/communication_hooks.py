"""Gradients between processes by a communication hook of torch, as DDP has them: halves, PowerSGD, or the user's own.

A hook gets a bucket, averages it over the processes in its own way, and returns a future of the flat result. Buckets
are the same in every step, with zeros for parameters that have no gradient in one: what a hook remembers of a bucket
(the error that PowerSGD feeds back) belongs to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.reducers.buckets import unflatten


class HookBucket:
    """What a hook gets: the part of ``torch.distributed.GradBucket``, which only DDP can make, that Python sees.

    Args:
        index: Of the bucket, among those of a step.
        buffer: All its gradients, flat, one after the other.
        parameters: Those that they are of.
        is_last: Whether it is the last bucket of a step.
    """

    def __init__(self, *, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], is_last: bool) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """The place of the bucket among those of a step."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, flat."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Other numbers for all gradients."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, each in the shape of its parameter."""
        return unflatten(self._buffer, [parameter.shape for parameter in self._parameters])

    def parameters(self) -> list[torch.Tensor]:
        """What the gradients are of, in their order."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last bucket of a step."""
        return self._is_last


@dataclass(frozen=True, slots=True)
class CommunicationHook:
    """A hook and what it remembers.

    Attributes:
        state: The hook's first argument.
        hook: ``hook(state, bucket)``, which returns a future of the bucket's mean over all processes.
    """

    state: Any
    hook: Callable[[Any, Any], Any]

    def start(self, bucket: HookBucket) -> Callable[[], torch.Tensor]:
        """Sends a bucket on its way; what is returned waits for its mean."""
        future = self.hook(self.state, bucket)

        def wait() -> torch.Tensor:
            value: Any = future.wait()
            # A hook may hand on the future of a collective as it is, whose value is a list of one tensor.
            mean: torch.Tensor = value[0] if isinstance(value, list) else value
            return mean

        return wait


# Made when one is asked for: what PowerSGD remembers of gradients belongs to one run.
NAMED_HOOKS: dict[str, Callable[[], CommunicationHook]] = {
    "bf16": lambda: CommunicationHook(None, bf16_compress_hook),
    "fp16": lambda: CommunicationHook(None, fp16_compress_hook),
    "powersgd": lambda: CommunicationHook(PowerSGDState(process_group=None), powerSGD_hook),
}


def make_communication_hook(given: Any) -> CommunicationHook:
    """The hook that ``communication_hook=given`` asks for.

    Args:
        given: A name, a ``PowerSGDState``, a hook whose state is ``None``, or ``(state, hook)``.

    Raises:
        ConfigurationError: it is none of these.
    """
    if isinstance(given, str) and given in NAMED_HOOKS:
        return NAMED_HOOKS[given]()
    if isinstance(given, PowerSGDState):
        return CommunicationHook(given, powerSGD_hook)
    # A pair from a YAML file is a list.
    if isinstance(given, tuple | list) and len(given) == 2 and callable(given[1]):
        return CommunicationHook(given[0], given[1])
    if callable(given):
        return CommunicationHook(None, given)
    names = ", ".join(f"'{name}'" for name in NAMED_HOOKS)
    raise ConfigurationError(
        f"communication_hook={given!r} is not allowed; give {names}, a PowerSGDState, a hook of "
        "torch.distributed.algorithms.ddp_comm_hooks, or (state, hook)."
    )
