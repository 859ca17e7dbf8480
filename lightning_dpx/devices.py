"""What differs between device types. No other file asks a device for its type."""

import os
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.torch_compat import DisableFuncTorch, privateuse1_backend_name, pynvml_handler


def canonical_device(device: torch.device | str) -> torch.device:
    """The physical device behind ``device``: an index for every accelerator, none for the host.

    ``cpu:0`` and ``cpu:3`` are the same memory, so both become ``cpu``.

    Raises:
        ConfigurationError: there is no device of this type.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None:
        try:
            return torch.device(device.type, torch.get_device_module(device).current_device())
        except (AttributeError, RuntimeError, AssertionError) as error:
            raise ConfigurationError(f"The device {str(device)!r} is not there: {error}") from error
    return device


def is_host(device: torch.device) -> bool:
    """Whether ``device`` is the CPU, which has one memory and one random generator for all its replicas."""
    return device.type == "cpu"


def distinct_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    """The physical devices among ``devices``, each once, in order of first appearance."""
    return list(dict.fromkeys(canonical_device(device) for device in devices))


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` current for the calling thread; nothing to do on the host."""
    if is_host(device):
        return nullcontext()
    context: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return context


def autocast_types() -> tuple[str, ...]:
    """Device types whose autocast state a thread may carry."""
    return ("cpu", "cuda", privateuse1_backend_name())


def has_nccl(devices: Sequence[torch.device]) -> bool:
    """Whether NCCL can work between these devices from one process."""
    return all(device.type == "cuda" for device in devices) and torch.distributed.is_nccl_available()


def wire_device(device: torch.device) -> torch.device:
    """Where torch.distributed can send a tensor of ``device`` from: the device itself, or the host."""
    return device if device.type == "cuda" else torch.device("cpu")


def default_backend(device: torch.device) -> str:
    """The backend of torch.distributed for processes whose first device this is."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done what was queued; the host always has."""
    if not is_host(device):
        torch.get_device_module(device).synchronize(device)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``, without waiting where that is safe: the host would read before the copy has arrived."""
    return tensor.to(device, non_blocking=not is_host(device))


@cache
def _fetch_stream(device: torch.device) -> torch.cuda.Stream:
    """Where a CUDA device fetches, beside what it computes."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _rest_stream(device: torch.device) -> torch.cuda.Stream:
    """Where a CUDA device sends away what rests, beside what it computes and fetches."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Arriving(NamedTuple):
    tensor: torch.Tensor
    there: torch.cuda.Event  # when it has arrived
    owner: torch.cuda.Stream  # of its memory


class OffloadedTensor:
    """The values of a tensor, on another device until they are fetched; what CUDA leaves on the host is pinned.

    On CUDA they go there beside what the device computes; the tensor itself stays until :meth:`leave`.

    Args:
        tensor: Where it is now is where it comes back to. Nobody may write into it before :meth:`leave`.
        place: Where it rests.
    """

    def __init__(self, tensor: torch.Tensor, place: torch.device) -> None:
        self._device = tensor.device
        self._arriving: _Arriving | torch.Tensor | None = None
        self._leaving: torch.Tensor | None = tensor
        self._rested: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._values = moved(tensor, place)
            return
        self._sender, side = torch.cuda.current_stream(tensor.device), _rest_stream(tensor.device)
        side.wait_stream(self._sender)
        with torch.cuda.stream(side):
            if is_host(place):
                pinned = torch.empty_like(tensor, device=place, pin_memory=True)
                self._values = pinned.copy_(tensor, non_blocking=True)
            else:
                self._values = moved(tensor, place)
            self._rested = side.record_event()

    def leave(self) -> None:
        """Gives the tensor's memory free: what the device computes from now on waits until the values are gone."""
        if self._leaving is not None and self._rested is not None:
            self._sender.wait_event(self._rested)
        self._leaving = None

    def start(self) -> None:
        """Begins to fetch; on CUDA the device goes on computing meanwhile."""
        if self._arriving is not None:
            return
        if self._rested is None:
            self._arriving = moved(self._values, self._device)
            return
        owner, side = torch.cuda.current_stream(self._device), _fetch_stream(self._device)
        tensor = torch.empty_like(self._values, device=self._device)
        side.wait_stream(owner)  # kernels that are queued there may still read what this memory held before
        side.wait_event(self._rested)
        with torch.cuda.stream(side):
            tensor.copy_(self._values, non_blocking=True)
            self._arriving = _Arriving(tensor, side.record_event(), owner)

    def take(self) -> torch.Tensor:
        """The tensor where it was, for the stream that is current there; fetched once until :meth:`drop`."""
        self.start()
        if not isinstance(self._arriving, _Arriving):
            assert self._arriving is not None, "started"
            return self._arriving
        tensor, there, owner = self._arriving
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(there)
        if stream != owner:
            tensor.record_stream(stream)
        return tensor

    def drop(self) -> None:
        """Forgets what was fetched; the values still rest."""
        if isinstance(self._arriving, _Arriving):
            self._arriving.owner.wait_event(self._arriving.there)  # or the next owner of the memory writes too early
        self._arriving = None

    def __del__(self) -> None:
        self.leave()
        self.drop()


def linked_groups(devices: Sequence[torch.device]) -> list[list[int]]:
    """Indices of devices that reach each other directly, in groups; two halves where nothing is known of the links."""
    if any(device.type != "cuda" for device in devices):
        half = (len(devices) + 1) // 2
        return [list(range(half)), list(range(half, len(devices)))] if len(devices) > 3 else [[*range(len(devices))]]
    groups: list[list[int]] = []
    for index, device in enumerate(devices):
        for group in groups:
            if all(torch.cuda.can_device_access_peer(device, devices[other]) for other in group):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def accelerators() -> list[torch.device]:
    """All accelerators of this process, of the kind that torch was built or simulated for."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.get_device_module(kind).device_count())]


def num_direct_links(devices: Sequence[torch.device]) -> int:
    """Pairs of devices that copy to each other without a detour through the host."""
    pairs = [(a, b) for index, a in enumerate(devices) for b in devices[index + 1 :]]
    return sum(a.type == "cuda" and torch.cuda.can_device_access_peer(a, b) for a, b in pairs)


def num_usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_random_state() -> torch.Tensor:
    """A snapshot of the process-wide CPU generator, to notice that somebody drew from it."""
    return torch.get_rng_state()


class RandomStates:
    """The generators of the host and of ``devices``, as they are now."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._host = torch.get_rng_state()
        others = [device for device in distinct_devices(list(devices)) if not is_host(device) and device.type != "meta"]
        self._states = [(device, torch.get_device_module(device).get_rng_state(device)) for device in others]

    def again(self) -> "RandomStates":
        """Where the same generators are now."""
        return RandomStates([torch.device("cpu"), *(device for device, _ in self._states)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomStates):
            return NotImplemented
        return all(map(torch.equal, self._all(), other._all()))

    __hash__ = None  # type: ignore[assignment]

    def _all(self) -> list[torch.Tensor]:
        return [self._host, *(state for _, state in self._states)]

    @property
    def nbytes(self) -> int:
        """What the states take."""
        return sum(state.nbytes for state in self._all())

    def digest(self) -> int:
        """Tells states apart, and takes no memory."""
        with DisableFuncTorch():  # transforms that are under way would take them for theirs
            return hash(tuple(state.numpy().tobytes() for state in self._all()))

    def restore(self) -> None:
        """They continue as if nothing had been drawn since."""
        torch.set_rng_state(self._host)
        for device, state in self._states:
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def preserve_device_rng(devices: Iterable[torch.device]) -> Iterator[None]:
    """The generators of the host and of ``devices`` continue afterwards as if nothing had been drawn."""
    states = RandomStates(devices)
    try:
        yield
    finally:
        states.restore()


@contextmanager
def preserve_all_device_rng(devices: Iterable[torch.device]) -> Iterator[None]:
    """Like :func:`preserve_device_rng`, and so do Python's and NumPy's generators of the process."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with preserve_device_rng(devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class Stopwatch:
    """How long a device works on what is queued between :meth:`start` and :meth:`stop`, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def start(self) -> None:
        """From here on."""
        if is_host(self._device):
            self._marks.append(time.perf_counter())
        else:
            module = torch.get_device_module(self._device)
            event = module.Event(enable_timing=True)
            event.record(module.current_stream(self._device))
            self._marks.append(event)

    stop = start

    @property
    def done(self) -> bool:
        """Whether the device has passed both marks, or the work never ended."""
        return len(self._marks) < 2 or is_host(self._device) or bool(self._marks[1].query())

    def seconds(self) -> float:
        """Zero if the work never ended."""
        if len(self._marks) < 2:
            return 0.0
        if is_host(self._device):
            return float(self._marks[1] - self._marks[0])
        return float(self._marks[0].elapsed_time(self._marks[1])) / 1e3


def spare_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    """Accelerators of the same type as ``devices`` that are not among them."""
    kind = devices[0].type
    if is_host(devices[0]):
        return []
    everyone = [torch.device(kind, index) for index in range(torch.get_device_module(kind).device_count())]
    return [device for device in everyone if device not in devices]


def free_bytes(device: torch.device) -> int:
    """What can still be allocated on ``device``, cached blocks included."""
    if is_host(device):
        return _available_bytes()
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(free + max(0, cached))


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


def allocated_and_peak(device: torch.device) -> tuple[int, int]:
    """Bytes of this process's tensors on ``device``, and the most since the last :func:`reset_peak_memory`.

    On the host, the resident memory of the process, and the most that anyone asked for.
    """
    global _host_peak
    if is_host(device):
        resident = _resident_bytes()
        _host_peak = max(_host_peak, resident)
        return resident, _host_peak
    module = torch.get_device_module(device)
    return int(module.memory_allocated(device)), int(module.max_memory_allocated(device))


def capacity_of(device: torch.device) -> Capacity:
    """What ``device`` has, and who holds it."""
    if is_host(device):
        total, resident = os.sysconf("SC_PHYS_PAGES") * _PAGE, _resident_bytes()
        return Capacity(resident, total, max(0, total - free_bytes(device) - resident))
    module = torch.get_device_module(device)
    free, total = (int(size) for size in module.mem_get_info(device))
    reserved = int(module.memory_reserved(device))
    if total > NO_LIMIT:
        return Capacity(reserved, 0, 0)
    listed = _listed_for_others(device) if device.type == "cuda" else None
    return Capacity(reserved, total, max(0, total - free - reserved) if listed is None else listed)


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
    if all(process.pid != os.getpid() for process in processes):
        return None
    return sum(process.usedGpuMemory or 0 for process in processes if process.pid != os.getpid())


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _available_bytes() -> int:
    """Of the host: free pages, and those of files that Linux gives up for whoever asks."""
    if not os.path.exists("/proc/meminfo"):
        return os.sysconf("SC_AVPHYS_PAGES") * _PAGE
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = dict(line.split(":", 1) for line in file)
    return int(sizes["MemAvailable"].split()[0]) * 1024


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) * _PAGE
    except FileNotFoundError:  # not Linux: the most so far is all there is
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> None:
    """The peak of ``device`` begins anew at what is allocated now."""
    global _host_peak
    if is_host(device):
        _host_peak = 0
    else:
        torch.get_device_module(device).reset_peak_memory_stats(device)


def seed_apart(devices: Sequence[torch.device]) -> None:
    """Gives every accelerator but the first another seed, where all have the process's.

    ``torch.manual_seed`` seeds all devices alike, and replicas on them would then drop out the same units.
    """
    for offset, device in enumerate(distinct_devices(devices)[1:], start=1):
        if is_host(device):
            continue
        with device_context(device):
            module = torch.get_device_module(device)
            if module.initial_seed() == torch.initial_seed():
                module.manual_seed(torch.initial_seed() + offset)


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def parse_bytes(name: str, size: int | str) -> int:
    """Bytes from a number or a text such as ``"8GiB"``, ``"512 MiB"`` or ``"2GB"``.

    Raises:
        ConfigurationError: names the argument ``name`` and says what is allowed.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*((?:[KMGT]i?)?B?)\s*", size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2]) if match else None
    try:
        value = int(float(match[1]) * unit) if match and unit else size
    except ValueError:
        value = size
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigurationError(f"{name}={size!r} is not allowed; give positive bytes or a text such as '8GiB'.")
    return value
