"""Loads the sim backend, once per process, and gives PyTorch the module ``torch.sim``."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from lightning_dpx.backward_threads import finish_backward
from lightning_dpx.errors import UnsupportedError
from lightning_dpx.simulate.build import load_library
from lightning_dpx.torch_compat import privateuse1_backend_name, register_device_module

MAX_DEVICES = 16
_loaded = False


def load_backend() -> None:
    """Compiles ``backend.cpp`` where that was not done before and registers the device type "sim".

    Raises:
        UnsupportedError: no compiler or ninja, another backend took the place, or autograd already started.
    """
    global _loaded
    if _loaded:
        return
    name = privateuse1_backend_name()
    if name not in ("privateuseone", "sim"):
        raise UnsupportedError(f"Simulated devices need PyTorch's one place for a foreign backend; {name!r} has it.")
    # A call that came too late has registered the backend already, which cannot be done twice.
    if name != "sim":
        _register()
    _require_autograd_threads()
    # Last, so that every later call finds out again that it is too late.
    _loaded = True


def _register() -> None:
    load_library()
    # The name comes first: the module and the methods are made under it.
    rename_privateuse1_backend("sim")
    register_device_module("sim", SimModule())  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_storage=True)


def is_loaded() -> bool:
    """Whether the backend is there."""
    return _loaded


def _require_autograd_threads() -> None:
    """Autograd starts its threads at the first backward of a process, for the devices that it knows by then."""
    # One backward on every device: a thread that still waits for the GIL when the process exits would abort
    # it.
    torch.ops.dpx_sim.set_devices(MAX_DEVICES)  # until simulate() says how many
    # For the most devices that there can be, as threads cannot be added later.
    probes = [torch.ones((), device=f"sim:{index}", requires_grad=True) for index in range(MAX_DEVICES)]
    try:
        for probe in probes:
            torch.autograd.backward(probe * 1)
    except RuntimeError as error:
        raise UnsupportedError(
            "simulate() must come before the first backward of the process, because autograd starts its device "
            "threads then; call lightning_dpx.simulate() at the top of the program."
        ) from error
    atexit.register(_finish_backward)


def _finish_backward() -> None:
    """Lets autograd's threads of all devices finish, also of those that a later ``simulate()`` has taken away."""
    # Threads exist for all devices that there were at the first backward.
    torch.ops.dpx_sim.set_devices(MAX_DEVICES)
    for index in range(MAX_DEVICES):
        torch.ops.dpx_sim.set_capacity(index, 0)  # a device that is full has room for it, too
        finish_backward(torch.device("sim", index))


class SimEvent:
    """A moment on a device's clock; its work is done when the call returns."""

    def __init__(self, device: Any = None, **_: object) -> None:
        self.device = device
        self._seconds = 0.0

    def record(self, stream: "SimStream | None" = None) -> None:
        """Notes the device's clock."""
        device = stream.device if stream is not None else self.device
        # Without a stream and a device it is the current one, as with CUDA's events.
        index = None if device is None else torch.device(device).index
        self._seconds = float(torch.ops.dpx_sim.busy(torch.ops.dpx_sim.get_device() if index is None else index))

    def wait(self, stream: object = None) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Always done."""
        return True

    def synchronize(self) -> None:
        """Nothing is pending."""

    def elapsed_time(self, end: "SimEvent") -> float:
        """Milliseconds of modelled work between two recorded events."""
        return (end._seconds - self._seconds) * 1e3


class SimStream:
    """A stream of a device that runs everything at once, in order."""

    def __init__(self, device: Any = None, **_: object) -> None:
        self.device = device
        self.stream_id = 0  # that of a default stream

    def wait_event(self, event: object) -> None:
        """Nothing is pending."""

    def wait_stream(self, stream: object) -> None:
        """Nothing is pending."""

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        """An event that is done."""
        event = event or SimEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """Always done."""
        return True

    def synchronize(self) -> None:
        """Nothing is pending."""


class SimModule:
    """``torch.sim``: what ``torch.cuda`` is for CUDA devices."""

    Event = SimEvent
    Stream = SimStream
    OutOfMemoryError = torch.OutOfMemoryError
    _initialized = True  # without it activation checkpointing does not restore the generators

    def __init__(self) -> None:
        self._count = 1
        self._speeds: dict[int, float] = {}
        self._link = 0.0
        self._latency = 0.0

    # ---- devices ----

    def is_available(self) -> bool:
        """Whether there are simulated devices: always, once the backend is loaded."""
        return True

    def is_initialized(self) -> bool:
        """There is nothing to initialize lazily."""
        return True

    # `torch.manual_seed` seeds a foreign backend only if it has this method, and `manual_seed_all`.
    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        """There is nothing to initialize lazily."""

    def device_count(self) -> int:
        """Simulated devices."""
        return self._count

    def set_rates(self, speeds: dict[int, float], link: float, latency: float) -> None:
        """Changes the model of time: bytes a second by device, those between devices (0: no time), and seconds."""
        for device, speed in speeds.items():
            torch.ops.dpx_sim.set_speed(device, speed)
        torch.ops.dpx_sim.set_link(link, latency)
        self._speeds = dict(speeds)
        self._link = link
        self._latency = latency

    def bytes_per_second(self, device: Any = None) -> float:
        """Bytes of operands and results for which an operator takes a second."""
        return self._speeds[self._index(device)]

    def link_bytes_per_second(self) -> float:
        """Bytes of a copy to another device or the host that takes a second; 0 where copies take no time."""
        return self._link

    def link_latency(self) -> float:
        """Seconds until a copy to another device or the host begins."""
        return self._latency

    def busy_seconds(self, device: Any = None) -> float:
        """What the device's clock shows: seconds of all that it has done."""
        return float(torch.ops.dpx_sim.busy(self._index(device)))

    def set_device_count(self, count: int) -> None:
        """Changes how many simulated devices there are."""
        torch.ops.dpx_sim.set_devices(count)
        self._count = count

    def current_device(self) -> int:
        """The index of the calling thread's current device."""
        return int(torch.ops.dpx_sim.get_device())

    def set_device(self, device: Any) -> None:
        """Makes ``device`` current for the calling thread."""
        torch.ops.dpx_sim.exchange_device(self._index(device))

    def exchange_device(self, device: int) -> int:
        """Makes ``device`` current and returns the one before; a negative index changes nothing."""
        if device < 0:
            return self.current_device()
        return int(torch.ops.dpx_sim.exchange_device(device))

    _exchange_device = maybe_exchange_device = _maybe_exchange_device = exchange_device

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """``device`` is current for a while."""
        before = self.exchange_device(self._index(device))
        try:
            yield
        finally:
            self.exchange_device(before)

    def get_device_name(self, device: Any = None) -> str:
        """A name for reports."""
        return f"simulated device {self._index(device)}"

    def _index(self, device: Any = None) -> int:
        if device is None:
            return self.current_device()
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        if index is None:
            return self.current_device()
        return index

    # ---- streams: work is done when the call returns ----

    def synchronize(self, device: Any = None) -> None:
        """Nothing is pending."""

    def current_stream(self, device: Any = None) -> SimStream:
        """The one stream that the device has."""
        return SimStream(torch.device("sim", self._index(device)))

    default_stream = current_stream

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        """Enters a stream, which changes nothing here."""
        yield

    # ---- memory, in bytes ----

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of all living storages; views are free."""
        return int(torch.ops.dpx_sim.memory(self._index(device))[0])

    def max_memory_allocated(self, device: Any = None) -> int:
        """The largest :meth:`memory_allocated` since the last reset."""
        return int(torch.ops.dpx_sim.memory(self._index(device))[1])

    # Nothing is cached, so nothing is reserved beyond what lives.
    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """The peak starts again from what lives now."""
        torch.ops.dpx_sim.reset_peak(self._index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes; a device without a capacity says ``2**63 - 1``."""
        live, _, capacity = torch.ops.dpx_sim.memory(self._index(device))
        # Callers compute with this number, so no limit is a number, too.
        total = capacity or 2**63 - 1
        return total - live, total

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """The figures under the names of CUDA's allocator."""
        live, peak, _ = torch.ops.dpx_sim.memory(self._index(device))
        # Nothing is cached, so that what is reserved is what is allocated.
        stats: dict[str, int] = {}
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
            stats[f"{kind}.all.current"] = live
            stats[f"{kind}.all.peak"] = peak
        return stats

    def empty_cache(self) -> None:
        """There is no cache."""

    # ---- random numbers: a generator per device ----

    def manual_seed(self, seed: int) -> None:
        """Seeds the generator of the current device."""
        # Seeds may have 64 bits without a sign, and the operator takes a signed integer.
        torch.ops.dpx_sim.seed(self.current_device(), seed % 2**63)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds every device; ``torch.manual_seed`` calls it."""
        # Also those that a later `simulate()` adds.
        for device in range(MAX_DEVICES):
            torch.ops.dpx_sim.seed(device, seed % 2**63)

    def initial_seed(self) -> int:
        """What the current device's generator was last seeded with."""
        return int(torch.ops.dpx_sim.initial_seed(self.current_device()))

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of the device's generator."""
        return torch.ops.dpx_sim.random_state(self._index(device))  # type: ignore[no-any-return]

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Restores the device's generator."""
        torch.ops.dpx_sim.set_random_state(self._index(device), state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """One state per device."""
        return [self.get_rng_state(device) for device in range(self._count)]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Restores what :meth:`get_rng_state_all` returned."""
        for device, state in enumerate(states):
            self.set_rng_state(state, device)

    # ---- precision ----

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """For ``torch.autocast("sim")``."""
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        """As on the CPU that does the arithmetic."""
        return True
