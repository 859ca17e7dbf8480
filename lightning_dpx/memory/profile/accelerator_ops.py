"""What accelerators keep of an operator that the CPU runs another way."""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class AsOnAccelerators(TorchFunctionMode):
    """Dropout and attention of a step on the CPU keep what they would keep on an accelerator.

    Dropout keeps a byte per element there, and on the CPU a number. Attention with dropout keeps no scores there: its
    kernels draw them again, so that without dropout as much is kept.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            p = given.get("p", 0.5)
            training = given.get("training", given.get("train", True))
            if training and 0 < p < 1 and not given.get("inplace"):
                return torch.native_dropout(given["input"], p, True)[0]
        # Attention that returns its weights has scores in memory on every device.
        if func in _DROPOUT_OF and not (func is F.multi_head_attention_forward and kwargs.get("need_weights", True)):
            position = _DROPOUT_OF[func]
            kwargs = kwargs if len(args) > position else {**kwargs, "dropout_p": 0.0}
            args = (*args[:position], 0.0, *args[position + 1 :]) if len(args) > position else args
        return func(*args, **kwargs)


_DROPOUT_OF = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}  # where attention takes it
