"""Data parallel training of one LightningModule on all devices of a machine, from one process.

Importing the package registers the strategy ``"dpx"``, one alias per reducer (``"dpx_naive"``, ...) and the
accelerator ``"sim"``.
"""

import sys

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

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
)
from lightning_dpx.memory import (
    MemoryPlan,
    apply_plan,
    estimate_cost,
    register_planner,
    remove_plan,
    search_plan,
)
from lightning_dpx.monitor import TensorMonitor
from lightning_dpx.reducers import GradientPacker, GradientReducer, least_loaded_placement, register_reducer
from lightning_dpx.replicas import Slicer, register_slicer
from lightning_dpx.shifting import offload_activations, shift_activations, unoffload_activations, unshift_activations
from lightning_dpx.simulate import simulate

__version__ = "0.1.0"

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
    "UnsupportedError",
    "apply_plan",
    "estimate_cost",
    "least_loaded_placement",
    "offload_activations",
    "register_planner",
    "register_reducer",
    "register_slicer",
    "remove_plan",
    "search_plan",
    "shift_activations",
    "simulate",
    "trace_activations",
    "unoffload_activations",
    "unshift_activations",
]

DPXStrategy.register_strategies(StrategyRegistry)
SimAccelerator.register_accelerators(AcceleratorRegistry)


def _refuse_other_namespace(*_: object, **__: object) -> object:
    raise ConfigurationError(
        'strategy="dpx" belongs to the package `lightning`, but this Trainer comes from `pytorch_lightning`; '
        "write `import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`."
    )


if "pytorch_lightning" in sys.modules:
    from pytorch_lightning.strategies import StrategyRegistry as _OtherRegistry

    if "dpx" not in _OtherRegistry:
        _OtherRegistry.register("dpx", _refuse_other_namespace, description="import lightning, not pytorch_lightning")
