"""What looks at the output of every submodule, on all replicas."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_dpx.replicas import Replica
from lightning_dpx.torch_compat import tree_leaves

Monitor = Callable[[int, str, torch.Tensor], None]


class OutputMonitors:
    """The hooks of one monitor at a time.

    Attributes:
        are_silent: Whether the monitor is not called now: a second forward of a micro-batch gives what the first gave.
    """

    def __init__(self) -> None:
        self.are_silent: bool = False
        self._handles: list[RemovableHandle] = []
        self._monitor: Monitor | None = None

    @contextmanager
    def taken_off(self, replicas: Callable[[], Iterable[Replica]]) -> Iterator[None]:
        """Replicas are copied in here, without the monitor, which then looks at those that there are."""
        monitor = self._monitor
        self.exchange(None, ())
        yield
        self.exchange(monitor, replicas())

    def exchange(self, monitor: Monitor | None, replicas: Iterable[Replica]) -> None:
        """Puts a monitor in the place of the last one; ``None`` removes that.

        Args:
            monitor: Gets the replica's index, the submodule's name and each tensor that it returned.
            replicas: Whose submodules it looks at.
        """
        # First of all: with both, each tensor would be seen twice.
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._monitor = monitor
        if monitor is None:
            return
        for replica in replicas:
            for name, child in replica.module.named_modules():
                self._handles.append(child.register_forward_hook(self._hook(monitor, replica.index, name)))

    def _hook(self, monitor: Monitor, index: int, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for value in () if self.are_silent else tree_leaves(output):
                if isinstance(value, torch.Tensor):
                    monitor(index, name, value)

        return hook
