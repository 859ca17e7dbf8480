"""What ``fully_shard`` does beside gathering parameters: units take and give tensors in the dtypes of their policy."""

from typing import Any

import torch
from torch import nn

from lightning_dpx.torch_compat import tree_map_only


class UnitCasts:
    """The hooks of a unit of ``fully_shard`` while it is off: inputs and outputs are cast, nothing is gathered.

    Args:
        policy: The ``MixedPrecisionPolicy`` of the unit.
    """

    def __init__(self, policy: Any) -> None:
        self._inputs: torch.dtype | None = policy.param_dtype if policy.cast_forward_inputs else None
        self._outputs: torch.dtype | None = policy.output_dtype

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Hook before a forward, with keyword arguments."""
        return _cast(args, self._inputs), _cast(kwargs, self._inputs)

    def after(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        """Hook after a forward."""
        return _cast(outputs, self._outputs)


def _cast(nested: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return nested

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, nested)
