"""Plans on modules: made, priced, put on and taken off, without touching the module's names, classes or code."""

import inspect
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_dpx.activations import arguments_of_step
from lightning_dpx.arguments import check_is_module, is_number, is_whole_number
from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import ConfigurationError, DPXError, PlanError
from lightning_dpx.memory.execute.call_counts import CallCounts
from lightning_dpx.memory.execute.code_shares import CodeShares
from lightning_dpx.memory.execute.flat_units import inside, is_flat_unit, unwrapped
from lightning_dpx.memory.execute.replays import Replays
from lightning_dpx.memory.execute.saved_tensor_hooks import Rematerialisation
from lightning_dpx.memory.execute.sharded_units import inner_units, sharded_units
from lightning_dpx.memory.execute.twins import twins_of_calls
from lightning_dpx.memory.measured_plans import fastest_plan
from lightning_dpx.memory.micro_batches import (
    MicroBatchNumber,
    PlanOf,
    TooFewRowsError,
    parse_micro_batch_number,
    plan_fixed_micro_batches,
    plan_in_micro_batches,
)
from lightning_dpx.memory.plan.forecast import Forecast, forecast, timeline, with_overheads
from lightning_dpx.memory.plan.make_plan import make_planner
from lightning_dpx.memory.plan.offload import as_planned
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.plan.planners.search import SearchPlanner
from lightning_dpx.memory.plan.problem import Planner, Problem
from lightning_dpx.memory.plan_cache import PlanCache, found_or_planned, key_of_step
from lightning_dpx.memory.plan_hooks import hooks_for_values
from lightning_dpx.memory.profile.abstract import first_rows, profile_absent, target_of
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.fake import fake_device_for
from lightning_dpx.memory.profile.profiler import Run, profile_step
from lightning_dpx.memory.sharding import plan_of_first_rank, profile_unsharded
from lightning_dpx.progress import shown
from lightning_dpx.python_objects.object_graph import CopiedEmpty
from lightning_dpx.python_objects.overrides import overridden
from lightning_dpx.torch_compat import innermost_transform, is_in_checkpoint, saved_tensors_hooks_enabled, tree_leaves
from lightning_dpx.units import format_mib, parse_bytes, parse_share

_LOG = logging.getLogger("lightning_dpx")
_LEAST_BYTES = 1024  # of a budget that is a float above one
_MOST_OF_A_FORWARD = 0.5  # of its bytes; what a loss does not depend on waits as well, until it is forgotten
# Weak, so that a module with a plan is freed like any other.
_APPLIED: "weakref.WeakKeyDictionary[nn.Module, AppliedPlan]" = weakref.WeakKeyDictionary()


def search_plan(
    module: nn.Module,
    *batch: Any,
    budget: int | float | str | None = None,
    planner: str | Planner = "auto",
    num_trials: int = 6,
    device: torch.device | str | None = None,
    progress: bool = True,
    plan_cache: bool | str | os.PathLike[str] = False,
    micro_batches: MicroBatchNumber = 1,
    accumulates: bool | None = None,
) -> MemoryPlan:
    """Chooses what to compute again, so that the activations of a step on ``batch`` fit into ``budget``.

    Runs a few steps to time them, then a forward without and one with its backward, and where steps are short a few
    with the plans that are near the fastest; parameters, gradients, buffers and random generators stay as they were.
    The time grows with the size of the step, not with that of the search.

    A module that ``fully_shard`` or ``FullyShardedDataParallel`` has spread over processes is planned on fake tensors
    as what it was before, on the device where it is; all processes of the default group call this, each with rows of
    the same shapes, and all get the plan of the first. The budget is that of one process. Gathered parameters and
    gradients come on top. A module whose step talks to other processes, as tensor-parallel layers do, is profiled by
    all of them at once, too; each process gets a plan of its own, in which nothing is recomputed that would need the
    others.

    With ``device`` nothing is computed and nothing allocated: the step runs on fake tensors, as it would on that
    device, which need not be there. The module and the batch may be on the meta device.

    Args:
        module: Any module. One with a ``training_step`` runs that, with the batch and index 0; from the outputs of any
            other, all that require grad are summed.
        batch: The inputs of ``module.forward``; the batch, for a ``training_step``.
        budget: Bytes of activations at the most, also as ``"8GiB"``; a fraction (0 to 1, or ``"60%"``) of what they
            need without a plan; or as few as possible. Activations are what the step allocates and frees again: not
            parameters and their gradients.
        planner: ``"auto"``, ``"optimal"``, ``"milp"``, ``"search"``, ``"threshold"``, another registered name, or a
            planner.
        num_trials: Steps of the grid of ``"search"``.
        device: What to plan for, such as ``"cuda"``; unless given, where the module is, with times measured there.
            For another one, the step runs on fake tensors (for the host, each different operator is tried once beside),
            times come from FLOPs and bytes moved, and no run proves that what is computed again is the same;
            :attr:`MemoryPlan.basis` says so. A step that fake tensors cannot run is run on a part of its
            rows (of dim 0) instead, with a warning.
        plan_cache: Whether a plan that an earlier call made for the same module, code, shapes, budget, planner and
            versions is found again, and in which folder: ``True`` for the user's own. Nothing looks at the step then.
        progress: Whether a bar on standard error, if that is a terminal, shows how far it is after two seconds.
        micro_batches: Into how many micro-batches (of dim 0) a step is cut, each of which runs forward and backward
            before the next; ``"auto"`` is the number with which a step is fastest within the budget. The plan is for
            one of them, and says how many. Cutting is the caller's, or that of a strategy or group with the plan.
        accumulates: Whether backward adds to gradients that are there, as in a second step before ``zero_grad``, or
            after ``zero_grad(set_to_none=False)``: a new gradient is an activation then, until it has been added.
            ``True`` plans for that, ``False`` for a step that finds none; unless given, parameters have the gradients
            that they have now.

    Returns:
        The plan, for :func:`apply_plan` or ``DPXStrategy(plan=...)``; nothing follows it yet.

    Raises:
        PlanError: the budget cannot be met, with the smallest that can; or there is nothing to plan; or neither fake
            tensors nor real ones can run the step.
        ConfigurationError: an argument has a value that is not allowed.

    Examples:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        >>> plan = dpx.search_plan(net, torch.ones(64, 64), budget=0.7, progress=False)
        >>> plan.peak <= 0.7 * plan.unplanned_peak
        True
    """
    check_is_module(module)
    # Called for their errors: a wrong argument is told at once, and not after a profile.
    grid = SearchPlanner(num_trials)
    chosen = grid if planner == "search" else make_planner(planner)
    bytes_of_budget(budget, 1)
    micro_batches = parse_micro_batch_number(micro_batches)
    is_sharded = bool(sharded_units(module))
    if is_sharded and device is None:
        device = device_of(module, batch)  # asked before its parameters are whole, and nowhere

    def search() -> MemoryPlan:
        where = False if is_sharded else plan_cache
        cache = PlanCache(where, _LOG.warning)

        def profile_of(inputs: tuple[Any, ...], adds: bool) -> Profile:
            key = ""
            if cache.is_on:  # a key is a digest of all that the module leads to
                # A micro-batch finds gradients of earlier ones, and is another step than the
                # first.
                adding = ("accumulates",) if adds or _has_gradients(whole) else ()
                others = (str(device), *adding)
                key = key_of_step(module, inputs, device_of(module, inputs), *others)
            return cache.profile(key, lambda: profile_module(whole, *inputs, device=device, accumulates=adds))

        def plan_of(profile: Profile, allowed: int | None) -> MemoryPlan:
            # Only a step that runs here as it is planned can be timed with several plans; else the
            # one that is said to be fastest is taken.
            choose: Callable[[Sequence[MemoryPlan]], MemoryPlan] = itemgetter(0)
            if device is None and micro_batches == 1 and not is_sharded:
                choose = partial(fastest_plan, profile=profile, module=module, run=loss_of(module, *batch))
            plan, found = found_or_planned(cache, whole, profile, allowed, chosen, choose=choose)
            if found:
                _LOG.info("dpx: the memory plan was found in the cache, in %s", cache.path_of(found))
            return replace(plan, adding_peak=_adding_peak(profile, plan))

        profile = profile_of(batch, bool(accumulates))
        allowed = bytes_of_budget(budget, profile.peak)
        if micro_batches == 1:
            return plan_of(profile, allowed)
        return _planned_in_parts(batch, profile, allowed, micro_batches, profile_of, plan_of)

    with (
        shown("planning memory", enabled=progress),
        unwrapped(module) as whole,
        _without_gradients(whole) if accumulates is False else nullcontext(),
    ):
        if is_sharded:
            return plan_of_first_rank(search)
        return search()


def _has_gradients(module: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in module.parameters())


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """In here no parameter has a gradient."""
    found = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in found:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in found:
            parameter.grad = gradient


def _adding_peak(profile: Profile, plan: MemoryPlan) -> int | None:
    """What a step takes at the most that adds its gradients to others, where that of ``profile`` finds none."""
    if not profile.adding or plan.peak is None:
        return None
    bytes_at = timeline_of(profile, plan)
    return max(plan.peak, *(bytes_at[event] + more for event, more in profile.adding))


def _planned_in_parts(
    batch: tuple[Any, ...],
    whole: Profile,
    budget: int | None,
    micro_batches: MicroBatchNumber,
    profile_of: Callable[[tuple[Any, ...], bool], Profile],
    plan_of: PlanOf,
) -> MemoryPlan:
    """The plan of a step that is cut; see :func:`search_plan`.

    Raises:
        ConfigurationError: the number is to be chosen, and there is nothing to choose it for.
    """
    rows, cut = first_rows(batch)

    def of_rows(count: int, accumulates: bool) -> Profile:
        if count == rows:
            return whole
        try:
            return profile_of(cut(count), accumulates)
        except (DPXError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise TooFewRowsError(
                f"micro_batches={micro_batches!r} cuts {rows} rows into parts of {count} rows, and on those the step "
                f"raises {type(error).__name__}: {error} On all rows it runs; give fewer micro-batches."
            ) from error

    if micro_batches != "auto":
        return plan_fixed_micro_batches(micro_batches, rows, of_rows, plan_of, budget)
    if budget is None:
        raise ConfigurationError('micro_batches="auto" needs a budget: the fewest bytes are those of single rows.')
    return plan_in_micro_batches(rows, of_rows, plan_of, budget, whole)[0]


def bytes_of_budget(budget: int | float | str | None, peak: int) -> int | None:
    """A fraction is one of the unplanned peak.

    Raises:
        ConfigurationError: neither positive bytes nor a fraction.
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        budget = parse_share("budget", budget) if "%" in budget else parse_bytes("budget", budget)
    if not is_number(budget) or not 0 < budget < float("inf"):  # neither holds for NaN
        raise ConfigurationError(
            f"budget={budget!r} is not allowed; give positive bytes, '8GiB', or a fraction up to 1.0."
        )
    if is_whole_number(budget):  # 1 is a byte, and 1.0 is all of the peak
        return int(budget)
    if budget <= 1:
        return int(budget * peak)
    # There are no parts of a byte: 1.5 is meant for one and a half of the peak. So is 2.0, and 60.0 for a percentage;
    # half of a peak may well be a float, and no step is so small.
    if not float(budget).is_integer() or budget < _LEAST_BYTES:
        raise ConfigurationError(
            f"budget={budget!r} is not allowed; a fraction goes up to 1.0, and bytes are whole: an int, or a text such "
            "as '8GiB' ('60%' is a fraction, too)."
        )
    return int(budget)


def profile_module(
    module: nn.Module, *batch: Any, device: torch.device | str | None = None, accumulates: bool = False
) -> Profile:
    """What a step of ``module`` on ``batch`` saves; see :func:`search_plan` and :func:`profile_step`."""
    # Sharded parameters are whole only in their unit's forward and backward, so their steps are
    # always profiled on fakes.
    if sharded_units(module):
        home = device or device_of(module, batch)
        with unwrapped(module) as whole:
            run = partial(_loss_of_all, whole)
            return profile_unsharded(whole, batch, home, run, accumulates=accumulates)
    if device is not None:
        target = target_of(device)
        return profile_absent(
            module,
            batch,
            target,
            lambda inputs: loss_of(module, *inputs),
            here=fake_device_for(target),
            few=lambda: first_rows(batch),
            accumulates=accumulates,
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise PlanError('On the meta device nothing can run; give device="cuda", or what else is to be planned for.')
    return profile_step(module, loss_of(module, *batch), device_of(module, batch), accumulates=accumulates)


def loss_of(module: nn.Module, *batch: Any) -> Run:
    """One forward that ends in something to run backward from."""
    step = getattr(module, "training_step", None)

    def run() -> torch.Tensor:
        with _muted(module) if step is not None else nullcontext():
            if step is None:
                out = module(*batch)
            else:
                given = batch[0] if len(batch) == 1 else batch
                out = step(*arguments_of_step(step, given))
        if isinstance(out, dict) and "loss" in out:
            out = out["loss"]
        return sum_of(out)

    return run


def _loss_of_all(module: nn.Module, inputs: Any) -> Run:
    return loss_of(module, *inputs)


def sum_of(outputs: Any) -> torch.Tensor:
    """Something to run backward from, whatever a module returns.

    Raises:
        PlanError: no output requires grad.
    """
    results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not results:
        raise PlanError("There is nothing to plan: no output of the module depends on its parameters.")
    # A loss is taken as it is: no operator of ours in the step that is profiled.
    if len(results) == 1 and results[0].ndim == 0:
        return results[0]
    return torch.stack([result.float().sum() for result in results]).sum()


def _muted(module: nn.Module) -> AbstractContextManager[None]:
    """What a training step logs outside of a Trainer goes nowhere."""
    names = [name for name in ("log", "log_dict") if hasattr(module, name) and name not in vars(module)]
    return overridden(module, **dict.fromkeys(names, _logs_nothing))


def _logs_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def device_of(module: nn.Module, batch: Any) -> torch.device:
    """Where the module lives; with parts on several devices, the one of them where the batch is."""
    homes = [canonical_device(parameter.device) for parameter in module.parameters()]
    given = [canonical_device(leaf.device) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    for device in given:
        if device in homes:
            return device
    return next(iter([*homes, *given]), torch.device("cpu"))


def estimate_cost(
    module: nn.Module, plan: MemoryPlan, *batch: Any, device: torch.device | str | None = None
) -> dict[str, float]:
    """What ``plan`` would do to a step on ``batch``, for example after an edit or for another batch size.

    Args:
        module: What the plan was made for.
        plan: Which.
        batch: As in :func:`search_plan`.
        device: As in :func:`search_plan`.

    Returns:
        ``"peak"``: bytes of activations at the most; ``"saved"``: bytes kept from forward to backward;
        ``"recompute_share"``: extra time as a share of a step.

    Raises:
        PlanError: the plan does not belong to the module.

    Examples:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        >>> plan = dpx.search_plan(net, torch.ones(64, 64), budget=0.7, progress=False)
        >>> twice = dpx.estimate_cost(net, plan, torch.ones(128, 64))
        >>> twice["peak"] > plan.peak
        True
    """
    check_is_module(module)
    check_is_plan(plan)
    if sharded_units(module) and device is None:
        device = device_of(module, batch)
    with unwrapped(module) as whole:
        plan.check(whole)
        profile = profile_module(whole, *batch, device=device)
    result = forecast_plan(profile, plan)
    return {"peak": result.peak, "saved": result.kept, "recompute_share": result.seconds / profile.step_seconds}


def forecast_plan(profile: Profile, plan: MemoryPlan) -> Forecast:
    """The step of ``profile`` with a plan that may have been made for another one."""
    # What the plan replays and offloads is part of the step; planners only decide about the rest.
    planned = as_planned(profile, plan)
    dropped, uncached = _choice_of(planned, plan)
    return with_overheads(planned, forecast(planned, dropped, uncached), dropped)


def timeline_of(profile: Profile, plan: MemoryPlan | None = None) -> list[int]:
    """Bytes of activations at every event of the step of ``profile``, with a plan or with everything kept."""
    if plan is None:
        return list(profile.curve)
    planned = as_planned(profile, plan)
    return timeline(planned, *_choice_of(planned, plan))


def _choice_of(profile: Profile, plan: MemoryPlan) -> tuple[set[int], set[int]]:
    """The values of ``profile`` that ``plan`` drops, and those of them that go after every use."""
    problem = Problem(profile)
    named = {value.name: index for index, value in enumerate(profile.values) if value.name}
    can = problem.values_of(problem.droppable)
    can |= {index for index, value in enumerate(profile.values) if value.storage < 0}  # the plan of another device's
    # Where a plan offloads what cannot be offloaded here, or computes again what cannot be, a step
    # keeps it.
    offloaded = plan.names("offload")
    can -= {index for name, index in named.items() if profile.values[index].offloaded != (name in offloaded)}
    # Names that this step does not have belong to another shape, and drop nothing here.
    dropped = {named[name] for name in plan.dropped if name in named} & can
    return dropped, {named[name] for name in plan.uncached if name in named} & can


class AppliedPlan:
    """A plan at work on a module.

    Args:
        module: What runs.
        plan: Which.
        watches: Whether the caller looks at what is ``unknown``. Then the first steps are followed tensor by tensor,
            and as many again after one that was another than those before.

    Attributes:
        plan: Likewise.
        calls: What forwards call together of the modules whose calls are counted, see :meth:`count_calls`.
        values: What drops values and computes them again; ``None`` where the plan drops none and nobody watches.
    """

    def __init__(self, module: nn.Module, plan: MemoryPlan, *, watches: bool = False) -> None:
        self.plan = plan
        # Several threads may run the module at once, each in a forward of its own.
        self._local = threading.local()
        self._watches = watches
        self._has_told = False
        self._has_widened = False
        self._has_told_of_waiting = False
        # Whose gradients would take a step beyond the budget; none where that is not so, or is told.
        self._trained: list[weakref.ref[nn.Parameter]] = []
        if (plan.adding_peak or 0) > (plan.budget or plan.adding_peak or 0):
            self._trained = [weakref.ref(parameter) for parameter in module.parameters() if parameter.requires_grad]
        self._handles: list[Any] = []
        self.values: Rematerialisation | None = None
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
        if plan.dropped or watches:
            self.values = hooks_for_values(module, plan, watches=watches)
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
        """What runs in here follows the plan; within itself it does nothing more.

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
        """Until the backward begins, gradients may still be set to ``None``, so that is when they are looked for."""
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
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                f"dpx: a {self.plan.model} with a memory plan runs within torch.utils.checkpoint, which drops all that "
                "the module saves and makes it again at once: the plan is not followed in there. Plan what calls "
                "checkpoint instead, or leave checkpoint out.",
                stacklevel=2,
            )

    def enter(self, inputs: Any) -> None:
        """A forward of the root begins, with these inputs."""
        # A hook has no block to put a context round: it is entered here, and closed by the other
        # hook. The root may be called within itself, so there is a list of them.
        stack = ExitStack()
        if not hasattr(self._local, "entered"):  # of each thread its own
            self._local.entered = []
        # First, as the other hook takes the last one off also where this one has failed.
        self._local.entered.append(stack)
        stack.enter_context(self.active(inputs))

    def leave(self, output: Any) -> None:
        """A forward of the root is over."""
        self._local.entered.pop().close()
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


class _RootHooks(CopiedEmpty):
    """The hooks of the root; copies of the module, by deepcopy or pickle, get some that do nothing."""

    def __init__(self, applied: AppliedPlan | None) -> None:
        self._applied = applied

    def __reduce__(self) -> tuple[Any, ...]:
        return _RootHooks, (None,)

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._applied is not None:
            self._applied.enter((args, kwargs))

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
        applied.enter((args, kwargs))
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
            FullyShardedDataParallel than the module has, or for none.

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


def _check_units(module: nn.Module, plan: MemoryPlan) -> None:
    """Refuses a plan that may need parameters of a unit of FSDP1 in the backward of another one.

    On a GPU they may be on their way by then: the numbers would be wrong without a word. With ``fully_shard`` nothing
    is made again beyond the inputs of a unit, which have an operator there that no recipe knows.
    """
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
