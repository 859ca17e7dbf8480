"""The thread-local state of torch that a worker thread takes over from its caller.

Grad mode, inference mode, autocast and saved-tensor hooks are of a thread, so a worker re-enters those of its caller
for every task.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.devices import autocast_types
from lightning_dpx.replicas.executor import Outcome, Task
from lightning_dpx.torch_compat import top_saved_tensors_hooks


@dataclass(slots=True, eq=False)  # not frozen: two are made in every step
class CallerContext:
    """The thread-local state of torch in the calling thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    saved_tensor_hooks: Any

    @classmethod
    def capture(cls) -> "CallerContext":
        """The state as it is now, in this thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            # Of every device type: a replica may use the host beside its accelerator.
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind)) for kind in autocast_types() if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            saved_tensor_hooks=top_saved_tensors_hooks(True),
        )

    def entered(self) -> AbstractContextManager[None]:
        """Puts the caller's state in place in the current thread, for a while."""
        plain = self.inference == torch.is_inference_mode_enabled() and not self.autocast
        if plain and self.saved_tensor_hooks is None:
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
            yield


def attempt_in(context: CallerContext, task: Task) -> Outcome:
    """What a task of the caller's returns or raises in this thread."""
    with context.entered():
        return task.attempt()
