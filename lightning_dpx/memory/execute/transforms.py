"""Saved-tensor hooks step aside for ``torch.func``'s transforms, which refuse to run under any.

``torch.func.grad``, ``vjp`` and ``jacrev`` raise an error if there are hooks, through a context manager of torch that
they look up by name at every call. In a thread in which a plan is at work they find another one there: it takes off
the hooks of that plan, if no others are there, and puts them on again afterwards. What is saved in between is kept.

[Note: one thread only] There is no other place to step in: the error is raised before any operator runs, and a
transform that has failed cannot go on. So for the time of a planned forward the module ``torch.autograd.graph`` gets a
class with a property of that name, which is asked thread by thread. What torch has defined stays where it is, and all
other threads get it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.autograd import graph

from lightning_dpx.python_objects.shared_patch import SharedPatch, Undo
from lightning_dpx.torch_compat import (
    is_functorch_wrapped_tensor,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)

_Hook = Callable[[Any], Any]
_Disable = Callable[[str], AbstractContextManager[None]]
_NAME = "disable_saved_tensors_hooks"


class _StepAside:
    """The stand-in, for as long as it is needed, in the threads that need it."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def hooks(self, pack: _Hook, unpack: _Hook) -> Iterator[None]:
        """Saved-tensor hooks that transforms do not mind."""
        with self.standing_in(), graph.saved_tensors_hooks(pack, unpack):
            self.are((pack, unpack))
            yield

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Transforms of this thread do not mind hooks of which :meth:`are` has told."""
        with _PROPERTY_IN_MODULE:
            # These nest: a plan that drops values and replays calls, a call replayed within a forward.
            outer = getattr(self._local, "hooks", None)
            was_in_use = self.in_use
            self._local.in_use = True
            try:
                yield
            finally:
                self._local.hooks = outer
                self._local.in_use = was_in_use

    @property
    def in_use(self) -> bool:
        """Whether a plan is at work in this thread."""
        in_use: bool = getattr(self._local, "in_use", False)
        return in_use

    @property
    def count(self) -> int:
        """Transforms of this thread so far."""
        count: int = getattr(self._local, "count", 0)
        return count

    @property
    def now(self) -> tuple[_Hook, _Hook] | None:
        """The hooks that are on in this thread, as far as :meth:`are` was told."""
        hooks: tuple[_Hook, _Hook] | None = getattr(self._local, "hooks", None)
        return hooks

    def are(self, hooks: tuple[_Hook, _Hook] | None) -> None:
        """The hooks that are on from now on in this thread; ``None`` if none are."""
        self._local.hooks = hooks

    @contextmanager
    def hooks_of_others_off(self) -> Iterator[None]:
        """In here the innermost hooks of this thread are those of which :meth:`are` was told last."""
        # Torch keeps hooks in a stack, from which only the innermost ones can be taken.
        others = list[tuple[_Hook, _Hook]]()
        while self.now is not None and (top := top_saved_tensors_hooks(True)) not in (None, self.now):
            others.append(tuple(top))
            pop_saved_tensors_hooks()
        try:
            yield
        finally:
            for hooks in reversed(others):
                push_saved_tensors_hooks(*hooks)

    @contextmanager
    def disable(self, message: str) -> Iterator[None]:
        """What transforms of this thread find in the place of torch's own."""
        self._local.count = self.count + 1
        # Only our own hooks step aside. Where others lie on top torch refuses, as without a plan.
        mine = getattr(self._local, "hooks", None)
        top = top_saved_tensors_hooks(True)
        if mine is None or top is None or tuple(top) != mine:
            with _torchs_own()(message):
                yield
            return
        pop_saved_tensors_hooks()
        try:
            with _torchs_own()(message):
                yield
        finally:
            if getattr(self._local, "hooks", None) == mine:  # else they went off in there
                push_saved_tensors_hooks(*mine)


def _torchs_own() -> _Disable:
    """Torch's context manager, or what others have put in its place."""
    # ``graph.disable_saved_tensors_hooks`` is the property while a plan is at work.
    disable: _Disable = vars(graph)[_NAME]
    return disable


class _PerThread(ModuleType):
    """``torch.autograd.graph`` while a plan is at work."""

    @property
    def disable_saved_tensors_hooks(self) -> _Disable:
        """Ours in the threads of plans, torch's own elsewhere."""
        if STEP_ASIDE.in_use:
            return STEP_ASIDE.disable
        return _torchs_own()

    # Without a setter, others could not patch this name while a plan is at work.
    @disable_saved_tensors_hooks.setter
    def disable_saved_tensors_hooks(self, value: _Disable) -> None:
        vars(self)[_NAME] = value


def _put_property_in_module() -> Undo:
    """``torch.autograd.graph`` has that class, one for all threads, as long as any plan is at work."""
    graph.__class__ = _PerThread  # see [Note: one thread only]
    return _take_property_out


def _take_property_out() -> None:
    graph.__class__ = ModuleType


_PROPERTY_IN_MODULE = SharedPatch(_put_property_in_module)
STEP_ASIDE = _StepAside()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether it belongs to a transform of ``torch.func`` that is running, and has no memory of its own."""
    return bool(is_functorch_wrapped_tensor(tensor))
