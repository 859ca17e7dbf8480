"""Operators of a step on fake tensors, each tried once for real where the device that is planned for is there.

What a kernel takes inside itself, and how its results lie in memory, no fake can tell: libraries choose by shapes,
strides and instruction sets. So an operator that may take something inside runs once on tensors of zeros, which go
before the next one runs. One operator at a time needs little, and a net of many equal layers has few different ones.
Those that would take long or much are left to the rules of :mod:`lightning_dpx.memory.tracing.scratch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.memory.profile.roofline import Rates
from lightning_dpx.memory.tracing.allocator_account import OperatorMemory, account_of
from lightning_dpx.torch_compat import (
    COLLECTIVES,
    DisableAutocast,
    FakeTensor,
    disable_current_modes,
    schema_of,
    tree_flatten,
    tree_unflatten,
)
from lightning_dpx.units import GIB

aten: Any = torch.ops.aten
_WORTH = 4096  # bytes of operands: what less may take inside does not matter
_MOST_BYTES = GIB
_MOST_SECONDS = 0.2  # of one operator
_UNTRIED = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
_MAKES_NOTHING = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.clone.default, aten._to_copy.default, aten.copy_.default,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probed:
    """What an operator did.

    Attributes:
        taken: The memory that it took, its results among it.
        strides: Of its results, in order; ``None`` for what is no tensor.
    """

    taken: OperatorMemory
    strides: tuple[tuple[int, ...] | None, ...]


class Probe:
    """Tries operators on a device, every one of them once for the same shapes.

    Args:
        device: Where.
        rates: How long an operator is expected to take there.
    """

    def __init__(self, device: torch.device, rates: Rates) -> None:
        self._device = device
        self._rates = rates
        self._account = account_of(device)
        self._known: dict[Any, Probed | None] = {}

    def of(self, func: Any, args: Any, kwargs: Any, out: Any) -> Probed | None:
        """What ``func`` does with such arguments; ``None`` where it is not tried, or cannot be.

        Args:
            func: An operator.
            args: What it was given: fakes among them.
            kwargs: What it was given by name.
            out: What it gave for them.
        """
        # It would wait for other processes, which are not here, or take what they send to the step.
        if func.namespace in COLLECTIVES:
            return None
        # Views, allocations and copies take nothing inside; what writes, draws or looks at numbers
        # would do something else on zeros.
        if schema_of(func).is_mutable or func.is_view or func in _MAKES_NOTHING or not _UNTRIED.isdisjoint(func.tags):
            return None
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor)]
        if torch.Tag.pointwise in func.tags and len({(x.stride(), x.dtype) for x in (*given, *results)}) == 1:
            return None  # but some of them copy what does not lie as the rest does
        num_bytes = sum(tensor.nbytes for tensor in (*given, *results))
        if not given or not _WORTH <= num_bytes <= _MOST_BYTES or not all(map(self._can_be_made, given)):
            return None
        key = func, tuple(_described(leaf) for leaf in leaves), spec
        if key not in self._known:
            is_short = self._rates.seconds(func, args, kwargs, out) <= _MOST_SECONDS
            self._known[key] = self._tried(func, leaves, spec) if is_short else None
        return self._known[key]

    def _can_be_made(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.device == self._device

    def _tried(self, func: Any, leaves: Sequence[Any], spec: Any) -> Probed | None:
        # A mode sees operators below autocast: their operands have the dtypes that they are to
        # have.
        with disable_current_modes(), torch.no_grad(), DisableAutocast():
            made = [self._zeros(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(made, spec)
            try:
                func(*args, **kwargs)  # what a library makes for these shapes once and for all is there
                token = self._account.start()
                out = None
                try:
                    out = func(*args, **kwargs)
                finally:
                    taken = self._account.stop(token)
            except (RuntimeError, IndexError, ValueError, NotImplementedError):
                return None  # zeros do not suit it
            results = tree_flatten(out)[0]
            strides = [result.stride() if _is_tensor(result) else None for result in results]
            return Probed(taken, tuple(strides))

    def _zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        """Zeros that lie in memory as ``tensor`` does."""
        # With the same strides, by which libraries choose kernels; dims that overlap share memory.
        extent = 1 + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
        if not tensor.numel():
            extent = 0
        memory = torch.zeros(max(0, extent), dtype=tensor.dtype, device=self._device)
        return memory.as_strided(tensor.size(), tensor.stride())


def as_probed(out: Any, probed: Probed) -> Any:
    """``out``, fakes that lie in memory as the kernel's results do."""
    leaves, spec = tree_flatten(out)
    if len(leaves) != len(probed.strides):
        return out
    pairs = zip(leaves, probed.strides, strict=True)
    return tree_unflatten([_lying(leaf, strides) for leaf, strides in pairs], spec)


def _lying(tensor: Any, strides: tuple[int, ...] | None) -> Any:
    if not isinstance(tensor, FakeTensor) or strides is None or tensor.layout is not torch.strided:
        return tensor
    if tensor.stride() == strides or tensor.dim() != len(strides):
        return tensor
    return torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype
    if isinstance(leaf, str | int | float | bool | type(None)):
        return leaf
    return repr(leaf)
