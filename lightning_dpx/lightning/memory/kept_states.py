"""How much an optimizer will keep for its parameters: tried on a small shadow, or known by names of its settings."""

import weakref
from typing import Any

import torch

from lightning_dpx.lightning.memory.auto_shift import states_of
from lightning_dpx.lightning.memory.shadow_optimizer import ShadowOptimizer, trained_by, with_shadow_optimizer
from lightning_dpx.torch_compat import tree_leaves

# By optimizer, for so many bytes that it changes. A shadow takes memory of its own: in the first step, where a profile
# takes more, and not before each look at the room of later ones.
_KNOWN: "weakref.WeakKeyDictionary[Any, tuple[int, float]]" = weakref.WeakKeyDictionary()


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
    kept = with_shadow_optimizer(optimizer, _bytes_kept)
    if kept is None or not trained:
        return states_of(optimizer)
    return kept / trained


def _bytes_kept(shadow: ShadowOptimizer) -> float:
    """Bytes of what a shadow keeps, without the numbers that count its steps."""
    leaves = [leaf for state in shadow.optimizer.state.values() for leaf in tree_leaves(state)]
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
