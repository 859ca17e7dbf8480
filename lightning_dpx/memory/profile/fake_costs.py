"""What is watched of a step on fake tensors: masks, left-over fakes, storages that torch resizes; priced by rates."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import is_host
from lightning_dpx.memory.execute.values import Value
from lightning_dpx.memory.profile.probe import Probe
from lightning_dpx.memory.profile.roofline_costs import RatedTrace, RooflineCosts
from lightning_dpx.memory.tracing.allocator_account import OperatorMemory
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.python_objects.leave_no_trace import untouched
from lightning_dpx.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    gathered_bytes,
    schema_of,
)

aten: Any = torch.ops.aten
_IN_PLACE = {aten.bernoulli_.float, aten.zero_.default, aten.fill_.Scalar}
_CONSTANTS = {
    aten.zeros, aten.zeros_like, aten.new_zeros, aten.ones, aten.ones_like, aten.new_ones, aten.full, aten.full_like,
    aten.new_full,
}  # fmt: skip


class FakeTrace(RatedTrace):  # type: ignore[no-untyped-call]
    """A trace of fakes, which also notes what cannot be read from them later.

    Attributes:
        masks: Storages with zeros and one other number, as a dropout draws them.
        resized_bytes: Of the parameters that are watched at every event; empty where none are.
    """

    def __init__(self, device: torch.device, target: torch.device, probe: Probe | None, *, numbers: bool) -> None:
        super().__init__(device, target, fake=True, probe=probe, numbers=numbers)
        self.masks: set[Allocation] = set()
        self.resized_bytes: list[int] = []

    def watch_resized(self, parameters: Sequence[Any]) -> None:
        """Counts parameters of ``fully_shard`` from now on, whose storages torch resizes, which no operator tells."""
        if not parameters:
            return
        found = self.resized_bytes

        # Without a name for the trace: with one it would hold itself, and wait for the garbage collector.
        def note() -> None:
            found.append(gathered_bytes(parameters))

        self._ledger.before_event = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # fakes are asked for their device by an operator
            return func(*args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if schema_of(func).is_mutable and args and isinstance(args[0], torch.Tensor):
            allocation = self._made(args[0])
            # A dropout fills its mask with draws, all of it, and scales it then. Any other write
            # makes something else of it.
            if func in _IN_PLACE and allocation is not None and args[0].nbytes == allocation.num_bytes:
                self.masks.add(allocation)
            elif not _scales(func, args) and allocation is not None:
                self.masks.discard(allocation)
        elif _fills(func, args) and (allocation := self._made(out)) is not None:
            self.masks.add(allocation)
        return out

    def observed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, OperatorMemory]:
        """Refuses tensors on absent devices, before autograd sees them; see [Note: where fakes are] in fake.py."""
        if func is aten.mkldnn_rnn_layer.default:
            raise RuntimeError("what a recurrent layer's library keeps is not known to fake tensors")
        out, seconds, taken = super().observed(func, args, kwargs)
        results = out if isinstance(out, list | tuple) else (out,)
        for leaf in results:
            if isinstance(leaf, torch.Tensor) and leaf.device.type not in (self._device.type, "cpu", "meta"):
                raise RuntimeError(f"the step makes a tensor on {leaf.device}; write device=x.device, or self.device")
        return out, seconds, taken

    def _made(self, tensor: torch.Tensor) -> Allocation | None:
        return self.allocation_of(tensor.untyped_storage())


class FakeCosts(RooflineCosts):
    """Watches a step on fake tensors.

    Args:
        mode: Whose fakes they are.
        here: The device that they claim to be on.
        target: What is planned for.
        numbers: Whether small whole numbers stay real.
    """

    kinds = (torch.Tensor, FakeTensor)

    def __init__(
        self,
        mode: FakeTensorMode,
        here: torch.device,
        target: torch.device,
        *,
        numbers: bool,
    ) -> None:
        super().__init__(here, target)
        self._mode = mode
        self._numbers = numbers
        self._traces = list[FakeTrace]()
        # Of an accelerator nothing is taken while it is planned for: others may be at work there.
        self._probe = Probe(here, self.rates) if is_host(target) else None
        inside = "by rule" if self._probe is None else "tried one by one"
        self.basis: str = (
            f"from fake tensors for {target}: times by FLOPs and bytes, what operators take inside {inside}, "
            "recomputation not proven here"
        )

    def preserve_module_state(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Restores all but tensors, which are fakes in the module's place."""
        return untouched(module, tensors=False, reach=self.reach_of(module))

    def trace(self) -> MemoryTrace:
        """Follows the storages of a run."""
        # All of them are kept: what their runs have left behind is looked for at the very end.
        self._traces.append(FakeTrace(self.device, self._target, self._probe, numbers=self._numbers))
        return self._traces[-1]

    def _watch(self) -> RatedTrace:
        return RatedTrace(self.device, self._target, fake=True, probe=self._probe, numbers=self._numbers)

    @property
    def left_behind(self) -> int:
        """How many of the storages that were watched are still there."""
        count = 0
        for trace in self._traces:
            count += sum(allocation.died is None for allocation in trace.allocations)
        return count

    @contextmanager
    def trying(self) -> Iterator[None]:
        """What operators make when they are repeated is fake, too."""
        with self._mode:
            yield

    def is_same(self, again: torch.Tensor, original: torch.Tensor) -> bool:
        """True: fakes have no numbers to compare, so it is assumed."""
        return True

    def is_mask(self, value: Value, span: Allocation) -> bool:
        """Whether a dropout has drawn it."""
        # The last trace is that of the run whose values are tried.
        return span in self._traces[-1].masks


def _fills(func: Any, args: Any) -> bool:
    """Whether an operator makes a tensor of zeros and one other number."""
    # Truth values in a dtype of numbers are zeros and ones.
    return func.overloadpacket in _CONSTANTS or (func is aten._to_copy.default and args[0].dtype is torch.bool)


def _scales(func: Any, args: Any) -> bool:
    """Whether an operator in place multiplies by a number."""
    if func not in (aten.div_.Scalar, aten.div_.Tensor, aten.mul_.Scalar, aten.mul_.Tensor):
        return False
    return not isinstance(args[1], torch.Tensor) or args[1].ndim == 0
