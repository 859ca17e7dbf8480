"""Which tensors every copy of a module has copies of, beside those of parameters and buffers."""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.object_graph import ObjectGraph, is_tensor_or_module
from lightning_dpx.replicas.copying.module_copy import attribute_values
from lightning_dpx.replicas.copying.shared_objects import is_shared, modules_without
from lightning_dpx.torch_compat import stored_parts


def copied_tensors(module: nn.Module, keep: Sequence[object] = ()) -> list[torch.Tensor]:
    """Tensors in attributes of submodules, and in what these hold: containers, objects, modules in a list.

    Args:
        module: Whose.
        keep: Objects that copies hold by reference, with what they hold.
    """
    kept = frozenset(map(id, keep))
    children = list(modules_without(module, kept))
    structure = set(map(id, chain(children, module.parameters(), module.buffers())))
    graph = ObjectGraph(
        is_tensor_or_module,
        lambda value: _ends_walk(value, kept, structure),
        # A teacher in a list, say, is copied with all that it has.
        lambda value: isinstance(value, nn.Module),
        skips_data=True,
    )
    graph.walk(chain.from_iterable(map(attribute_values, children)))
    return [value for key, value in graph.objects.items() if key not in structure and _has_memory(value)]


def _ends_walk(value: Any, kept: Collection[int], structure: Collection[int]) -> bool:
    """Whether it is shared, or has its counterpart in the copy by its place in the module."""
    return id(value) in structure or is_shared(value, kept)


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta and bool(stored_parts(value))
