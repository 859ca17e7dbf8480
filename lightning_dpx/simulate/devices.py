"""How many devices there are, what they hold, and what was copied between them."""

import functools
import sys
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_int, c_void_p, cast, memmove
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

from lightning_dpx.arguments import is_number, is_whole_number
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.simulate.backend import MAX_DEVICES, load_backend
from lightning_dpx.units import parse_byte_rate, parse_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies from one device to another that one piece of code made.

    Attributes:
        maker: The function that copied, as ``module.function``: the innermost one of lightning_dpx, otherwise the
            innermost outside torch; "autograd" where a backward thread copied by itself.
    """

    source: torch.device
    target: torch.device
    num_copies: int
    num_bytes: int
    maker: str


BYTES_PER_SECOND = 1e11  # of a device of speed 1


def simulate(
    num_devices: int = 8,
    memory: int | str | Sequence[int | str] | None = None,
    speed: float | Sequence[float] = 1.0,
    link: int | str | None = None,
    latency: float = 0.0,
) -> None:
    """Makes ``sim:0`` to ``sim:{num_devices - 1}``; a later call changes their number and capacities.

    Call it at the top of the program: autograd must not have run yet. The first call on a machine compiles the backend
    (about 20 s; needs a C++ compiler and the ``simulate`` extra).

    Args:
        num_devices: 1 to 16.
        memory: Capacity of each device, in bytes or as ``"8GiB"``, or one per device; ``None`` for no limit.
        speed: Speed of each device, or one per device. Time on a simulated device, as its events measure it, is
            modelled: an operator takes as long as its operands and results take at ``speed`` x 1e11 bytes a second.
        link: Bytes per second of a copy between two devices, or with the host, as a number or ``"25GB/s"``; it takes
            the time of both. ``None``: copies take no time.
        latency: Seconds that every such copy takes beside.

    Raises:
        ConfigurationError: a number or size that is not allowed.
        UnsupportedError: no compiler, or too late.

    Examples:
        >>> dpx.simulate(2, memory="64MiB")
        >>> torch.ones(3, device="sim:1").sum().item()
        3.0
    """
    if not is_whole_number(num_devices) or not 1 <= num_devices <= MAX_DEVICES:
        raise ConfigurationError(f"num_devices={num_devices!r} is not allowed; give 1 to {MAX_DEVICES}.")
    each = [memory] * num_devices if isinstance(memory, str) or not isinstance(memory, Sequence) else list(memory)
    if len(each) != num_devices:
        raise ConfigurationError(
            f"memory has {len(each)} entries for {num_devices} devices; give one size, or one each."
        )
    speeds = list(speed) if isinstance(speed, Sequence) else [speed] * num_devices
    if len(speeds) != num_devices or not all(map(_is_speed, speeds)):
        raise ConfigurationError(f"speed={speed!r} is not allowed; give one positive number, or {num_devices} of them.")
    bandwidth = 0.0 if link is None else _bytes_per_second(link)
    if not is_number(latency) or not 0 <= latency < float("inf"):
        raise ConfigurationError(f"latency={latency!r} is not allowed; give seconds, 0 or more.")
    capacities = [0 if size is None else parse_bytes("memory", size) for size in each]
    # Arguments are checked before: compiling takes about 20 s.
    load_backend()
    module = torch.get_device_module("sim")
    module.set_device_count(num_devices)
    rates = dict.fromkeys(range(MAX_DEVICES), BYTES_PER_SECOND)
    for index, one in enumerate(speeds):
        rates[index] = BYTES_PER_SECOND * one
    module.set_rates(rates, bandwidth, float(latency))
    # Devices beyond the number are as they were at first, so that an earlier call leaves no limits.
    for index in range(MAX_DEVICES):
        torch.ops.dpx_sim.set_capacity(index, capacities[index] if index < num_devices else 0)
        torch.ops.dpx_sim.reset_peak(index)
    # C++ holds this address for good; a function at the top of a module lives as long.
    torch.ops.dpx_sim.set_observer(cast(_observe, c_void_p).value)
    clear_traffic()


def _is_speed(value: object) -> bool:
    # The comparison also refuses NaN.
    return is_number(value) and 0 < value < float("inf")


def traffic() -> list[Transfer]:
    """All copies between different devices since the last :func:`clear_traffic`, grouped by route and maker."""
    transfers = []
    for line in torch.ops.dpx_sim.traffic():
        source, target, count, size, maker = line.split(" ", 4)
        transfers.append(Transfer(_device(source), _device(target), int(count), int(size), maker))
    return transfers


def clear_traffic() -> None:
    """Forgets the copies so far."""
    torch.ops.dpx_sim.clear_traffic()


def _device(index: str) -> torch.device:
    if index == "-1":
        return torch.device("cpu")
    return torch.device("sim", int(index))


# Each copy asks for its maker, thousands in a step: a cache of names halves what that takes, 7 us of a copy.
@functools.lru_cache(maxsize=4096)
def _named(module: str, code: CodeType) -> str:
    return f"{module.removeprefix('lightning_dpx.')}.{code.co_qualname.split('.<locals>')[0]}"


@functools.lru_cache(maxsize=4096)
def _is_ours(module: str) -> bool:
    return module.startswith("lightning_dpx.") and not module.startswith("lightning_dpx.simulate")


@functools.lru_cache(maxsize=4096)
def _is_between(module: str) -> bool:
    """Whether the module stands between a copy and who asked for it."""
    return module.startswith(("torch", "lightning_dpx.simulate"))


def _maker() -> str:
    # A thread of autograd that copies by itself has no Python below it.
    outside = "autograd"
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Code that was made by `exec` may have globals without a name.
        module = frame.f_globals.get("__name__", "")
        if _is_ours(module):
            return _named(module, frame.f_code)
        if outside == "autograd" and not _is_between(module):
            outside = _named(module, frame.f_code)
        # Outwards from the copy: the first function of ours is the one that wanted it.
        frame = frame.f_back
    return outside


@CFUNCTYPE(None, c_void_p, c_int)  # type: ignore[untyped-decorator]
def _observe(buffer: int, size: int) -> None:
    # C++ reads up to the zero, in a buffer of this size.
    name = _maker().encode()[: size - 1] + b"\0"
    memmove(buffer, name, len(name))


def _bytes_per_second(link: int | str) -> float:
    # Rates are written with their unit wherever else they are given, such as to `dpx plan --link`.
    if isinstance(link, str) and "/" in link:
        return parse_byte_rate("link", link)
    return float(parse_bytes("link", link))
