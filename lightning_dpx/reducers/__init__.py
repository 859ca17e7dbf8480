"""Second sibling: the way of the gradients from K replicas to the owner of each parameter."""

from lightning_dpx.reducers import naive as _naive  # registers itself
from lightning_dpx.reducers.base import REDUCERS, GradientReducer, make_reducer, register_reducer

__all__ = ["REDUCERS", "GradientReducer", "make_reducer", "register_reducer"]

del _naive
