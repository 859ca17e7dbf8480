"""What accelerators keep of an operator that the CPU runs another way."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_dpx.torch_compat import FakeTensor

aten: Any = torch.ops.aten


class AsOnAccelerators(TorchFunctionMode):
    """Dropout, attention and LSTM cells of a step on the CPU keep what they would keep on an accelerator.

    Dropout keeps a byte per element there, and on the CPU a number. Attention with dropout keeps no scores there: its
    kernels draw them again, so that without dropout as much is kept. CUDA has one kernel for an LSTM cell, which keeps
    the gates before their functions: with it an unrolled LSTM keeps twice as much. Only fakes can stand in for it; a
    GRU cell has a kernel as well, for which torch has no rule for fakes.

    Args:
        target: What is planned for.
    """

    def __init__(self, target: torch.device) -> None:
        super().__init__()
        self._has_fused_cells = target.type == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            p = given.get("p", 0.5)
            training = given.get("training", given.get("train", True))
            if training and 0 < p < 1 and not given.get("inplace"):
                return torch.native_dropout(given["input"], p, True)[0]
        if func is torch.lstm_cell and self._has_fused_cells:
            given = dict(zip(_OF_LSTM_CELL, args, strict=False)) | kwargs
            # The CPU has no such kernel, but a rule for fakes of it.
            if isinstance(given["input"], FakeTensor):
                return _fused_lstm_cell(given)
        # Attention that returns its weights has scores in memory on every device.
        if func in _DROPOUT_OF and not (func is F.multi_head_attention_forward and kwargs.get("need_weights", True)):
            position = _DROPOUT_OF[func]
            kwargs = kwargs if len(args) > position else {**kwargs, "dropout_p": 0.0}
            args = (*args[:position], 0.0, *args[position + 1 :]) if len(args) > position else args
        return func(*args, **kwargs)


def _fused_lstm_cell(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    x: Tensor = given["input"]
    hidden, cell = given["hx"]
    gates = x.mm(given["w_ih"].t()), hidden.mm(given["w_hh"].t())
    biases = given.get("b_ih"), given.get("b_hh")
    # The kernel takes none, but its rule for fakes asks each for its device.
    if biases[0] is None:
        none = gates[0].new_zeros(gates[0].shape[1])
        biases = none, none
    new: tuple[Tensor, Tensor, Tensor] = aten._thnn_fused_lstm_cell(*gates, cell, *biases)
    return new[0], new[1]


_OF_LSTM_CELL = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
_DROPOUT_OF = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}  # where attention takes it
