"""Data parallel training of one LightningModule on all devices of a machine, from one process.

Importing the package registers the strategy ``"dpx"``, one alias per reducer (``"dpx_naive"``, ...) and the
accelerator ``"sim"``, in ``lightning`` or in ``pytorch_lightning``, whichever is loaded; see
:mod:`lightning_dpx.lightning.lightning_api`.
"""

# ruff: noqa: E402  what follows takes seconds, in which a program may be ended
from lightning_dpx.command_start import tell_in_one_line

tell_in_one_line()

from pkgutil import iter_modules

from lightning_dpx.activations import Activation, trace_activations
from lightning_dpx.errors import (
    BudgetError,
    CollectiveError,
    ConfigurationError,
    DPXError,
    GatherError,
    ParityError,
    PlanError,
    ReplicationError,
    SliceError,
    UnsupportedError,
)
from lightning_dpx.group import ReplicaGroup
from lightning_dpx.lightning import (
    ActivationPlanner,
    DeviceMemoryMonitor,
    DeviceThroughputMonitor,
    DPXPrecision,
    DPXProfiler,
    DPXStrategy,
    SimAccelerator,
    Tuning,
    tune,
)
from lightning_dpx.lightning.fabric import refuse_fabric
from lightning_dpx.lightning.lightning_api import AcceleratorRegistry, StrategyRegistry
from lightning_dpx.lightning.other_package import refuse_other_package
from lightning_dpx.memory import (
    MemoryPlan,
    apply_plan,
    estimate_cost,
    register_planner,
    register_recipe,
    remove_plan,
    search_plan,
)
from lightning_dpx.monitor import TensorMonitor
from lightning_dpx.reducers import GradientPacker, GradientReducer, least_loaded_placement, register_reducer
from lightning_dpx.replicas import Slicer, register_slicer
from lightning_dpx.shifting import offload_activations, shift_activations, unoffload_activations, unshift_activations
from lightning_dpx.simulate import simulate
from lightning_dpx.torch_compat import never_compile

__version__ = "0.2.0"

__all__ = [
    "Activation",
    "ActivationPlanner",
    "BudgetError",
    "CollectiveError",
    "ConfigurationError",
    "DPXError",
    "DPXPrecision",
    "DPXProfiler",
    "DPXStrategy",
    "DeviceMemoryMonitor",
    "DeviceThroughputMonitor",
    "GatherError",
    "GradientPacker",
    "GradientReducer",
    "MemoryPlan",
    "ParityError",
    "PlanError",
    "ReplicaGroup",
    "ReplicationError",
    "SliceError",
    "Slicer",
    "TensorMonitor",
    "Tuning",
    "UnsupportedError",
    "apply_plan",
    "estimate_cost",
    "least_loaded_placement",
    "offload_activations",
    "register_planner",
    "register_recipe",
    "register_reducer",
    "register_slicer",
    "remove_plan",
    "search_plan",
    "shift_activations",
    "simulate",
    "trace_activations",
    "tune",
    "unoffload_activations",
    "unshift_activations",
]

# Lightning has no entry point for strategies, so importing the package has to be
# enough for `Trainer(strategy="dpx")`.
DPXStrategy.register_strategies(StrategyRegistry)
SimAccelerator.register_accelerators(AcceleratorRegistry)
refuse_other_package()
refuse_fabric()
# Compiled code calls what watches a step (hooks of saved tensors, dispatch modes), which the compiler would trace,
# with other results. The models of bench are there to be compiled, and some hooks decide by what compiles them.
_COMPILED = ("bench", "traced_hooks")
never_compile(f"{__name__}.{part.name}" for part in iter_modules(__path__) if part.name not in _COMPILED)
