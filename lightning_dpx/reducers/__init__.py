"""The way of the gradients from K replicas to the owner of each parameter."""

from lightning_dpx.reducers.base import REDUCERS, GradientReducer, choose_reducer, make_reducer, register_reducer
from lightning_dpx.reducers.buckets import GradientPacker
from lightning_dpx.reducers.collective import CollectiveReducer
from lightning_dpx.reducers.colocate import ColocateReducer
from lightning_dpx.reducers.communication_hooks import CommunicationHook, make_communication_hook
from lightning_dpx.reducers.hierarchical import HierarchicalReducer
from lightning_dpx.reducers.naive import NaiveReducer
from lightning_dpx.reducers.nccl import NCCLReducer
from lightning_dpx.reducers.overlap import OverlappedReduction
from lightning_dpx.reducers.placement import least_loaded_placement, small_aside_placement
from lightning_dpx.reducers.processes import (
    ProcessReducer,
    Waits,
    between_processes,
    describe_loss,
    is_loss_of_a_process,
)
from lightning_dpx.reducers.roll_call import current_roll_call, declare_failed, start_roll_call, stop_roll_call

__all__ = [
    "REDUCERS",
    "CollectiveReducer",
    "CommunicationHook",
    "ColocateReducer",
    "OverlappedReduction",
    "GradientPacker",
    "GradientReducer",
    "HierarchicalReducer",
    "NCCLReducer",
    "NaiveReducer",
    "ProcessReducer",
    "Waits",
    "between_processes",
    "describe_loss",
    "is_loss_of_a_process",
    "choose_reducer",
    "current_roll_call",
    "declare_failed",
    "least_loaded_placement",
    "make_communication_hook",
    "make_reducer",
    "register_reducer",
    "small_aside_placement",
    "start_roll_call",
    "stop_roll_call",
]
