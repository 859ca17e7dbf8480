"""Modules that ``fully_shard`` has spread over processes: planned as what they were before, followed within a unit.

A unit is what ``fully_shard`` was called on. Its parameters are whole only while its forward or its backward runs, and
from then until that begins they are gone:

    forward    [unit 0 whole] [unit 1 whole] ...             parameters are gathered, used, and freed
    backward   ... [unit 1 whole] [unit 0 whole]             and gathered once more before the unit's backward

So what is recomputed uses parameters of the unit that saves it alone, or of the outermost one, which is whole all the
time; and a call is replayed as a whole if it lies within a unit. Then no collective comes or goes, and all processes
have theirs in the same order as without a plan. ``FullyShardedDataParallel`` (FSDP1) gathers and frees in the same
moments; its wrappers are off while a step is planned, see :mod:`lightning_dpx.memory.execute.flat_units`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_dpx.errors import BudgetError, PlanError
from lightning_dpx.memory.execute.flat_units import is_flat_unit, refill
from lightning_dpx.memory.execute.flat_units import unwrapped as unwrapped
from lightning_dpx.memory.execute.module_anatomy import is_sharding_hook
from lightning_dpx.memory.execute.sharded_units import inner_units
from lightning_dpx.memory.execute.sharded_units import sharded_units as sharded_units
from lightning_dpx.memory.execute.unit_casts import UnitCasts, is_cast
from lightning_dpx.memory.execute.unit_casts import as_taken_by as as_taken_by
from lightning_dpx.memory.profile.abstract import first_rows, profile_absent, reason_of, target_of
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.fake import NO_ANSWER, fake_device_for
from lightning_dpx.memory.profile.profiled_step import Run
from lightning_dpx.memory.tracing.communication import has_other_processes
from lightning_dpx.torch_compat import (
    apply_to_tensors,
    forward_hooks_of,
    forward_pre_hooks_of,
    gathered_parameters,
    on_distributed_tensors,
    parameters_of,
    precision_policy_of,
)

_T = TypeVar("_T")


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """A context in which ``module`` is as before ``fully_shard``, with whole meta parameters.

    They are in the dtype that their unit computes in, which casts its inputs and outputs as it does otherwise.
    Tensor-parallel ones are the part of this process.
    """
    with ExitStack() as stack:
        whole = gathered_parameters(module)  # tied ones stay tied
        for child in module.modules():
            _replace_hooks(child, stack)
            if "_apply" not in vars(child):  # that of a unit goes on to the sharded parameters
                vars(child)["_apply"] = partial(apply_to_tensors, child)
                stack.callback(vars(child).pop, "_apply", None)
            parameters = parameters_of(child)
            stack.callback(refill, parameters, dict(parameters))
            for name, parameter in parameters.items():
                parameters[name] = whole.get(id(parameter), parameter)
        yield


def _replace_hooks(child: nn.Module, stack: ExitStack) -> None:
    """Takes away what gathers parameters from other processes, for on fakes there is nothing to gather."""
    policy = precision_policy_of(child)
    casts = UnitCasts(None, None)
    if policy is not None:
        casts = UnitCasts(policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype)
    before = forward_pre_hooks_of(child)
    after = forward_hooks_of(child)
    for hooks in (before, after):
        # Before anything is changed: what fails half-way is put back as well.
        stack.callback(refill, hooks, OrderedDict(hooks))
        for key, hook in list(hooks.items()):
            if not is_sharding_hook(hook) or is_cast(hook):
                continue
            if not casts.needed:
                del hooks[key]
                continue
            # In its place, as others see what has been cast, or what is yet to be.
            hooks[key] = casts.before if hooks is before else casts.after


def profile_unsharded(
    module: nn.Module,
    batch: Any,
    device: torch.device | str,
    step: Callable[[Any], Run],
    *,
    accumulates: bool = False,
) -> Profile:
    """A step of a sharded module on ``device``, on fake tensors; see :func:`profile_absent`, which has the arguments.

    Raises:
        PlanError: the step leads to no backward, or fakes cannot run it.
    """
    target = target_of(device)
    try:
        with unsharded(module):
            profile = profile_absent(
                module,
                batch,
                target,
                step,
                here=fake_device_for(target),
                few=lambda: first_rows(batch),
                accumulates=accumulates,
            )
            return replace(profile, units=inner_units(module))
    except PlanError as error:
        way_out = "a plan that was made before fully_shard can be applied afterwards"
        if any(is_flat_unit(child) for child in module.modules()):
            way_out = "with fully_shard, one that was made before could be applied afterwards"
        cause = error.__cause__
        if isinstance(cause, NO_ANSWER):
            # The error speaks of a module without numbers, and the user's has some.
            raise PlanError(
                f"A sharded module is planned on fake tensors, as no process has all of it, and they cannot run this "
                f"step ({reason_of(cause)}). Take what needs numbers out of the step, such as .item(), float() and "
                f"branches on tensors (what is logged can stay a tensor); or {way_out}."
            ) from error
        raise PlanError(f"{error} A sharded module is planned on fake tensors; {way_out}.") from error


def is_tensor_parallel(module: nn.Module) -> bool:
    """Whether this process has a part of some parameter (DTensor), and the other parts are elsewhere."""
    return on_distributed_tensors(map(type, module.parameters()))


def plan_of_first_rank(make: Callable[[], _T]) -> _T:
    """What ``make`` gives in the first process of the default group, in all of them; without processes, here.

    Raises:
        BudgetError: no plan meets the budget there.
        PlanError: it has failed there for another reason.
    """
    return made_by_rank(0, make)


def made_by_rank(rank: int, make: Callable[[], _T]) -> _T:
    """What the process ``rank`` has made, on all processes."""
    if not has_other_processes():
        return make()
    who = "The first process" if rank == 0 else f"Process {rank}"
    # What is made is for all, and the others wait until that process sends it: so whatever
    # happens there, it sends something.
    if dist.get_rank() != rank:
        received: list[Any] = [None, None]
        dist.broadcast_object_list(received, src=rank)
        if received[0] is None:
            raise received[1].error()
        found: _T = received[0]
        return found
    made: list[Any] = [None, _Refusal(f"{who} was interrupted while it planned.")]
    try:
        made[0] = make()
        return made[0]  # type: ignore[no-any-return]
    except Exception as error:
        made[1] = _Refusal.of(error, who)
        raise
    finally:
        dist.broadcast_object_list(made, src=rank)


def told_by_all_ranks(own: _T) -> list[_T]:
    """``own`` of every process of the default group, by rank; without processes, that of this one."""
    if not has_other_processes():
        return [own]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why the process that plans has no plan, as it travels to the others: errors with arguments of their own do not.

    Attributes:
        message: What theirs says.
        budget: Whether no plan meets the budget. What retries with fewer rows then has to do so everywhere.
        smallest: The bytes that could be met.
        device_index: On which of several devices.
    """

    message: str
    budget: bool = False
    smallest: int | None = None
    device_index: int = 0

    @classmethod
    def of(cls, error: Exception, who: str) -> "_Refusal":
        """That of ``error``, which ended the planning of ``who``."""
        message = f"{who} found no plan: {error}"
        if isinstance(error, BudgetError):
            return cls(message, budget=True, smallest=error.smallest, device_index=error.device_index)
        return cls(message)

    def error(self) -> PlanError:
        """What the other processes raise."""
        if self.budget:
            return BudgetError(self.message, self.smallest, self.device_index)
        return PlanError(self.message)
