"""Hooks that run between the steps use parameters and gradients of both sides of a cut; one device would let them."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_dpx.shifting.device_mode import LEFT_WHERE_THEY_ARE, in_shifted_step, writes_in_place
from lightning_dpx.torch_compat import tree_leaves, tree_map_only

Pair = tuple[torch.device, torch.device]  # where the rest of a module runs, and where its shifted parts do


class BetweenSteps(TorchFunctionMode):
    """Operators whose operands lie on both sides of a cut run where they write, or else where the rest runs.

    All others are left alone, so optimizers, and hooks that write one parameter after the other, act in place.

    Attributes:
        pairs: The cuts of all replicas; none at first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pairs: Sequence[Pair] = ()
        self._thread = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Operators on lists work item by item; steps bring their operands by themselves; autograd's threads get this
        # mode, too.
        alone = name in LEFT_WHERE_THEY_ARE or name == "copy_" or name.startswith("_foreach_")
        if not self.pairs or alone or _has_one_side(args, kwargs):
            return func(*args, **kwargs)
        if in_shifted_step() or threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        # A number in a tensor of the host may meet any device, as torch has it, and so decides nothing.
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in tensors if tensor.ndim or tensor.device.type != "cpu"}
        pair = next((pair for pair in self.pairs if devices <= set(pair)), None) if len(devices) > 1 else None
        if pair is None:
            return func(*args, **kwargs)
        here = pair[0]
        if isinstance(kwargs.get("out"), torch.Tensor):
            here = kwargs["out"].device
        elif writes_in_place(name, kwargs) and args and isinstance(args[0], torch.Tensor):
            here = args[0].device

        def bring(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device in pair and tensor.device != here:
                return tensor.to(here)
            return tensor

        args, kwargs = tree_map_only(torch.Tensor, bring, (args, kwargs))
        return func(*args, **kwargs)


def _has_one_side(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is one tensor at the most, as in nine of ten calls; decided without a walk."""
    operands = [*args, *kwargs.values()]
    kinds = [isinstance(one, torch.Tensor) for one in operands]
    return sum(kinds) < 2 and not any(isinstance(one, list | tuple | dict) for one in operands)
