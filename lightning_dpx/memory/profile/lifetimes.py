"""How long saved tensors would live without autograd, from a run in which it keeps nothing, or uncounted copies."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.saved_tensor_hooks import Rematerialization
from lightning_dpx.memory.execute.values import Unnamed, Value
from lightning_dpx.memory.profile.costs import CostModel
from lightning_dpx.memory.profile.held_output import end_forward
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.memory.tracing.storage_ledger import Allocation
from lightning_dpx.torch_compat import disable_current_modes, version_counter, view_base


class AsksItselfError(Exception):
    """A run in which nothing was kept has a backward of its own."""


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long a run itself uses what autograd saves.

    Attributes:
        last_uses: By name, the number of operators that have run when a value is last used; ``None`` for what is
            there to the last.
        num_operators: Of the run.
    """

    last_uses: dict[str, int | None]
    num_operators: int

    def last_use(self, name: str, num_operators: int) -> int | None:
        """The last use of a value in another run, which is the same if it has ``num_operators``."""
        # Of a run that took another path nothing is known: all counts as used to the end of
        # forward.
        if num_operators == self.num_operators:
            return self.last_uses.get(name)
        return num_operators


def natural_lifetimes(
    names: CallNames,
    run: Callable[[], Any],
    costs: CostModel,
    context: Callable[[], AbstractContextManager[Any]],
    *,
    copies: bool = False,
) -> Lifetimes:
    """Runs a forward in which autograd holds nothing.

    Args:
        names: Tells which module call is running.
        run: The forward.
        costs: Makes the trace.
        context: Entered for the forward.
        copies: Whether copies are kept, for a run that has backwards of its own.

    Raises:
        AsksItselfError: the run has a backward of its own, and no copies are kept.
    """
    trace = costs.trace().follow_storages_only()
    hooks = _LifetimeHooks(names, trace, costs, copies=copies)
    with trace, context(), hooks.active():
        result = run()
        count = len(trace.operators)
        end_forward(run)
    if hooks.asks_itself:  # and the error was caught
        raise AsksItselfError
    # Asked before the result goes: what only the loss holds is there to the last.
    last_uses: dict[str, int | None] = {}
    for name, span in hooks.spans.items():
        last_uses[name] = None if span is None else span.died_operator
    del result
    return Lifetimes(last_uses, count)


class _LifetimeHooks(Rematerialization):
    """Let go of everything at once, and note whose memory it was.

    Attributes:
        asks_itself: Whether a backward of the run's own found nothing.
        spans: The memory of every value that was saved, by name.
    """

    def __init__(self, names: CallNames, trace: MemoryTrace, costs: CostModel, *, copies: bool) -> None:
        super().__init__(names)
        self.kinds = costs.kinds
        self._costs = costs
        self._trace = trace
        self._copies = copies
        self.asks_itself = False
        self.spans: dict[str, Allocation | None] = {}

    def bytes_of(self, tensor: torch.Tensor) -> int:
        return self._costs.bytes_in_step(tensor)

    def pack(self, tensor: torch.Tensor) -> Any:
        base = view_base(tensor)
        whole = tensor if base is None else base
        if isinstance(whole, nn.Parameter):  # a fake one has no type, a frozen one needs no name
            return Unnamed(tensor.detach(), version_counter(tensor))
        packed = super().pack(tensor)
        if isinstance(packed, Unnamed):
            return packed
        value = packed if isinstance(packed, Value) else packed.value
        is_new = value.name not in self.spans
        if is_new:
            self.spans[value.name] = self._trace.allocation_of(tensor.untyped_storage())
        # The value forgets the tensor, and keeps its identity from being given to another one: so
        # the memory goes when the run itself has no more use for it.
        if not self._copies:
            value.let_go(tensor)
        elif is_new:
            self._keep_copy(value, whole)
        return packed

    def _keep_copy(self, value: Value, tensor: torch.Tensor) -> None:
        """A backward of the run's own finds the numbers, and ``tensor`` goes when nothing else needs it."""
        if value.tensor is None:
            return
        with disable_current_modes(), torch.no_grad():
            copied = value.tensor.clone()
        value.let_go(tensor)
        value.keep(copied)
        self.known.know_again(value, copied)  # where a backward that records gradients saves it once more

    def consider(self, value: Value, node: Any | None, output: int) -> bool:
        """Drops nothing, and looks for no recipes."""
        del value, node, output
        return False

    def unpack(self, saved: Any) -> torch.Tensor:
        if not self._copies:
            self.asks_itself = True
            raise AsksItselfError
        return super().unpack(saved)
