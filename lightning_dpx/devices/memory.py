"""What a device holds, and how much more it can."""

import ctypes
import gc
import os
import sys
from typing import NamedTuple

import torch

from lightning_dpx.devices.identity import is_host
from lightning_dpx.devices.memory_groups import group_memory
from lightning_dpx.torch_compat import pynvml_handler


def keeps_statistics(device: torch.device) -> bool:
    """Whether an accelerator's allocator tells its peaks, and the driver what is free.

    That of Apple's GPUs (``mps``) only tells what is there now, and how much this process should not go beyond.
    """
    return hasattr(torch.get_device_module(device), "mem_get_info")


def free_bytes(device: torch.device) -> int:
    """What can still be allocated on ``device``, cached blocks included."""
    if is_host(device):
        return _available_bytes()
    module = torch.get_device_module(device)
    if not keeps_statistics(device):
        # Beyond that the system takes memory from others, or refuses.
        return int(module.recommended_max_memory() - module.current_allocated_memory())
    free, total = module.mem_get_info(device)
    # The driver counts what PyTorch's allocator keeps for later as taken, and to us it is free.
    allocated = module.memory_allocated(device)
    cached = module.memory_reserved(device) - allocated
    return int(max(0, min(free + max(0, cached), _allowed(device, total) - allocated)))


def _allowed(device: torch.device, total: int) -> int:
    """Bytes of ``total`` for this process: ``torch.cuda.set_per_process_memory_fraction`` may leave it a part only."""
    # Accelerators beside CUDA and, lately, XPU have none.
    fraction = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    if fraction is None:
        return total
    # Without a limit the allocator "cudaMallocAsync" tells 2**64 bytes over what the device has.
    return min(total, int(fraction(device) * total))


class Capacity(NamedTuple):
    """Bytes of a device.

    Attributes:
        reserved: By this process's allocator.
        total: The capacity; 0 where there is no limit.
        others: Held by other processes.
    """

    reserved: int
    total: int
    others: int


NO_LIMIT = 2**62  # bytes; simulated devices without a capacity say more
_host_peak = 0
_seen_peaks = dict[torch.device, int]()  # of accelerators without statistics


def allocated_and_peak(device: torch.device) -> tuple[int, int]:
    """Bytes of this process's tensors on ``device``, and the most since the last :func:`reset_peak_memory`.

    On the host, the resident memory of the process, and the most that any call has seen; the latter also where an
    accelerator keeps no statistics.
    """
    global _host_peak
    if is_host(device):
        # The system's own peak is that of the whole process, from its start on.
        resident = _resident_bytes()
        _host_peak = max(_host_peak, resident)
        return resident, _host_peak
    module = torch.get_device_module(device)
    if not keeps_statistics(device):
        # Whoever asks at the right moments, as monitors do at the end of each phase, sees most of it.
        now = int(module.current_allocated_memory())
        _seen_peaks[device] = max(now, _seen_peaks.get(device, 0))
        return now, _seen_peaks[device]
    # A profile asks around every operator. Each function for one figure flattens and sorts all 100 of them.
    if hasattr(module, "memory_stats_as_nested_dict"):
        statistics = module.memory_stats_as_nested_dict(device)
        # Before its first tensor a device has none.
        if not statistics:
            return 0, 0
        of_tensors = statistics["allocated_bytes"]["all"]
        return int(of_tensors["current"]), int(of_tensors["peak"])
    return int(module.memory_allocated(device)), int(module.max_memory_allocated(device))


def capacity_of(device: torch.device) -> Capacity:
    """What ``device`` has, and who holds it."""
    if is_host(device):
        total = os.sysconf("SC_PHYS_PAGES") * _PAGE
        group = group_memory()
        # In a container or a job of a scheduler the rest of the machine is none of ours.
        if group is not None:
            total = min(total, group.limit)
        resident = _resident_bytes()
        return Capacity(resident, total, max(0, total - free_bytes(device) - resident))
    module = torch.get_device_module(device)
    if not keeps_statistics(device):
        return Capacity(int(module.driver_allocated_memory()), int(module.recommended_max_memory()), 0)
    free, total = (int(size) for size in module.mem_get_info(device))
    reserved = int(module.memory_reserved(device))
    # A simulated device without a capacity.
    if total > NO_LIMIT:
        return Capacity(reserved, 0, 0)
    listed = _listed_for_others(device) if device.type == "cuda" else None
    others = max(0, total - free - reserved) if listed is None else listed
    return Capacity(reserved, _allowed(device, total), others)


def _listed_for_others(device: torch.device) -> int | None:
    """What the driver lists for other processes, where nvidia-ml-py is installed: without this process's own context.

    ``None`` where that cannot be told: in a container the driver's process numbers are not ours.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml_handler(device))
    except (pynvml.NVMLError, RuntimeError):
        return None
    # This process uses the device, so a list without it has the numbers of another name space.
    if all(process.pid != os.getpid() for process in processes):
        return None
    return sum(process.usedGpuMemory or 0 for process in processes if process.pid != os.getpid())


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _available_bytes() -> int:
    """Of the host: free pages, and those of files that Linux gives up on demand; no more than its group may use."""
    group = group_memory()
    if group is None:
        return _available_on_host()
    return min(group.free, _available_on_host())


def _available_on_host() -> int:
    if not os.path.exists("/proc/meminfo"):
        return os.sysconf("SC_AVPHYS_PAGES") * _PAGE
    with open("/proc/meminfo", encoding="ascii") as file:
        # Not the pages that are free, of which a host that reads many files has hardly any.
        sizes = dict(line.split(":", 1) for line in file)
    return int(sizes["MemAvailable"].split()[0]) * 1024


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) * _PAGE
    except FileNotFoundError:  # not Linux: the most so far is all there is
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform == "darwin":
            return peak
        return peak * 1024


def reset_peak_memory(device: torch.device) -> None:
    """The peak of ``device`` begins anew at what is allocated now."""
    global _host_peak
    if is_host(device):
        _host_peak = 0
    elif not keeps_statistics(device):
        _seen_peaks.pop(device, None)
    else:
        torch.get_device_module(device).reset_peak_memory_stats(device)


def free_garbage() -> None:
    """Frees what objects hold that only refer to each other, and gives the host's part of it back to the system.

    Its allocator keeps what was freed in pieces that larger tensors cannot use: 380 of 450 MiB after a profile on a
    quarter of the rows. Those of accelerators give theirs back by themselves before they are out of memory.
    """
    gc.collect()
    if sys.platform == "linux":
        # Only glibc has it.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
