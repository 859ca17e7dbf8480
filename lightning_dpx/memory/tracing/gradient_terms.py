"""Which operators of backward are sums of gradients, and which of their terms such a sum may be made in.

While any dispatch mode is on, autograd adds up the gradients of a value of several uses out of place, and otherwise in
place: into the term that it has got first, the first operand of the sum, unless that is a view, or others hold its
memory. Its formulas for what was gathered, indexed or sorted do likewise with the zeros that they have just made and
fill.
"""

import sys
from types import FrameType
from typing import Any

import torch

from lightning_dpx.memory.tracing.storage_ledger import Allocation, StorageLedger
from lightning_dpx.torch_compat import current_graph_task_id, engine_code, is_view, key_of

aten: Any = torch.ops.aten
_CONSTANTS = {aten.new_zeros, aten.zeros, aten.zeros_like}
_FILLING = {aten.index_add, aten.index_put, aten.put, aten.scatter, aten.scatter_add}
_BETWEEN = {"__torch_dispatch__", "_fn", "inner"}  # modes, and torch's own wrapping of them
_ENGINE = engine_code


class GradientTerms:
    """Finds the term that autograd would have added a sum of gradients to, if no mode were on.

    Args:
        ledger: Of the storages of the step.
    """

    def __init__(self, ledger: StorageLedger) -> None:
        self._ledger = ledger
        self._constant: Allocation | None = None  # the last one that was made

    def note_made(self, func: Any, allocation: Allocation) -> None:
        """An operator has made this storage: constants that are filled next are remembered."""
        if func.overloadpacket in _CONSTANTS:
            self._constant = allocation

    def term_of(self, func: Any, args: Any, out: Any) -> Allocation | None:
        """The memory in which ``out`` may be, if the operator is a sum of gradients; ``None`` if it is none."""
        is_sum = func is aten.add.Tensor
        if not (is_sum or func.overloadpacket in _FILLING) or not _called_by_engine():
            return None
        term = args[0] if args else None
        if not isinstance(term, torch.Tensor) or not identity(term) or not identity(out) or is_view(term):
            return None
        known = self._ledger.allocation_of(term.untyped_storage())
        # Zeros are filled in place only right after they were made.
        if known is None or (not is_sum and known is not self._constant):
            return None
        # A sum of another size, as after broadcasting, has no room in its term.
        if known.num_bytes != out.untyped_storage().nbytes():
            return None
        return known


def identity(tensor: torch.Tensor) -> int:
    """The key of the storage of a tensor; 0 where it has none of its own, such as sparse tensors."""
    if tensor.layout is torch.strided:
        return key_of(tensor.untyped_storage())
    return 0


def _called_by_engine() -> bool:
    """Whether autograd's engine itself calls the mode, and no Python code that runs in backward."""
    # A backward that records gradients never adds in place.
    if current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)
    # The frames up to the mode are this package's own, however many there are.
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name in _BETWEEN:
        frame = frame.f_back
    return frame is None or frame.f_code is _ENGINE  # a thread of the engine has no other frames
