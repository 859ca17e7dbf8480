"""The Lightning face: the only part of the package that imports lightning and torchmetrics."""

from lightning_dpx.lightning.accelerator import SimAccelerator
from lightning_dpx.lightning.memory.activation_planner import ActivationPlanner
from lightning_dpx.lightning.memory.device_memory import DeviceMemory
from lightning_dpx.lightning.memory.dry_run.device_forecast import DeviceForecast
from lightning_dpx.lightning.memory.dry_run.dry_run import DryRun, dry_run
from lightning_dpx.lightning.memory.dry_run.settings import Settings, with_merged_replicas
from lightning_dpx.lightning.monitors.memory import DeviceMemoryMonitor
from lightning_dpx.lightning.monitors.profiler import DPXProfiler
from lightning_dpx.lightning.monitors.throughput import DeviceThroughputMonitor, ReplicaWork
from lightning_dpx.lightning.precision import DPXPrecision
from lightning_dpx.lightning.strategy import DPXStrategy
from lightning_dpx.lightning.tuning import BatchSizeForecast, Tuning, tune

__all__ = [
    "ActivationPlanner",
    "BatchSizeForecast",
    "DPXPrecision",
    "DPXProfiler",
    "DPXStrategy",
    "DeviceForecast",
    "DeviceMemory",
    "DeviceMemoryMonitor",
    "DeviceThroughputMonitor",
    "DryRun",
    "ReplicaWork",
    "Settings",
    "SimAccelerator",
    "Tuning",
    "dry_run",
    "tune",
    "with_merged_replicas",
]
