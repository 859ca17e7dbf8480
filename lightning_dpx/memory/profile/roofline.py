"""How long an operator takes on a device that is not there: by its FLOPs and the bytes that it moves.

An operator takes the time of its arithmetic or that of its operands and results, whichever is longer (the roofline
model of S. Williams, A. Waterman, D. Patterson, 2009), and what it takes to start one. Planners only compare times, so
what matters is how these rates relate to each other, and not how fast the device is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_dpx.devices import modelled_rates
from lightning_dpx.python_objects.leave_no_trace import written_tensors
from lightning_dpx.torch_compat import TorchDispatchMode, key_of, schema_of

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does in a second.

    Attributes:
        flops: Floating point operations of a matrix product.
        bytes: Read from and written to its memory.
        host_bytes: Copied from or to the host's memory.
        start: Seconds until an operator has begun.
    """

    flops: float
    bytes: float
    host_bytes: float
    start: float

    def seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        """The time of the operator ``func`` with these arguments and results; views are free."""
        if func in _ONLY_ALLOCATES:
            return 0.0
        given = _tensors([*args, *kwargs.values()])
        results = _tensors([out])
        # Those on lists write to them, and give nothing back.
        if not schema_of(func).returns:
            results = _tensors(list(written_tensors(func, args, kwargs)))
        # An operator that writes in place moves bytes, though it gives back the memory that it
        # took.
        if not schema_of(func).is_mutable:
            storages = {_storage(tensor) for tensor in given}
            if all(_storage(tensor) in storages for tensor in results):
                return 0.0
        moved = sum(tensor.nbytes for tensor in (*given, *results))
        return self.start + max(_flops(func, args, kwargs, out) / self.flops, moved / self.bytes)


# About two thirds of the data sheet of a server GPU of 2020 (A100: 156 TFLOP/s in TF32, 2 TB/s, PCIe 4.0 x16), and what
# a CPU of four cores was seen to do.
RATES = {
    "cuda": Rates(flops=1e14, bytes=1.3e12, host_bytes=1.6e10, start=5e-6),
    "cpu": Rates(flops=1.5e11, bytes=1.5e10, host_bytes=1.5e10, start=5e-6),
}
_ONLY_ALLOCATES = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
_LIKE_OTHERS = {  # without a formula of their own
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def rates_of(device: torch.device) -> Rates:
    """The rates of the device's type; an unknown accelerator counts as a GPU.

    A simulated device tells its own, by which its clock goes: there an operator takes what its bytes take.
    """
    modelled = modelled_rates(device)
    if modelled is not None:
        return Rates(flops=math.inf, bytes=modelled.bytes, host_bytes=modelled.copied, start=0.0)
    return RATES.get(device.type, RATES["cuda"])


class OperatorSeconds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the time of the operators that run in it.

    Attributes:
        seconds: So far.
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rates = rates
        self.seconds: float = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seconds += self._rates.seconds(func, args, kwargs or {}, out)
        return out


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    packet = func.overloadpacket
    formula = flop_registry.get(_LIKE_OTHERS.get(packet, packet))
    if formula is None:
        return 0.0
    return float(formula(*args, **kwargs, out_val=out))


def _tensors(entries: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among ``entries``, and in lists among them, as operators take them."""
    found = []
    for entry in entries:
        for leaf in entry if isinstance(entry, list | tuple) else (entry,):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                found.append(leaf)
    return found


def _storage(tensor: torch.Tensor) -> int:
    identity: int = key_of(tensor.untyped_storage())
    return identity
