"""The Lightning face: the only part of the package that imports lightning and torchmetrics."""

from lightning_dpx.trainer.accelerator import SimAccelerator
from lightning_dpx.trainer.activation_planner import ActivationPlanner
from lightning_dpx.trainer.device_memory import DeviceMemory
from lightning_dpx.trainer.dry_run import DeviceForecast, DryRun, Settings, dry_run
from lightning_dpx.trainer.memory_monitor import DeviceMemoryMonitor
from lightning_dpx.trainer.precision import DPXPrecision
from lightning_dpx.trainer.profiler import DPXProfiler
from lightning_dpx.trainer.strategy import DPXStrategy
from lightning_dpx.trainer.throughput_monitor import DeviceThroughputMonitor, ReplicaWork

__all__ = [
    "ActivationPlanner",
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
    "dry_run",
]
