"""Plans on modules: put on and taken off, without touching the module's names, classes or code."""

import inspect
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_dpx.arguments import check_is_module
from lightning_dpx.errors import PlanError
from lightning_dpx.memory.execute.call_counts import CallCounts
from lightning_dpx.memory.execute.code_shares import CodeShares
from lightning_dpx.memory.execute.flat_units import inside, is_flat_unit, unwrapped
from lightning_dpx.memory.execute.recipes import own_recipes
from lightning_dpx.memory.execute.saved_tensor_hooks import Rematerialization
from lightning_dpx.memory.execute.sharded_units import inner_units
from lightning_dpx.memory.execute.similar_values import twins_of_calls
from lightning_dpx.memory.execute.transforms import STEP_ASIDE
from lightning_dpx.memory.execute.whole_call_replays import Replays
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.plan_hooks import hooks_for_values
from lightning_dpx.python_objects.interrupted_calls import is_on_stack
from lightning_dpx.python_objects.object_graph import CopiedEmpty
from lightning_dpx.torch_compat import innermost_transform, is_in_checkpoint, saved_tensors_hooks_enabled, tree_leaves
from lightning_dpx.units import format_mib

_LOG = logging.getLogger("lightning_dpx")
_MOST_OF_A_FORWARD = 0.5  # of its bytes; what a loss does not depend on waits as well, until it is forgotten
# Weak, so that a module with a plan is freed like any other.
_APPLIED: "weakref.WeakKeyDictionary[nn.Module, AppliedPlan]" = weakref.WeakKeyDictionary()
_THREAD = threading.local()


class AppliedPlan:
    """A plan at work on a module.

    Args:
        module: What runs.
        plan: Which.
        watches: Whether the caller looks at what is ``unknown``. Then the first steps are followed tensor by tensor,
            and as many again after one that was another than those before.

    Attributes:
        plan: As given.
        calls: What forwards call together of the modules whose calls are counted, see :meth:`count_calls`.
        values: What drops values and computes them again, and tells of steps that exceed the budget; ``None`` where
            there is nothing to drop and nothing to tell.
    """

    def __init__(self, module: nn.Module, plan: MemoryPlan, *, watches: bool = False) -> None:
        self.plan = plan
        # Several threads may run the module at once, each in a forward of its own.
        self._local = threading.local()
        self._watches = watches
        self._has_warned = False
        self._has_widened = False
        self._has_told_of_waiting = False
        # Whose gradients would take a step beyond the budget; none where that is not so, or is told.
        self._trained: list[weakref.ref[nn.Parameter]] = []
        if (plan.adding_peak or 0) > (plan.budget or plan.adding_peak or 0):
            self._trained = [weakref.ref(parameter) for parameter in module.parameters() if parameter.requires_grad]
        self._handles: list[Any] = []
        self.values: Rematerialization | None = None
        self._replays: Replays | None = None
        # First, as hooks go round the code that is there.
        self._code = CodeShares(module, plan.shares)
        for path, why in self._code.refused.items():
            warnings.warn(
                f"The plan has {path or 'the model'} save {plan.shares[path]:.0%} of what its compiled code would, but "
                f"{why}: it saves all of it, and the peak is a higher one. Compile it before the plan is put on.",
                stacklevel=3,
            )
        if plan.replayed:
            # Who watches is to see what no plan knows.
            alike = () if watches else twins_of_calls(module, plan.replayed, {d.module for d in plan.decisions})
            self._replays = Replays(module, plan.replayed, alike)
        # A plan that drops nothing has a budget all the same, which steps may exceed that do more.
        if plan.dropped or watches or (plan.keeps_all and plan.budget is not None):
            self.values = hooks_for_values(module, plan, watches=watches)
            if not (plan.dropped or watches or self.values.can_tell):
                self.values.remove()
                self.values = None
        self.calls: CallCounts = CallCounts()
        if not self._has_nothing_to_do:
            # The root's own hooks: first of all, so that what other hooks save follows the plan as
            # well, and also where forward raises, so that no thread is left inside.
            root = _RootHooks(self)
            self._handles = [
                module.register_forward_pre_hook(root, prepend=True, with_kwargs=True),
                module.register_forward_hook(root.leave, always_call=True),
            ]
            if _is_called_otherwise(module):
                self._handles.append(_FollowingForward(module))

    @property
    def _has_nothing_to_do(self) -> bool:
        return self.values is None and self._replays is None and not self._trained

    @contextmanager
    def active(self, inputs: Any = ()) -> Iterator[None]:
        """Forwards in this block follow the plan; nested blocks have no further effect.

        Args:
            inputs: What it takes, where that is known: tensors, or what has some in it.
        """
        # A module that calls itself is in here already.
        if self._has_nothing_to_do or getattr(self._local, "active", False) or not _saves_for_hooks():
            yield
            return
        # What a region saves has to be the same when it runs again, and here what is saved depends
        # on the step, and on how many came before.
        if is_in_checkpoint():
            self._tell_of_checkpoint()
            yield
            return
        self._local.active = True
        counts = self._tells_of_waiting
        try:
            with (
                nullcontext() if self.values is None else self.values.active(inputs, counts_waiting=counts),
                nullcontext() if self._replays is None else self._replays.active(),
                self.calls.active() if self.calls.is_on else nullcontext(),
            ):
                yield
            self._check_peak()
        finally:
            self._local.active = False

    def _check_peak(self) -> None:
        """After a forward: tells once if its backward will need more than the budget; drops more from then on."""
        plan = self.plan
        # Who watches plans for such steps.
        if self.values is None or self._watches or plan.budget is None:
            return
        self._check_waiting(self.values.waiting, plan.budget)
        if self._has_widened:
            return
        peak = self.values.peak_of_other_step()
        if peak > plan.budget:
            self._has_widened = True
            self.values.widen()
            warnings.warn(
                f"dpx: a step needs about {format_mib(peak)} or more in its backward, where the plan has a budget of "
                f"{format_mib(plan.budget)}: it is another step than the planned one, or a larger one. From now on all "
                "is dropped that the plan drops in any call like it; where that is too little, make the plan for the "
                "step that needs most.",
                stacklevel=2,
            )

    @property
    def _tells_of_waiting(self) -> bool:
        return not (self._watches or self._has_told_of_waiting) and self.plan.budget is not None

    def _check_waiting(self, waiting: float, budget: int) -> None:
        """Tells once if forwards before this one, with all that they have kept, wait for their backward."""
        plan = self.plan
        if self._has_told_of_waiting or waiting < _MOST_OF_A_FORWARD or plan.peak is None:
            return
        peak = plan.peak + int(waiting * (plan.saved_bytes or 0))
        if peak > budget:
            self._has_told_of_waiting = True
            warnings.warn(
                f"dpx: a forward of the planned {plan.model} has run before the backward of an earlier one: together "
                f"they need about {format_mib(peak)} or more, where the plan has a budget of {format_mib(budget)} for "
                "one. Make the plan for a module whose forward calls it as often as a step does, or run each backward "
                "before the next forward.",
                stacklevel=2,
            )

    def _watch_backward(self, output: Any) -> None:
        """Checks for gradients when backward begins, since they may be set to ``None`` until then."""
        for leaf in tree_leaves(output) if _saves_for_hooks() else ():
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._check_gradients)  # type: ignore[no-untyped-call]
                return

    def _check_gradients(self, _gradient: Any) -> None:
        """Tells once if the backward of a step that was planned as one without gradients finds some."""
        for reference in self._trained:
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                break
        else:
            return
        self._trained = []
        warnings.warn(
            f"dpx: parameters have gradients, to which the backward of the planned {self.plan.model} adds new ones: "
            f"that takes up to {format_mib(self.plan.adding_peak or 0)}, where the plan has a budget of "
            f"{format_mib(self.plan.budget or 0)} for a step that finds none. Make the plan with accumulates=True, or "
            "call zero_grad(set_to_none=True) before every step.",
            stacklevel=2,
        )

    def _tell_of_checkpoint(self) -> None:
        """Once: the plan is not followed in a region that makes all of the module again."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"dpx: a {self.plan.model} with a memory plan runs within torch.utils.checkpoint, which drops all that "
                "the module saves and makes it again at once: the plan is not followed in there. Plan what calls "
                "checkpoint instead, or leave checkpoint out.",
                stacklevel=2,
            )

    def enter(self, inputs: Any, caller: FrameType) -> None:
        """A forward of the root begins, with these inputs, in the code that ``caller`` runs."""
        _leave_interrupted()
        # A hook has no block to put a context round: it is entered here, and closed by the other
        # hook. The root may be called within itself, so there is a list of them.
        entered = _Entered(self, ExitStack(), caller)
        # First, as the other hook takes the last one off also where this one has failed.
        _entered_here().append(entered)
        entered.stack.enter_context(self.active(inputs))

    def leave(self, output: Any) -> None:
        """A forward of the root is over."""
        entered = _entered_here()
        # Those of other plans in it that Ctrl-C has ended, where this one has caught that.
        while entered[-1].plan is not self:
            _take_off(entered.pop())
        entered.pop().stack.close()
        if self._trained:
            self._watch_backward(output)

    @property
    def not_found(self) -> dict[str, str]:
        """Values that the plan drops but that had to be kept, and why."""
        refused: dict[str, str] = dict(self._code.refused)
        if self.values is not None:
            # In a step that leaves the routine the hooks try more than the plan names.
            for name, why in self.values.refused.items():
                if name in self.plan.dropped:
                    refused[name] = why
        if self._replays is not None:
            refused |= self._replays.refused
        return refused

    @property
    def unknown(self) -> dict[str, int]:
        """Bytes of values that a backward has asked for and of which the plan knows nothing, by name.

        Only of a plan that watches, and of steps that are followed tensor by tensor.
        """
        if self.values is None:
            return {}
        return self.values.unknown

    def count_calls(self, paths: Collection[str]) -> None:
        """From now on counts calls of the modules at these paths, forward by forward."""
        # Where it watches there are values; in compiled code there can be no hooks.
        parts = {} if self.values is None else self.values.names.parts
        self.calls.remove()
        self.calls = CallCounts({path: parts[path] for path in paths if path in parts})

    def remove(self) -> None:
        """Takes its hooks off."""
        _leave_interrupted()
        if self.values is not None:
            self.values.remove()
        if self._replays is not None:
            self._replays.remove()
        self.calls.remove()
        for handle in self._handles:
            handle.remove()
        self._code.remove()


def _saves_for_hooks() -> bool:
    """Whether autograd saves what a plan could be about."""
    # Without gradients it saves nothing, and others may have forbidden hooks.
    if not (torch.is_grad_enabled() and saved_tensors_hooks_enabled()):  # type: ignore[attr-defined]
        return False
    # In a transform of torch.func that runs around the module all tensors are of the transform, which
    # keeps them: such a forward would drop nothing, and teach the hooks that nothing is to be dropped.
    return innermost_transform() is None


@dataclass(frozen=True, slots=True)
class _Entered:
    """A forward of the root.

    Attributes:
        plan: Which it follows.
        stack: The contexts that it runs in.
        caller: The code that has entered them: while it runs the forward is not over.
    """

    plan: AppliedPlan
    stack: ExitStack
    caller: FrameType


def _entered_here() -> "list[_Entered]":
    """The planned forwards that run in this thread, innermost last."""
    # Of all plans: modules with plans may hold each other, and what they put on lies in one stack of torch's.
    entered: list[_Entered] | None = getattr(_THREAD, "entered", None)
    if entered is None:
        entered = _THREAD.entered = []
    return entered


def _leave_interrupted() -> None:
    """Takes off what forwards have left on that Ctrl-C has ended: torch calls no hook after one.

    Until then, which is the next planned forward of this thread or the end of a plan, their inputs stay, and what the
    functions that called them had in their variables.
    """
    entered = _entered_here()
    while entered and not is_on_stack(entered[-1].caller):
        _take_off(entered.pop())


def _take_off(interrupted: _Entered) -> None:
    # As the exception would have left it, so that nothing is learnt from a part of a forward.
    error = KeyboardInterrupt()
    with STEP_ASIDE.hooks_of_others_off():
        interrupted.stack.__exit__(KeyboardInterrupt, error, None)


class _RootHooks(CopiedEmpty):
    """The hooks of the root; copies of the module, by deepcopy or pickle, get some that do nothing."""

    def __init__(self, applied: AppliedPlan | None) -> None:
        self._applied = applied

    def __reduce__(self) -> tuple[Any, ...]:
        return _RootHooks, (None,)

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._applied is not None:
            self._applied.enter((args, kwargs), sys._getframe(1))

    def leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._applied is not None:
            self._applied.leave(output)


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
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForwardByPlan":
        module = self._there()
        return _ForwardByPlan(memo.get(id(module), module))

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
        applied = _APPLIED.get(self._there())
        if applied is None:
            return forward(*args, **kwargs)
        output = None
        applied.enter((args, kwargs), sys._getframe())
        try:
            output = forward(*args, **kwargs)
        finally:
            applied.leave(output)
        return output


class _FollowingForward:
    """Has the forward of a module follow its plan, until it is removed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        module.forward = _ForwardByPlan(module)

    def remove(self) -> None:
        """The forward is that of the class again."""
        module = self._module()
        if module is not None:
            vars(module).pop("forward", None)


def apply_plan(module: nn.Module, plan: MemoryPlan, *, watches: bool = False) -> AppliedPlan:
    """From now on forward passes of ``module`` that record gradients follow ``plan``.

    Gradients stay what they were, to the bit on the host. What runs beside ``module.forward`` (a ``training_step`` that
    calls submodules) follows it inside ``applied.active()``; the strategy and the callback take care of that.

    A step may differ from the planned one, as layers are skipped or rows are routed: what the plan does not know is
    dropped if the same value of a call like it is. If a step will exceed the budget nevertheless, a warning tells
    once; likewise if its backward finds gradients, to which it adds, and the plan was made for one that finds none.
    Within ``torch.utils.checkpoint``, which makes all of a forward again, nothing is dropped.

    Args:
        module: What the plan was made for.
        plan: Which.
        watches: Whether ``applied.unknown`` shall tell of steps that save what the plan knows nothing of. The first
            steps take a little longer then.

    Returns:
        The applied plan: ``active()`` is the context of what runs beside ``module.forward``.

    Raises:
        PlanError: the plan does not belong to the module, or one is applied already; or it was made for other units of
            FullyShardedDataParallel than the module has, or for none, or with recipes that are others now.

    Examples:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        >>> rows = torch.ones(64, 64)
        >>> plan = dpx.search_plan(net, rows, budget=0.7, progress=False)
        >>> applied = dpx.apply_plan(net, plan)
        >>> net(rows).sum().backward()  # the gradients of a step without a plan, in 0.7 of its memory
    """
    check_is_module(module)
    check_is_plan(plan)
    # Names of the plan are those that modules have without wrappers of FSDP1; the hooks sit inside of these.
    with unwrapped(module) as whole:
        if whole in _APPLIED:
            raise PlanError("A plan is applied already; call remove_plan(module) first.")
        plan.check(whole)
        _check_recipes(plan)
        if any(map(is_flat_unit, whole.modules())):
            _check_units(whole, plan)
        applied = _APPLIED[whole] = AppliedPlan(whole, plan, watches=watches)
    return applied


def check_is_plan(plan: object) -> None:
    """Whether ``plan`` is one, and not its file.

    Raises:
        PlanError: it is not.
    """
    if not isinstance(plan, MemoryPlan):
        raise PlanError(f"{plan!r} is no plan; give a MemoryPlan, such as MemoryPlan.load(path).")


def _check_recipes(plan: MemoryPlan) -> None:
    """Refuses a plan that may make values again by recipes that are others now: it has compared what these gave."""
    now = own_recipes().split()
    changed = [known.partition(":")[0] for known in plan.recipes.split() if known not in now]
    if changed and not plan.keeps_all:
        raise PlanError(
            f"The plan was made with another recipe for {', '.join(changed)} than the one that is registered now, or "
            "there is none any more. Register the one that it was made with, or make a new plan."
        )


def _check_units(module: nn.Module, plan: MemoryPlan) -> None:
    """Refuses a plan that may need parameters of a unit of FSDP1 in the backward of another one."""
    # On a GPU they may be on their way by then: the numbers would be wrong without a word. With
    # ``fully_shard`` nothing is made again beyond the inputs of a unit, which have an operator there that no
    # recipe knows.
    units = inner_units(module)
    if plan.units != units:
        raise PlanError(
            f"The plan was made for a module that is sharded in units {plan.units or '(none)'}, and this one is in "
            f"{units or '(none)'}: parameters of FullyShardedDataParallel are there within their unit only. Make a new "
            "plan for the wrapped module."
        )


def remove_plan(module: nn.Module) -> None:
    """Takes the plan off ``module``: everything is kept again.

    Args:
        module: What :func:`apply_plan` was given.

    Raises:
        PlanError: no plan is applied.

    Examples:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        >>> applied = dpx.apply_plan(net, dpx.search_plan(net, torch.ones(64, 64), budget=0.7, progress=False))
        >>> dpx.remove_plan(net)
    """
    check_is_module(module)
    applied = _APPLIED.pop(inside(module), None)
    if applied is None:
        raise PlanError("No plan is applied to the module.")
    applied.remove()


def applied_plan(module: nn.Module) -> AppliedPlan | None:
    """The plan at work on ``module``."""
    return _APPLIED.get(inside(module))


def planned(module: nn.Module) -> AbstractContextManager[None]:
    """What runs in here follows the plan of ``module``, if it has one."""
    applied = applied_plan(module)
    if applied is None:
        return nullcontext()
    return applied.active()
