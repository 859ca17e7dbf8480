"""Which of some modules a forward calls together, and how often: what a profile of another step may not have seen.

Only calls that autograd follows count: others save nothing.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.calls import repeating
from lightning_dpx.memory.execute.module_anatomy import Passive
from lightning_dpx.torch_compat import tree_leaves

Calls = frozenset[tuple[str, int]]  # path of a module and how often it is called


class CallCounts:
    """Counts calls of some modules, forward by forward.

    Args:
        parts: The modules whose calls are counted, by path.

    Attributes:
        found: What forwards have called together since this was last emptied.
    """

    def __init__(self, parts: Mapping[str, nn.Module] = MappingProxyType({})) -> None:
        self.found: set[Calls] = set()
        self._local = threading.local()
        self._handles: list[Any] = []
        for path, part in parts.items():
            self._handles.append(part.register_forward_hook(_Count(self, path)))

    @property
    def is_on(self) -> bool:
        """Whether anything is counted."""
        return bool(self._handles)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around a forward."""
        # Replicas in threads run forwards of one module at the same time.
        self._local.counts = counts = dict[str, int]()
        try:
            yield
        finally:
            self._local.counts = None
        self.found.add(frozenset(counts.items()))

    def count(self, path: str) -> None:
        """A call of a module is over."""
        counts = getattr(self._local, "counts", None)
        # A call that backward makes again is none of another forward.
        if counts is not None and not repeating():
            counts[path] = counts.get(path, 0) + 1

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Count(Passive):
    """The hook of one module; copies of the module, by deepcopy or pickle, get one that does nothing."""

    def __init__(self, counts: CallCounts | None, path: str) -> None:
        self._counts = counts
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _Count, (None, self._path)

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._counts is not None and torch.is_grad_enabled() and _needs_gradient(output):
            self._counts.count(self._path)


def _needs_gradient(output: Any) -> bool:
    # Most modules return a tensor, and there are many.
    leaves = (output,) if isinstance(output, torch.Tensor) else tree_leaves(output)
    return any(map(_may_need_gradient, leaves))


def _may_need_gradient(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.requires_grad
    # An object of a class of its own may hold tensors.
    return not isinstance(leaf, int | float | str | bytes | None)
