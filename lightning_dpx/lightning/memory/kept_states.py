"""How much an optimizer will keep for its parameters: tried on a small shadow, or known by names of its settings."""

import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lightning_dpx.devices import is_host
from lightning_dpx.lightning.memory.auto_shift import states_of
from lightning_dpx.lightning.memory.shadow_optimizer import ShadowOptimizer, trained_by, with_shadow_optimizer
from lightning_dpx.torch_compat import tree_leaves

# By optimizer, for so many bytes that it changes. A shadow takes memory of its own: in the first step, where a profile
# takes more, and not before each look at the room of later ones. By its id, as one that says which others equal it
# cannot be a key.
_KNOWN: "MutableMapping[Any, tuple[int, float]]" = WeakIdKeyDictionary()


def times_kept(optimizer: Any) -> float:
    """Bytes of an optimizer's state over those of the parameters that it changes."""
    trained = sum(parameter.nbytes for parameter in trained_by(optimizer))
    known = _KNOWN.get(optimizer)
    if known is None or known[0] != trained:
        known = trained, _found(optimizer, trained)
        _KNOWN[optimizer] = known
    return known[1]


def _found(optimizer: Any, trained: int) -> float:
    # Some keep sums over rows and columns only, or something for matrices alone: no setting tells of that.
    elsewhere = any(not is_host(parameter.device) for parameter in trained_by(optimizer))
    kept = with_shadow_optimizer(optimizer, _bytes_kept, elsewhere=elsewhere)
    if kept is None or not trained:
        return states_of(optimizer)
    return kept / trained


def _bytes_kept(shadow: ShadowOptimizer) -> float:
    """Bytes of what the optimizer itself will keep, without the numbers that count its steps."""
    kept = 0
    for part, parameter in shadow.parts:
        for leaf in tree_leaves(shadow.optimizer.state.get(part, {})):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                kept += _numbers_of_whole(leaf, part, parameter) * leaf.element_size()
    return kept


def _numbers_of_whole(leaf: torch.Tensor, part: torch.Tensor, parameter: torch.Tensor) -> int:
    """How many numbers the optimizer itself has where its shadow has ``leaf``."""
    # Of a part of the rows, sums over rows are as long as those of all: bytes do not grow together with a parameter's.
    if leaf.dim() != part.dim():
        return leaf.numel() * parameter.numel() // max(1, part.numel())
    sizes = zip(leaf.shape, part.shape, parameter.shape, strict=True)
    return math.prod(whole if size == few else size for size, few, whole in sizes)
