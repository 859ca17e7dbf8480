"""Whether a step talks to other processes: they must all run it equally often then, or one waits for ever.

How often a step is timed depends on the times, which differ from process to process. A step with a collective in it (a
loss over all processes, a tensor-parallel layer) is run a fixed number of times instead.
"""

from typing import Any

import torch.distributed as dist

from lightning_dpx.torch_compat import COLLECTIVES, TorchDispatchMode, on_tensors_of_tensors


def has_other_processes() -> bool:
    """Whether this process is one of several that talk to each other."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_in_group() -> bool:
    """Whether there is a group of processes, also one of this process alone."""
    return dist.is_available() and dist.is_initialized()


class CommunicationWatch(TorchDispatchMode):
    """Sees whether what runs in here talks to other processes.

    Attributes:
        has_seen_any: Whether it did.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_seen_any: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # These do the operator on their parts; that comes here again, with its collectives.
        if on_tensors_of_tensors(types):
            return NotImplemented
        self.has_seen_any |= func.namespace in COLLECTIVES
        return func(*args, **(kwargs or {}))
