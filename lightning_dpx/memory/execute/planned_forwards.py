"""The forwards of a module that follow its plan: where each begins, and where it is over, however that came about."""

import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.transforms import STEP_ASIDE
from lightning_dpx.python_objects.interrupted_calls import is_on_stack
from lightning_dpx.python_objects.object_graph import CopiedEmpty
from lightning_dpx.traced_hooks import AsideInOneGraph

_THREAD = threading.local()


class PlannedForwards:
    """Puts a context round every forward of a module, until it is removed.

    Args:
        module: Whose forwards.
        context: Makes what a forward runs in, of its inputs.
        when_over: Is given what a forward has returned, or ``None`` where it has failed.
        told: The warning where a compiler that has to make one graph of the module leaves the contexts out; empty
            where it must not.
    """

    def __init__(
        self,
        module: nn.Module,
        context: Callable[[Any], AbstractContextManager[None]],
        when_over: Callable[[Any], None],
        *,
        told: str = "",
    ) -> None:
        self._context = context
        self._when_over = when_over
        self._is_removed = False
        # The root's own hooks: first of all, so that what other hooks save follows the plan as
        # well, and also where forward raises, so that no thread is left inside.
        root = _RootHooks(self, told)
        self._handles: list[Any] = [
            module.register_forward_pre_hook(root, prepend=True, with_kwargs=True),
            module.register_forward_hook(root.leave, always_call=True),
        ]
        if _is_called_otherwise(module):
            self._handles.append(_FollowingForward(module, self))

    def enter(self, inputs: Any, caller: FrameType) -> None:
        """A forward begins, with these inputs, in the code that ``caller`` runs."""
        leave_interrupted()
        context = self._context(inputs)
        # A hook has no block to put a context round: it is entered here, and left by the other
        # hook. The root may be called within itself, so there is a list of them.
        # First, as the other hook takes the last one off also where this one has failed.
        _running_here().append(_Forward(self, context, caller))
        context.__enter__()

    def leave(self, output: Any) -> None:
        """A forward is over."""
        running = _running_here()
        # A hook that comes before ours has failed: torch calls this one all the same, of a forward that never began.
        if not self._run_here():
            return
        # Those of other plans in it that Ctrl-C has ended, where this one has caught that.
        while running[-1].forwards is not self:
            _take_off(running.pop())
        running.pop().context.__exit__(None, None, None)
        self._when_over(output)
        if self._is_removed:
            self.remove()

    def _run_here(self) -> bool:
        """Whether any of them runs in this thread."""
        return any(forward.forwards is self for forward in _running_here())

    def remove(self) -> None:
        """Takes the hooks off; where a forward runs in this thread, when that is over."""
        # Nothing else would take off what it runs in, and all that follows would be saved by that.
        self._is_removed = self._run_here()
        if self._is_removed:
            return
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _Forward:
    """A planned forward that runs.

    Attributes:
        forwards: Of which module and plan it is one.
        context: What it runs in.
        caller: The code that has entered them: while it runs the forward is not over.
    """

    forwards: PlannedForwards
    context: AbstractContextManager[None]
    caller: FrameType


def _running_here() -> list[_Forward]:
    """The planned forwards that run in this thread, innermost last."""
    # Of all plans: modules with plans may hold each other, and what they put on lies in one stack of torch's.
    running: list[_Forward] | None = getattr(_THREAD, "running", None)
    if running is None:
        running = _THREAD.running = []
    return running


def leave_interrupted() -> None:
    """Takes off what forwards have left on that Ctrl-C has ended: torch calls no hook after one.

    Until then, which is the next planned forward of this thread or the end of a plan, their inputs stay, and what the
    functions that called them had in their variables.
    """
    running = _running_here()
    while running and not is_on_stack(running[-1].caller):
        _take_off(running.pop())


def _take_off(interrupted: _Forward) -> None:
    # As the exception would have left it, so that nothing is learnt from a part of a forward.
    error = KeyboardInterrupt()
    with STEP_ASIDE.hooks_of_others_off():
        interrupted.context.__exit__(KeyboardInterrupt, error, None)


class _RootHooks(AsideInOneGraph, CopiedEmpty):
    """The hooks of the root; copies of the module, by deepcopy or pickle, get some that do nothing."""

    def __init__(self, forwards: PlannedForwards | None, told: str = "") -> None:
        super().__init__(told)
        self._forwards = forwards

    def __reduce__(self) -> tuple[Any, ...]:
        return _RootHooks, (None,)

    def begin(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Follows the plan."""
        if self._forwards is not None:
            # Of the code that has called the hook, which has called this.
            self._forwards.enter((args, kwargs), sys._getframe(2))

    def end(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """The forward is over."""
        if self._forwards is not None:
            self._forwards.leave(output)


# ---- modules whose calls run no hooks ----


def _is_called_otherwise(module: nn.Module) -> bool:
    """Whether a call of ``module`` may run no hooks, as that of gpytorch's modules: their class has its own."""
    # Classes of torch that have one, too, and run hooks in it.
    if isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule):
        return False
    own = vars(module).get("forward")
    # A copy of a module that follows a plan has the forward of its class.
    if own is not None and not isinstance(own, _ForwardByPlan) and not _is_of_class(own, module):
        return False
    return type(module).__call__ is not nn.Module.__call__


def _is_of_class(forward: Any, module: nn.Module) -> bool:
    return getattr(forward, "__func__", None) is type(module).forward


class _ForwardByPlan:
    """The forward of a module, which follows its plan; of a copy, which has none, its own forward.

    Args:
        module: Held weakly: it holds this, and is to go with the last name that it has.
        forwards: What puts the plan round it; ``None`` in a copy.
    """

    def __init__(self, module: nn.Module, forwards: PlannedForwards | None) -> None:
        self._module = weakref.ref(module)
        self._forwards = forwards

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForwardByPlan":
        module = self._there()
        return _ForwardByPlan(memo.get(id(module), module), None)

    def __reduce__(self) -> tuple[Any, ...]:
        # What reads the file need not know this package: it takes the method of the class.
        return getattr, (self._there(), "forward")

    @property
    def __signature__(self) -> inspect.Signature:
        # Libraries choose by it what they hand to a model.
        return inspect.signature(self._of_class())

    def _there(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("The module of this forward is gone; keep the module itself.")
        return module

    def _of_class(self) -> Any:
        module = self._there()
        return MethodType(type(module).forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._of_class()
        if self._forwards is None:
            return forward(*args, **kwargs)
        output = None
        self._forwards.enter((args, kwargs), sys._getframe())
        try:
            output = forward(*args, **kwargs)
        finally:
            self._forwards.leave(output)
        return output


class _FollowingForward:
    """Has the forward of a module follow its plan, until it is removed."""

    def __init__(self, module: nn.Module, forwards: PlannedForwards) -> None:
        self._module = weakref.ref(module)
        module.forward = _ForwardByPlan(module, forwards)

    def remove(self) -> None:
        """The forward is that of the class again."""
        module = self._module()
        if module is not None:
            vars(module).pop("forward", None)
