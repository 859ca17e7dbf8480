"""Plans on modules: put on and taken off, without touching the module's names, classes or code."""

import threading
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_dpx.arguments import check_is_module
from lightning_dpx.errors import PlanError
from lightning_dpx.memory.execute.call_counts import CallCounts
from lightning_dpx.memory.execute.flat_units import inside, is_flat_unit, unwrapped
from lightning_dpx.memory.execute.grown_values import GrownValues
from lightning_dpx.memory.execute.module_calls import compiled_parts
from lightning_dpx.memory.execute.planned_forwards import PlannedForwards, leave_interrupted
from lightning_dpx.memory.execute.recipes import own_recipes
from lightning_dpx.memory.execute.recompiled_parts import RecompiledParts
from lightning_dpx.memory.execute.saved_tensor_hooks import Rematerialization
from lightning_dpx.memory.execute.sharded_units import inner_units
from lightning_dpx.memory.execute.similar_values import similar_calls
from lightning_dpx.memory.execute.whole_call_replays import Replays
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.plan_hooks import hooks_for_values
from lightning_dpx.memory.plan_warnings import PlanWarnings
from lightning_dpx.torch_compat import innermost_transform, is_in_checkpoint, saved_tensors_hooks_enabled

# Weak, so that a module with a plan is freed like any other.
_APPLIED: "weakref.WeakKeyDictionary[nn.Module, AppliedPlan]" = weakref.WeakKeyDictionary()
_UNTOLD = (
    "dpx: a model whose memory plan keeps everything, or a part of it, is compiled as one graph, in which nothing "
    "looks at steps: one that takes more than the budget is not told of. Without fullgraph=True it is."
)


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
        self._warnings = PlanWarnings(module, plan, watches=watches)
        self.values: Rematerialization | None = None
        self._replays: Replays | None = None
        # First, as hooks go round the code that is there.
        self._code = RecompiledParts(module, plan.shares)
        for path, why in self._code.refused.items():
            warnings.warn(
                f"The plan has {path or 'the model'} save {plan.shares[path]:.0%} of what its compiled code would, but "
                f"{why}: it saves all of it, and the peak is a higher one. Compile it before the plan is put on.",
                stacklevel=3,
            )
        if plan.replayed:
            # Who watches is to see what no plan knows.
            alike = () if watches else similar_calls(module, plan.replayed, {d.module for d in plan.decisions})
            self._replays = Replays(module, plan.replayed, alike)
        # What drops something has to be followed, or the step exceeds its budget.
        told = _UNTOLD if plan.keeps_all else ""
        # A plan that drops nothing, or replays calls only, has a budget all the same, which steps may exceed that do
        # more.
        if plan.dropped or watches or plan.budget is not None:
            self.values = hooks_for_values(module, plan, watches=watches, told=told)
            if not (plan.dropped or watches or self.values.can_tell):
                self.values.remove()
                self.values = None
        self.calls: CallCounts = CallCounts()
        # Last, so that these hooks are outside of all others.
        self._forwards: PlannedForwards | None = None
        if not self._has_nothing_to_do:
            self._forwards = PlannedForwards(module, self._begin_forward, self._end_forward, told=told)
        # Compiled parts have hooks round them.
        if not (plan.keeps_all or compiled_parts(module)):
            self._warnings.watch_compiled_code(module)

    @property
    def _has_nothing_to_do(self) -> bool:
        return self.values is None and self._replays is None and not self._warnings.looks_for_gradients

    @contextmanager
    def active(self, inputs: Any = ()) -> Iterator[None]:
        """Forwards in this block follow the plan; nested blocks have no further effect.

        Args:
            inputs: What it takes, where that is known: tensors, or what has some in it.
        """
        # A forward that Ctrl-C has ended would be taken for one around this block.
        leave_interrupted()
        # A module that calls itself is in here already.
        if self._has_nothing_to_do or getattr(self._local, "active", False) or not _saves_for_hooks():
            yield
            return
        # What a region saves has to be the same when it runs again, and here what is saved depends
        # on the step, and on how many came before.
        if is_in_checkpoint():
            self._warnings.tell_of_checkpoint()
            yield
            return
        self._local.active = True
        self._warnings.is_followed = True
        counts = self._warnings.counts_waiting
        try:
            with (
                nullcontext() if self.values is None else self.values.active(inputs, counts_waiting=counts),
                nullcontext() if self._replays is None else self._replays.active(),
                self.calls.active() if self.calls.is_on else nullcontext(),
            ):
                yield
            # Not where it has failed: of a part of a forward nothing can be said.
            if self.values is not None:
                self._warnings.look_at_forward(self.values)
        finally:
            self._local.active = False

    def _begin_forward(self, inputs: Any) -> AbstractContextManager[None]:
        # Even contexts that do nothing take as long as a small layer.
        return _Passing(self._local) if self._passes(inputs) else self.active(inputs)

    def _passes(self, inputs: Any) -> bool:
        """Whether a forward only has to be counted, and is by this."""
        if self.values is None or self._replays is not None or self.calls.is_on:
            return False
        # Of those within others, without gradients and in a checkpoint :meth:`active` knows what to do.
        if getattr(self._local, "active", False) or not _saves_for_hooks() or is_in_checkpoint():
            return False
        return self.values.passes(inputs)

    def _end_forward(self, output: Any) -> None:
        if self._warnings.looks_for_gradients and _saves_for_hooks():
            self._warnings.watch_backward(output)

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

    @property
    def growth(self) -> GrownValues | None:
        """How much larger values are than the planned ones; ``None`` unless the plan watches."""
        if self.values is None:
            return None
        return self.values.growth

    def expect_sizes(self, sizes: Mapping[str, int]) -> None:
        """From now on growth is told beside values of these bytes, by name: a plan may be kept for larger steps."""
        if self.values is not None:
            self.values.growth = GrownValues(sizes)

    def count_calls(self, paths: Collection[str]) -> None:
        """From now on counts calls of the modules at these paths, forward by forward."""
        # Where it watches there are values; in compiled code there can be no hooks.
        parts = {} if self.values is None else self.values.names.parts
        self.calls.remove()
        self.calls = CallCounts({path: parts[path] for path in paths if path in parts})

    def remove(self) -> None:
        """Takes its hooks off."""
        leave_interrupted()
        if self.values is not None:
            self.values.remove()
        if self._replays is not None:
            self._replays.remove()
        self.calls.remove()
        if self._forwards is not None:
            self._forwards.remove()
        self._code.remove()
        self._warnings.remove()


class _Passing(AbstractContextManager[None]):
    """In the place of the contexts of a forward: notes that it runs.

    Args:
        local: Of the plan.
    """

    def __init__(self, local: threading.local) -> None:
        self._local = local

    def __enter__(self) -> None:
        self._local.active = True

    def __exit__(self, *_error: object) -> None:
        self._local.active = False


def apply_plan(module: nn.Module, plan: MemoryPlan, *, watches: bool = False) -> AppliedPlan:
    """From now on forward passes of ``module`` that record gradients follow ``plan``.

    Gradients stay what they were, to the bit on the host. What runs beside ``module.forward`` (a ``training_step`` that
    calls submodules) follows it inside ``applied.active()``; the strategy and the callback take care of that.

    A step may differ from the planned one, as layers are skipped or rows are routed: what the plan does not know is
    dropped if the same value of a call like it is. If a step will exceed the budget nevertheless, a warning tells
    once; likewise if its backward finds gradients, to which it adds, and the plan was made for one that finds none.
    Within ``torch.utils.checkpoint``, which makes all of a forward again, nothing is dropped. Where the module or a
    part is compiled as one graph (``fullgraph=True``), a plan that keeps everything tells of nothing, and a warning
    says so; one that drops something is an error of ``torch.compile``. Code that was compiled before around the module
    does not follow the plan, which a warning tells as well.

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


def _saves_for_hooks() -> bool:
    """Whether autograd saves what a plan could be about."""
    # Without gradients it saves nothing, and others may have forbidden hooks.
    if not (torch.is_grad_enabled() and saved_tensors_hooks_enabled()):  # type: ignore[attr-defined]
        return False
    # In a transform of torch.func that runs around the module all tensors are of the transform, which
    # keeps them: such a forward would drop nothing, and teach the hooks that nothing is to be dropped.
    return innermost_transform() is None


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
    """Takes the plan off ``module``: everything is kept again, from the next forward on where it is called within one.

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
        raise PlanError(f"No plan is applied to this {type(module).__name__}; apply_plan() puts one on a module.")
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
