"""From a module, a batch and a budget to a plan: the step is profiled, and the profile planned.

module, batch --profile_module--> profile --planner x budget--> plan
                                     |
                                     +-- in micro-batches: profiles of fewer rows, and a number
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from lightning_dpx.activations import Inputs, inputs_of
from lightning_dpx.arguments import check_is_module, is_number, is_whole_number
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.memory.apply import check_is_plan
from lightning_dpx.memory.execute.flat_units import unwrapped
from lightning_dpx.memory.execute.sharded_units import sharded_units
from lightning_dpx.memory.measured_plans import fastest_plan
from lightning_dpx.memory.micro_batch_planning import (
    FEWER_PARTS,
    MicroBatchNumber,
    PlanOf,
    parse_micro_batch_number,
    plan_fixed_micro_batches,
    plan_in_micro_batches,
    told_as_too_few_rows,
)
from lightning_dpx.memory.module_step import device_of, profile_inputs, run_to_loss
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan, timeline_of
from lightning_dpx.memory.plan.make_plan import make_planner
from lightning_dpx.memory.plan.plan import MemoryPlan
from lightning_dpx.memory.plan.planners.search import SearchPlanner
from lightning_dpx.memory.plan.problem import Planner
from lightning_dpx.memory.plan_cache import PlanCache, found_or_planned, key_of_step
from lightning_dpx.memory.profile.abstract import first_rows
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.sharding import is_tensor_parallel, plan_of_first_rank
from lightning_dpx.progress import shown
from lightning_dpx.torch_compat import tree_leaves
from lightning_dpx.units import parse_bytes, parse_share

_LOG = logging.getLogger("lightning_dpx")
_LEAST_BYTES = 1024  # of a budget that is a float above one
Choose = Callable[[Sequence[MemoryPlan]], MemoryPlan]  # among plans that may be fastest
_said_to_be_fastest: Choose = itemgetter(0)


def search_plan(
    module: nn.Module,
    *batch: Any,
    kwargs: Mapping[str, Any] | None = None,
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
    all of them at once, too; each process gets a plan of its own. In tensor-parallel modules that includes calls in
    which processes meet: what collectives gave is kept for the replay, which asks no other process.

    With ``device`` nothing is computed and nothing allocated: the step runs on fake tensors, as it would on that
    device, which need not be there. The module and the batch may be on the meta device.

    Args:
        module: Any module. One with a ``training_step`` runs that, with the batch and index 0; from the outputs of any
            other, all that require grad are summed.
        batch: The inputs of ``module.forward``; the batch, for a ``training_step``.
        kwargs: Those that ``module.forward`` gets by keyword.
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
            Off for sharded and tensor-parallel modules: processes that find different things there would not meet.
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
    inputs = inputs_of(module, batch, kwargs)
    is_sharded = bool(sharded_units(module))
    if is_sharded and device is None:
        # Asked before its parameters are whole, and nowhere.
        device = device_of(module, inputs)
    # What one process finds in a cache another may not, and steps in which they meet are run by all or by none.
    cache = PlanCache(False if is_sharded or is_tensor_parallel(module) else plan_cache, _LOG.warning)
    with (
        shown("planning memory", enabled=progress),
        unwrapped(module) as whole,
        _without_gradients(whole) if accumulates is False else nullcontext(),
    ):
        search = _Search(module, whole, inputs, chosen, device, cache)
        if is_sharded:
            return plan_of_first_rank(lambda: search.plan(budget, micro_batches, accumulates=bool(accumulates)))
        return search.plan(budget, micro_batches, accumulates=bool(accumulates))


class _Search:
    """The plan of one module's step.

    Args:
        module: As it was given.
        whole: The same, its parameters no longer in one flat tensor.
        inputs: Of a step.
        planner: Who decides.
        device: What is planned for on fake tensors; ``None`` where steps run, and are timed.
        cache: Of profiles and plans.
    """

    def __init__(
        self,
        module: nn.Module,
        whole: nn.Module,
        inputs: Inputs,
        planner: Planner,
        device: torch.device | str | None,
        cache: PlanCache,
    ) -> None:
        self._module = module
        self._whole = whole
        self._inputs = inputs
        self._planner = planner
        self._device = device
        self._cache = cache

    def plan(
        self, budget: int | float | str | None, micro_batches: MicroBatchNumber, *, accumulates: bool
    ) -> MemoryPlan:
        """The plan within ``budget``; see :func:`search_plan`."""
        profile = self._profile_of(self._inputs, accumulates)
        allowed = bytes_of_budget(budget, profile.peak)
        if micro_batches == 1:
            return self._plan_of(profile, allowed, self._choose(profile))
        return _planned_in_parts(self._inputs, profile, allowed, micro_batches, self._profile_of, self._plan_of)

    def _choose(self, profile: Profile) -> Choose:
        """Who chooses among plans of the whole step."""
        # Only a step that runs here as it is planned can be timed with several plans.
        if self._device is not None:
            return _said_to_be_fastest
        return partial(fastest_plan, profile=profile, module=self._module, run=run_to_loss(self._module, self._inputs))

    def _profile_of(self, inputs: Inputs, accumulates: bool) -> Profile:
        key = self._key_of(inputs, accumulates)
        profile = partial(profile_inputs, self._whole, inputs, device=self._device, accumulates=accumulates)
        return self._cache.profile(key, profile)

    def _key_of(self, inputs: Inputs, accumulates: bool) -> str:
        """The key of a profile in the cache."""
        if not self._cache.is_on:  # a key is a digest of all that the module leads to
            return ""
        others: list[Any] = [str(self._device)]
        # Numbers and texts of a batch are data, and those that a forward gets are settings: which branch to take.
        if not hasattr(self._module, "training_step"):
            others += [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, bool | int | float | str)]
        # A micro-batch finds gradients of earlier ones, and is another step than the first.
        if accumulates or _has_gradients(self._whole):
            others.append("accumulates")
        # Of objects of this package a key tells the class alone.
        data = tuple(inputs)
        return key_of_step(self._module, data, device_of(self._module, inputs), *others)

    def _plan_of(self, profile: Profile, allowed: int | None, choose: Choose = _said_to_be_fastest) -> MemoryPlan:
        plan, found = found_or_planned(self._cache, self._whole, profile, allowed, self._planner, choose=choose)
        if found:
            _LOG.info("dpx: the memory plan was found in the cache, in %s", self._cache.path_of(found))
        return replace(plan, adding_peak=_adding_peak(profile, plan))


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
    inputs: Inputs,
    whole: Profile,
    budget: int | None,
    micro_batches: MicroBatchNumber,
    profile_of: Callable[[Inputs, bool], Profile],
    plan_of: PlanOf,
) -> MemoryPlan:
    """The plan of a step that is cut; see :func:`search_plan`.

    Raises:
        ConfigurationError: the number is to be chosen, and there is nothing to choose it for.
    """
    rows, cut = first_rows(inputs)

    def of_rows(count: int, /, *, accumulates: bool) -> Profile:
        if count == rows:
            return whole
        parts = f"micro_batches={micro_batches!r} cuts {rows} rows into parts of {count} rows, and on those the step"
        with told_as_too_few_rows(parts, FEWER_PARTS):
            return profile_of(cut(count), accumulates)

    if micro_batches != "auto":
        return plan_fixed_micro_batches(micro_batches, rows, of_rows, plan_of, budget)
    if budget is None:
        raise ConfigurationError('micro_batches="auto" needs a budget: the fewest bytes are those of single rows.')
    return plan_in_micro_batches(rows, of_rows, plan_of, budget, whole)[0]


def bytes_of_budget(budget: int | float | str | None, peak: int) -> int | None:
    """Bytes that ``budget`` stands for; a fraction is one of ``peak``.

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


def estimate_cost(
    module: nn.Module,
    plan: MemoryPlan,
    *batch: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """What ``plan`` would do to a step on ``batch``, for example after an edit or for another batch size.

    Args:
        module: What the plan was made for.
        plan: Which.
        batch: As in :func:`search_plan`.
        kwargs: As in :func:`search_plan`.
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
    inputs = inputs_of(module, batch, kwargs)
    if sharded_units(module) and device is None:
        device = device_of(module, inputs)
    with unwrapped(module) as whole:
        plan.check(whole)
        profile = profile_inputs(whole, inputs, device=device)
    result = forecast_plan(profile, plan)
    return {"peak": result.peak, "saved": result.kept, "recompute_share": result.seconds / profile.step_seconds}
