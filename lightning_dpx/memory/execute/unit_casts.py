"""What sharding does beside gathering parameters: units take and give tensors in the dtypes of their policy."""

from typing import Any

import torch
from torch import nn

from lightning_dpx.torch_compat import forward_pre_hooks_of, tree_map_only


class UnitCasts:
    """The hooks of a unit while its sharding is off: inputs and outputs are cast, nothing is gathered.

    Args:
        inputs: What inputs are cast to, if to anything.
        outputs: What outputs are cast to, if to anything.
    """

    def __init__(self, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
        self._inputs = inputs
        self._outputs = outputs

    @property
    def needed(self) -> bool:
        """Whether anything is cast."""
        return self._inputs is not None or self._outputs is not None

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Hook before a forward, with keyword arguments."""
        return self.taken(args), self.taken(kwargs)

    def after(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        """Hook after a forward."""
        return _cast(outputs, self._outputs)

    def taken(self, inputs: Any) -> Any:
        """What the unit makes of its inputs."""
        return _cast(inputs, self._inputs)


def is_cast(hook: Any) -> bool:
    """Whether it is a hook of :class:`UnitCasts`."""
    return isinstance(getattr(hook, "__self__", None), UnitCasts)


def as_taken_by(unit: nn.Module, inputs: Any) -> Any:
    """What a unit whose sharding is off makes of inputs, for a step that does not call the unit itself."""
    for hook in forward_pre_hooks_of(unit).values():
        if is_cast(hook):
            inputs = hook.__self__.taken(inputs)
    return inputs


def _cast(nested: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return nested

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    return tree_map_only(torch.Tensor, cast, nested)
