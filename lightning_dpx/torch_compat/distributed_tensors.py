"""Tensors of which every process has a part (DTensor), and process groups whose other ranks are not there."""

import types as python_types
from typing import Any

import torch
from torch.distributed import distributed_c10d as _c10d

_HOMES_OF_LAYOUT_HOOKS = ("torch.distributed.tensor._api", "torch.distributed.tensor.parallel.style")

# Under such names fully_shard and its like keep what they know of a module.
COMPOSABLE_STATE = "__composable_api_"


def with_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A distributed tensor (DTensor) like ``tensor``, of which this process has ``part``."""
    like: Any = tensor.detach()
    made = distributed_like(part, like.device_mesh, like)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made


def distributed_like(part: torch.Tensor, mesh: Any, like: Any) -> torch.Tensor:
    """A distributed tensor with the placements, shape and strides of ``like``, of which this process has ``part``."""
    # Slow to import, and there already where it is needed.
    from torch.distributed.tensor import DTensor

    stride = like.stride() if callable(like.stride) else like.stride
    # No process is asked anything: all know the whole.
    made = DTensor.from_local(part, mesh, like.placements, run_check=False, shape=like.shape, stride=stride)
    return made.detach()


def is_layout_hook(hook: Any) -> bool:
    """Whether ``parallelize_module`` has registered it: it brings what a module is given, or gives, to another layout.

    What was given to ``distribute_module`` for that may do anything, unless it is torch's own. So may a style of the
    user's.
    """
    if getattr(hook, "__module__", "") not in _HOMES_OF_LAYOUT_HOOKS:
        return False
    for cell in getattr(hook, "__closure__", None) or ():
        given = getattr(cell.cell_contents, "func", cell.cell_contents)
        is_code = isinstance(given, python_types.FunctionType | python_types.MethodType)
        home = given.__module__ if is_code else type(given).__module__
        if not home.startswith("torch.distributed."):
            return False
    return True


def on_distributed_tensors(types: Any) -> bool:
    """Whether an operator takes tensors of which each process has a part (DTensor).

    A dispatch mode leaves it to them: what they then do with the parts, and between processes, comes to the mode again.
    """
    # By the name of the module, which need not be imported for it.
    return any(kind.__module__.startswith("torch.distributed.tensor") for kind in types)


def fake_store() -> Any:
    """The store of a process group "fake", whose other ranks are not there and whose collectives do nothing."""
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()  # type: ignore[no-untyped-call]


def default_store() -> Any:
    """The store of the default process group."""
    return _c10d._get_default_store()  # type: ignore[attr-defined]
