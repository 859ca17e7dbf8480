"""The plan that a strategy was given: it is followed as it is, and nothing is planned beside."""

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.lightning_api import rank_zero_info, rank_zero_warn
from lightning_dpx.memory import MemoryPlan, apply_plan, summary
from lightning_dpx.replicas import ReplicaSet


def load_given(plan: MemoryPlan | str | None) -> MemoryPlan | None:
    """The plan, which may be in a file.

    Raises:
        ConfigurationError: it is neither a plan nor a path.
        PlanError: the file holds none.
    """
    if isinstance(plan, str):
        return MemoryPlan.load(plan)
    if plan is not None and not isinstance(plan, MemoryPlan):
        raise ConfigurationError(f"plan={plan!r} is not allowed; give a MemoryPlan or the path of a saved one.")
    return plan


def follow_given(plan: MemoryPlan, replicas: ReplicaSet) -> None:
    """Puts ``plan`` on every replica, and warns if steps are cut into other micro-batches than it is for."""
    for replica in replicas.replicas:
        apply_plan(replica.module, plan)
    rank_zero_info(f"dpx: follows the given plan; {summary(plan)}")
    numbers = replicas.partition.numbers(training=True)
    if replicas.root.module.automatic_optimization and set(numbers) != {plan.micro_batches}:
        rank_zero_warn(
            f"dpx: the given plan is for {plan.micro_batches} micro-batches of every slice, and "
            f"{list(numbers)} are made of those of the devices: its peak and time are not those of this run. Leave "
            "out micro_batches to have as many as the plan is for."
        )
