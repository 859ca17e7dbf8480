"""From a plan to the hooks that follow it."""

from torch import nn

from lightning_dpx.memory.execute.module_calls import CallNames, opened_by
from lightning_dpx.memory.execute.routine_hooks import RoutineHooks
from lightning_dpx.memory.execute.saved_tensor_hooks import Rematerialization, ValueActions
from lightning_dpx.memory.execute.similar_values import KnownDecision, Room, SimilarValues
from lightning_dpx.memory.plan.plan import MemoryPlan

_WATCHED = 8  # steps


def decided_by(plan: MemoryPlan) -> dict[str, KnownDecision]:
    """What ``plan`` says of values, by name."""
    again = plan.names("recompute", "recompute each time")
    decided = dict[str, KnownDecision]()
    for decision in plan.decisions:
        decided[decision.name] = KnownDecision(decision.operator, decision.num_bytes, decision.name in again)
    return decided


def hooks_for_values(module: nn.Module, plan: MemoryPlan, *, watches: bool, told: str = "") -> Rematerialization:
    """What drops values of ``module`` as ``plan`` says; with compiled parts call by call for good.

    Args:
        module: What the plan was made for.
        plan: Which.
        watches: Whether the first steps are followed tensor by tensor, to tell of values that no plan knows.
        told: The warning where a compiler that has to make one graph leaves the hooks out; empty where it must not.
    """
    known = [decision.name for decision in plan.decisions]
    names = CallNames(module, again=plan.calls, opened=opened_by(known, module), told=told)
    dropped = plan.names("recompute", "recompute each time")
    uncached = plan.uncached
    similar: SimilarValues | None = None
    # What is saved in compiled code, and of sharded parameters, is not named by a plan.
    if not names.runs_code and not plan.units and not names.is_distributed:
        # Who watches plans anew for larger batches.
        similar = SimilarValues(
            module, decided_by(plan), Room(plan.budget, plan.peak, plan.saved_bytes or 0), grows=not watches
        )
    actions = ValueActions(
        dropped=dropped,
        # In the order of the plan, which has inputs first: whether such a value is nested depends
        # on what its inputs are.
        uncached=[decision.name for decision in plan.decisions if decision.name in uncached],
        compressed=plan.names("compress", "compress each time"),
        offloaded=plan.names("offload"),
        prefetch_depth=plan.prefetch_depth,
        known=frozenset(decision.name for decision in plan.decisions) if watches else frozenset(),
        sizes={decision.name: decision.num_bytes for decision in plan.decisions} if watches else {},
    )
    # A routine switches hooks on and off at modules, and there are none inside of code.
    if names.runs_code:
        return Rematerialization(names, actions, similar)
    trusted = {decision.operator for decision in plan.decisions if decision.name in dropped}
    return RoutineHooks(names, trusted, actions, similar, watched=_WATCHED if watches else 1)
