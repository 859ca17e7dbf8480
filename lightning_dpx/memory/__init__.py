"""Memory planning: which activations are kept, and which are computed again in backward.

profile/        a step, watched: bytes, lifetimes, and the time of every operator behind a saved tensor; costs.py runs
                things to find out, and fake.py takes fake tensors and times from FLOPs and bytes (roofline.py)
    abstract    the same for a device, or of a size, that is not there: on fake tensors, or else on few rows
plan/           profile x budget -> what to drop, by one of planners/: threshold | search | optimal | milp, or the best
    forecast    profile x choice -> peak and extra time, exactly as the run will have them
    offload     which values would come back from the host instead of being computed again
    plan        the choice as a file
joint           one plan for a step that runs on several devices
shapes          one plan for steps of several shapes
micro_batch_planning  one plan for a step that is cut into parts of its rows
execute/        the plan on a module: saved_tensor_hooks on what the graph knows (values), how operators are repeated
                (recipes/), on what, where autograd does not know it (untracked_inputs), and copies (offload)
module_step     the step of a module as it is written, and its profile
plan_search     all of it in one call: search_plan
apply           a plan put on a module, and taken off: apply_plan
"""

from lightning_dpx.memory.apply import AppliedPlan, applied_plan, apply_plan, planned, remove_plan
from lightning_dpx.memory.execute.recipes import register_recipe
from lightning_dpx.memory.joint import plan_devices
from lightning_dpx.memory.micro_batch_planning import plan_in_micro_batches
from lightning_dpx.memory.module_step import profile_module, sum_of
from lightning_dpx.memory.plan.choice import Choice
from lightning_dpx.memory.plan.forecast_of_plan import forecast_plan, timeline_of
from lightning_dpx.memory.plan.make_plan import make_planner, plan_profile
from lightning_dpx.memory.plan.micro_batch_candidates import BesideActivations, MicroBatchChoice, in_micro_batches
from lightning_dpx.memory.plan.plan import Decision, MemoryPlan, describe_cut, format_plan, summary
from lightning_dpx.memory.plan.planners.threshold import ThresholdPlanner
from lightning_dpx.memory.plan.problem import PLANNERS, Planner, Problem, register_planner
from lightning_dpx.memory.plan_search import bytes_of_budget, estimate_cost, search_plan
from lightning_dpx.memory.profile.abstract import profile_absent
from lightning_dpx.memory.profile.data import Profile
from lightning_dpx.memory.profile.profiler import profile_step
from lightning_dpx.memory.profile.scaling import extrapolate, scaled
from lightning_dpx.memory.shapes import SharedPlan, complete_plan, plan_shapes
from lightning_dpx.memory.sharding import (
    as_taken_by,
    made_by_rank,
    plan_of_first_rank,
    profile_unsharded,
    sharded_units,
    told_by_all_ranks,
    unwrapped,
)
from lightning_dpx.memory.tracing.allocator_account import HostAccount
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace

__all__ = [
    "as_taken_by",
    "AppliedPlan",
    "Choice",
    "HostAccount",
    "MemoryPlan",
    "Decision",
    "MemoryTrace",
    "PLANNERS",
    "Planner",
    "Problem",
    "Profile",
    "SharedPlan",
    "ThresholdPlanner",
    "applied_plan",
    "apply_plan",
    "bytes_of_budget",
    "complete_plan",
    "describe_cut",
    "estimate_cost",
    "extrapolate",
    "forecast_plan",
    "format_plan",
    "make_planner",
    "plan_devices",
    "BesideActivations",
    "MicroBatchChoice",
    "in_micro_batches",
    "made_by_rank",
    "plan_in_micro_batches",
    "plan_of_first_rank",
    "plan_profile",
    "plan_shapes",
    "planned",
    "profile_absent",
    "profile_module",
    "profile_step",
    "profile_unsharded",
    "register_planner",
    "register_recipe",
    "remove_plan",
    "scaled",
    "search_plan",
    "sharded_units",
    "sum_of",
    "summary",
    "timeline_of",
    "told_by_all_ranks",
    "unwrapped",
]
