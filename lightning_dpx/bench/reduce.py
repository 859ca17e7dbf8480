"""``dpx bench reduce``: summing the gradients of K replicas, by every mode, next to DDP's all-reduce and a plain copy.

All contestants take turns on the same lists. DDP's part is an all-reduce in its buckets among K processes (gloo on
CPUs, NCCL on GPUs). The limit is what the machine's plain copies allow: a sum to one owner must read K lists and write
one, an all-reduce must read and write K.
"""

import math
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_dpx.bench.child import Child
from lightning_dpx.bench.turns import rotated
from lightning_dpx.devices import distinct_devices, has_nccl, is_host, present_devices, synchronize
from lightning_dpx.errors import BenchError
from lightning_dpx.pictures import new_figure, save_figure
from lightning_dpx.reducers import REDUCERS, GradientReducer, make_reducer
from lightning_dpx.torch_compat import foreach_copy_

SIZES = ("1e5", "1e6", "1e7", "2.5e7", "1e8", "resnet50", "gpt2")
SETTLE_SECONDS = 0.05  # thread pools spin on for a while, and would take the cores of what comes next
PEER = "ddp all-reduce"
LIMIT = "copy limit"
_TO_OWNERS = "to owners"
_TO_ALL = "to all"
_COPY = "copy"


@dataclass(frozen=True, slots=True)
class Reduction:
    """What one way of summing cost.

    Attributes:
        elements: float32 values of one list.
        mode: A reducer and what it does, or the peer, or the limit.
        ms: Median time, in milliseconds.
        gb_per_s: Bytes of one list over that time, in 1e9 bytes a second.
        than_peer: How many times faster than DDP.
        than_limit: How many times slower than the limit for this kind of sum.
    """

    size: str
    elements: int
    mode: str
    ms: float
    gb_per_s: float
    than_peer: float | None
    than_limit: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def shapes_of(size: str) -> list[tuple[int, ...]]:
    """The parameters of a model by name (``"resnet50"``, ``"gpt2"``), or a number of elements in ten parameters.

    Raises:
        BenchError: neither.
    """
    if size in MODELS_BY_SHAPE:
        return MODELS_BY_SHAPE[size]()
    try:
        elements = int(float(size))
    except ValueError:
        elements = 0
    if elements < 10:
        raise BenchError(f"size {size!r} is not allowed; give a number of elements from 10, 'resnet50' or 'gpt2'.")
    tenth = elements // 10
    return [*[(tenth,)] * 9, (elements - 9 * tenth,)]


def _resnet50() -> list[tuple[int, ...]]:
    """He et al. 2015: bottleneck blocks of 3, 4, 6 and 3."""

    def conv(outputs: int, inputs: int, kernel: int) -> list[tuple[int, ...]]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]

    shapes = conv(64, 3, 7)
    inputs = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(depth):
            shapes += conv(width, inputs, 1) + conv(width, width, 3) + conv(4 * width, width, 1)
            if block == 0:
                shapes += conv(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def _gpt2(width: int = 768, depth: int = 12) -> list[tuple[int, ...]]:
    """Radford et al. 2019, the small one."""
    norm = [(width,), (width,)]
    block = [
        *norm, (3 * width, width), (3 * width,), (width, width), (width,),
        *norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *(block * depth), *norm]


MODELS_BY_SHAPE = {"resnet50": _resnet50, "gpt2": _gpt2}


class _Peers:
    """K processes that all-reduce on demand.

    Args:
        devices: That of each process.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        with socket.socket() as probe:
            # The system names a port that is free; it is given back before the peers take it.
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # As a file, which needs torch alone: importing the package for it takes three times as long.
        command = [sys.executable, "-P", str(Path(__file__).with_name("peer.py"))]
        self._children = []
        for rank, device in enumerate(devices):
            arguments = [*command, str(rank), str(len(devices)), str(port), str(device)]
            self._children.append(Child(arguments, subprocess.DEVNULL, tells=rank == 0))  # only one tells its times
        # Joining the process group takes as long as the slowest needs to start.
        self._children[0].read("ready")

    def run(self, elements: int) -> float:
        for child in self._children:
            child.tell(str(elements))
        return float(self._children[0].read("seconds"))

    def close(self) -> None:
        for child in self._children:
            # Killed, as one that waits for a lost peer does not read that its input has ended.
            child.process.kill()
            child.process.communicate()


def compare_reductions(
    sizes: Sequence[str] = SIZES,
    devices: Sequence[str] = ("cpu",) * 4,
    rounds: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Reduction]:
    """Measures every mode that these devices allow.

    Args:
        sizes: See :func:`shapes_of`.
        devices: One per replica.
        rounds: Turns of every contestant.
        progress: Told what happens next.

    Raises:
        BenchError: a size is not known, or a process of the peer failed.
        ConfigurationError: a device is not there.
    """
    placed = present_devices(devices)
    shapes = {size: shapes_of(size) for size in sizes}  # before processes start that will not ask
    backend = "nccl" if _reach_each_other(placed) else "gloo"
    progress(f"starting {len(placed)} processes for {PEER} ({backend})")
    peers = _Peers(placed if backend == "nccl" else [torch.device("cpu")] * len(placed))
    results = []
    try:
        for size in sizes:
            progress(f"{size} on {', '.join(map(str, placed))}")
            results += _compare(size, shapes[size], placed, rounds, peers)
    finally:
        peers.close()
    return results


def _compare(
    size: str, shapes: list[tuple[int, ...]], devices: list[torch.device], rounds: int, peers: _Peers
) -> list[Reduction]:
    """The rows of one size of gradients."""
    elements = sum(math.prod(shape) for shape in shapes)
    contestants = _contestants(shapes, devices)
    contestants[PEER] = partial(peers.run, elements)
    medians = _medians(contestants, rounds)
    # The copy is the yardstick, not one of the rows.
    limits = _limits(medians.pop(_COPY), devices)
    rows = []
    for name, median in medians.items():
        rows.append(_row(size, elements, name, median, medians[PEER], limits))
    for kind, limit in limits.items():
        rows.append(_row(size, elements, f"{LIMIT}, {kind}", limit, medians[PEER], limits))
    return rows


def _contestants(shapes: list[tuple[int, ...]], devices: list[torch.device]) -> dict[str, Callable[[], float]]:
    """What is timed, by name: each mode in both directions, and a copy of as many bytes. A call gives its seconds."""
    grads: list[list[torch.Tensor | None]] = []
    for device in devices:
        grads.append([torch.zeros(shape, device=device) for shape in shapes])
    found: dict[str, Callable[[], float]] = {}
    for name, reducer in _possible(devices).items():
        found[f"{name}, {_TO_OWNERS}"] = partial(_seconds_of, partial(reducer.reduce, grads), devices)
        found[f"{name}, {_TO_ALL}"] = partial(_seconds_of, partial(reducer.all_reduce, grads), devices)
    source = [torch.zeros(shape, device=devices[0]) for shape in shapes]
    # From the first device to the last, so that a copy crosses a link where there is one.
    target = [torch.zeros(shape, device=devices[-1]) for shape in shapes]
    found[_COPY] = partial(_seconds_of, partial(foreach_copy_, target, source), devices)
    return found


def _medians(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median seconds of each, which take turns: whatever else the machine does, it does to all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(rounds + 1):
        for name in rotated(names, turn):
            time.sleep(SETTLE_SECONDS)
            seconds[name].append(contestants[name]())
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first one warms up


def _limits(copy_seconds: float, devices: Sequence[torch.device]) -> dict[str, float]:
    """The least seconds in each direction, by what a copy takes; none where devices have links of their own."""
    # Links differ from device to device: see the bytes that each mode moves instead.
    if not all(is_host(device) for device in devices):
        return {}
    # A copy reads one list and writes one.
    passes = {_TO_OWNERS: len(devices) + 1, _TO_ALL: 2 * len(devices)}
    return {direction: copy_seconds * count / 2 for direction, count in passes.items()}


def _row(
    size: str, elements: int, name: str, seconds: float, peer_seconds: float, limits: Mapping[str, float]
) -> Reduction:
    limit = limits.get(name.rpartition(", ")[2])
    return Reduction(
        size,
        elements,
        name,
        seconds * 1e3,
        elements * 4 / seconds / 1e9,
        peer_seconds / seconds,
        seconds / limit if limit else None,
    )


def _reach_each_other(devices: Sequence[torch.device]) -> bool:
    """Whether NCCL serves these devices; it takes none of them twice."""
    return has_nccl(devices) and len(distinct_devices(devices)) == len(devices)


def _possible(devices: Sequence[torch.device]) -> dict[str, GradientReducer]:
    """All modes, or one where all replicas share one memory and the modes do the same."""
    if len(distinct_devices(devices)) == 1:
        return {"dpx": make_reducer("auto", devices)}
    return {name: make_reducer(name, devices) for name in REDUCERS if name != "nccl" or _reach_each_other(devices)}


def _seconds_of(call: Callable[[], object], devices: Sequence[torch.device]) -> float:
    for device in devices:
        # Work that was queued before is no part of the call, and what it queues itself is.
        synchronize(device)
    started = time.perf_counter()
    call()
    for device in devices:
        synchronize(device)
    return time.perf_counter() - started


def format_reductions(results: Sequence[Reduction]) -> str:
    """One row per size and mode."""
    lines = [f"{'size':9} {'mode':26} {'ms':>9} {'GB/s':>7} {'x DDP':>7} {'/ limit':>7}"]
    for row in results:
        than_peer = "" if row.than_peer is None else f"{row.than_peer:.2f}"
        than_limit = "" if row.than_limit is None else f"{row.than_limit:.2f}"
        lines.append(f"{row.size:9} {row.mode:26} {row.ms:9.3f} {row.gb_per_s:7.2f} {than_peer:>7} {than_limit:>7}")
    return "\n".join(lines)


def plot_reductions(results: Sequence[Reduction], path: Path) -> None:
    """Bandwidth over size, a line per mode, as a picture.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    for mode in dict.fromkeys(row.mode for row in results):
        rows = sorted((row for row in results if row.mode == mode), key=lambda row: row.elements)
        numbers = [row for row in rows if row.size not in MODELS_BY_SHAPE]
        # Limits are computed, not measured, and get no marks.
        style = "--" if mode.startswith(LIMIT) else "o-"
        (line,) = axes.plot([row.elements * 4 for row in numbers], [row.gb_per_s for row in numbers], style, label=mode)
        for row in rows:
            if row.size in MODELS_BY_SHAPE and not mode.startswith(LIMIT):
                axes.plot(row.elements * 4, row.gb_per_s, "D", color=line.get_color(), fillstyle="none")
                axes.annotate(row.size, (row.elements * 4, row.gb_per_s), xytext=(6, -10), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="bytes of one replica's gradients", ylabel="GB/s (1e9 bytes)")
    axes.set_title("Summing the gradients of all replicas")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save_figure(figure, path)
