"""Ranks that are not there: a process group of any size in one process, in which ``fully_shard`` shards as it would.

Its collectives return at once and move nothing, so what comes out of them is no number to work with. What torch
allocates for them is what it allocates in a real group, and that is all that is looked at here.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from lightning_dpx.errors import ConfigurationError, UnsupportedError, some_of
from lightning_dpx.torch_compat import fake_store, is_traceable_wrapper_subclass


@contextmanager
def absent_ranks(num_ranks: int) -> Iterator[Any]:
    """A context in which this process is the first of ``num_ranks``, as ModelParallelStrategy sets them up.

    Yields:
        Its mesh, with the dims ``"data_parallel"``, of all ranks, and ``"tensor_parallel"``, of one.

    Raises:
        UnsupportedError: there is a process group already.
    """
    if dist.is_initialized():
        raise UnsupportedError(
            "What sharded ranks take is predicted in a process of its own, and this one has a process group already."
        )
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    finally:
        dist.destroy_process_group()


class NothingPinned(TorchFunctionMode):
    """Tensors stay where they are, instead of in pinned memory: that takes an accelerator, and none need be there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func`` unless it pins."""
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **(kwargs or {}))


def shard_units(module: nn.Module, patterns: Sequence[str], mesh: Any) -> None:
    """Calls ``fully_shard`` on the parts of ``module`` that ``patterns`` name, inner ones first.

    Args:
        module: Is changed.
        patterns: Names of modules, in which ``*`` stands for anything between two dots; ``"."`` is the module itself.
        mesh: Over which parameters are sharded.

    Raises:
        ConfigurationError: a pattern names no module, or a parameter is in no unit.
    """
    # Slow to import, and only of use here.
    from torch.distributed.fsdp import fully_shard

    # Inner ones first: an outer unit takes the parameters that are in none yet.
    for path in sorted(_paths(module, patterns), key=_depth, reverse=True):
        fully_shard(module.get_submodule(path), mesh=mesh)
    left = [name for name, one in module.named_parameters() if not is_traceable_wrapper_subclass(one)]
    if left:
        holder = left[0].rpartition(".")[0] or "."
        raise ConfigurationError(
            f"{some_of(left)} are in no unit of --shard-units; every rank would have them whole, and "
            f"their gradients would not be averaged. Name what holds them as well, such as --shard-units {holder}."
        )


def _depth(path: str) -> int:
    if path:
        return path.count(".") + 1
    return 0


def _paths(module: nn.Module, patterns: Sequence[str]) -> set[str]:
    found: set[str] = set()
    names = [name for name, _ in module.named_modules()]
    for pattern in patterns:
        wanted = "" if pattern == "." else pattern
        matching = {name for name in names if _matches(name, wanted)}
        if not matching:
            # The first name is that of the module itself, which is empty.
            raise ConfigurationError(
                f"--shard-units {pattern} names no module of {type(module).__name__}; it has "
                f"{', '.join(name for name in names[1:8])}, ..."
            )
        found |= matching
    return found


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    wanted = pattern.split(".")
    # Part by part, or a unit's own layers would be units as well.
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
