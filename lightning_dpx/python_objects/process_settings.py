"""What belongs to the process and not to a thread, and is something else while a step runs.

with sdpa_kernel(SDPBackend.MATH):       what was set before is put back at the end: two threads
    attended = attention(rows)           that overlap put back what the other one has set
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.object_graph import MUTABLE, PLAIN
from lightning_dpx.python_objects.origin import package_of, without_libraries
from lightning_dpx.python_objects.reachable import places_of_code
from lightning_dpx.torch_compat import TorchDispatchMode, on_tensors_of_tensors, parametrizations_are_cached

_OWN_FRAMES = 2  # between an operator and the place that looks for the code that called it


def float32_precision() -> tuple[str, ...]:
    """How float32 numbers are multiplied, such as "ieee" or "tf32": by each backend, for each kind of operator."""
    backends: Any = torch.backends
    # One by one: torch.get_float32_matmul_precision and cudnn.allow_tf32 raise where a program has set some of these
    # apart, which is torch's own way to ask for TF32 since 2.9 (seen with 2.13).
    return (
        backends.fp32_precision,
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cudnn.rnn.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        backends.mkldnn.conv.fp32_precision,
        backends.mkldnn.rnn.fp32_precision,
    )


def gpus_compute_in_tf32() -> bool:
    """Whether GPUs round float32 numbers to ten bits of mantissa, in products or convolutions."""
    backends: Any = torch.backends
    operators = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    return any(kind.fp32_precision == "tf32" for kind in operators)


_SETTINGS: dict[str, Callable[[], object]] = {
    "torch's default dtype": torch.get_default_dtype,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "attention by formula": torch.backends.cuda.math_sdp_enabled,
    "cuDNN's attention": torch.backends.cuda.cudnn_sdp_enabled,
    "cuDNN": lambda: torch.backends.cudnn.enabled,
    "cuDNN's benchmark": lambda: torch.backends.cudnn.benchmark,
    "cuDNN's determinism": lambda: torch.backends.cudnn.deterministic,
    "cached parametrizations": parametrizations_are_cached,
    "detection of anomalies": torch.is_anomaly_enabled,
    "precision of float32 products": float32_precision,
    "checks of sparse tensors": torch.sparse.check_sparse_tensor_invariants.is_enabled,
    "filters of warnings": lambda: id(warnings.filters),
    "the standard output": lambda: id(sys.stdout),
    "the standard error": lambda: id(sys.stderr),
}


class SettingsWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks, at every operator of a step, at settings of torch and Python, and at what code keeps in globals.

    Of the user's own code these are all globals and attributes of classes that it names. Of an installed package, which
    may have very many, the containers in those of its files that are at work: what gets items and loses them again
    within a step (a stack of effect handlers, say) belongs to one thread at a time.

    Args:
        module: Whose code.

    Attributes:
        switched: Names of what was something else than before the step.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every call, for a tenth of its time; compiled code runs eagerly in here

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.switched: set[str] = set()
        self._sizes: dict[int, int] = {}  # the most items that a container had, by id
        self._containers: list[tuple[str, Any]] = []  # which keeps their ids theirs
        self._files: dict[int, Any] = {}  # globals of files that were seen at work, by id
        self._settings: list[tuple[str, Callable[[], object], object]] = []
        for name, read in _SETTINGS.items():
            self._settings.append((name, read, read()))
        self._values: list[tuple[str, Mapping[str, Any], str, Any]] = []  # and what was there before the step
        for name, space, key in places_of_code(module):
            held = vars(space) if isinstance(space, type) else space  # shows what is there at any time
            self._values.append((name, held, key, held.get(key)))
            self._add(name, held.get(key))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if on_tensors_of_tensors(types):
            return NotImplemented
        self._look_at_frames()
        self.look()
        return func(*args, **(kwargs or {}))

    def look(self) -> None:
        """Compares what is set now with what was set before the step."""
        for name, read, before in self._settings:
            if read() != before:
                self.switched.add(name)
        for name, space, key, before in self._values:
            value = space.get(key)
            # Asked at every operator, and mostly it is the very same object.
            if value is before or not isinstance(value, PLAIN):
                continue
            # An array would answer the comparison item by item.
            if not isinstance(before, PLAIN) or value != before:
                self.switched.add(name)
        for name, container in self._containers:
            size = len(container)
            # A memory that only grows is shared by threads without harm.
            if size < self._sizes[id(container)]:
                self.switched.add(name)
            self._sizes[id(container)] = size

    def _look_at_frames(self) -> None:
        # No name may be left for this frame: in a circle with itself it would keep those that called it, and so all
        # tensors in them, until garbage is collected.
        frame = inspect.currentframe()
        for _ in range(_OWN_FRAMES):
            frame = None if frame is None else frame.f_back
        while frame is not None:
            space = frame.f_globals
            # Here the step was called; what has called that is at work all the time.
            if package_of(space.get("__name__")) == "lightning_dpx":
                return
            if id(space) not in self._files:
                self._files[id(space)] = space
                self._add_file(space)
            frame = frame.f_back

    def _add_file(self, space: dict[str, Any]) -> None:
        name = space.get("__name__") or "builtins"
        # Frameworks keep books of their own, and see to their threads.
        if not without_libraries(frozenset({package_of(name)})):
            return
        for key, value in list(space.items()):
            if not key.startswith("__"):
                self._add(f"{name}.{key}", value)

    def _add(self, name: str, value: Any) -> None:
        if type(value) in MUTABLE and id(value) not in self._sizes:
            self._sizes[id(value)] = len(value)
            self._containers.append((name, value))
