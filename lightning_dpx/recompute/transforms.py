"""Saved-tensor hooks step aside for ``torch.func``'s transforms, which refuse to run under any.

``torch.func.grad``, ``vjp`` and ``jacrev`` raise an error if there are hooks, through a context manager of torch that
they look up by name at every call. While a plan is at work, another one stands in its place: it takes off the hooks of
that plan, if no others are there, and puts them on again afterwards. What is saved in between is kept, as ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd import graph

_Hook = Callable[[Any], Any]
_autograd = torch._C._autograd


class _StepAside:
    """The stand-in, for as long as somebody needs it."""

    def __init__(self) -> None:
        self._lock, self._users, self._local = threading.Lock(), 0, threading.local()
        self._original: Callable[[str], AbstractContextManager[None]] = graph.disable_saved_tensors_hooks

    @contextmanager
    def hooks(self, pack: _Hook, unpack: _Hook) -> Iterator[None]:
        """Saved-tensor hooks that transforms do not mind."""
        with self.standing_in(), graph.saved_tensors_hooks(pack, unpack):
            self.are((pack, unpack))
            yield

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Transforms do not mind hooks of which :meth:`are` has told."""
        with self._lock:
            if not self._users:
                self._original = graph.disable_saved_tensors_hooks
                graph.disable_saved_tensors_hooks = self._disable  # type: ignore[assignment]
            self._users += 1
        outer = getattr(self._local, "hooks", None)
        try:
            yield
        finally:
            self._local.hooks = outer
            with self._lock:
                self._users -= 1
                if not self._users:
                    graph.disable_saved_tensors_hooks = self._original  # type: ignore[assignment]

    @property
    def count(self) -> int:
        """Transforms of this thread so far."""
        count: int = getattr(self._local, "count", 0)
        return count

    def are(self, hooks: tuple[_Hook, _Hook] | None) -> None:
        """The hooks that are on from now on in this thread; ``None`` if none are."""
        self._local.hooks = hooks

    @contextmanager
    def _disable(self, message: str) -> Iterator[None]:
        self._local.count = self.count + 1
        mine = getattr(self._local, "hooks", None)
        top = _autograd._top_saved_tensors_default_hooks(True)  # type: ignore[call-arg]
        if mine is None or top is None or tuple(top) != mine:
            with self._original(message):
                yield
            return
        _autograd._pop_saved_tensors_default_hooks()
        try:
            with self._original(message):
                yield
        finally:
            if getattr(self._local, "hooks", None) == mine:  # else they went off in there
                _autograd._push_saved_tensors_default_hooks(*mine)


STEP_ASIDE = _StepAside()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether it belongs to a transform of ``torch.func`` that is running, and has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
