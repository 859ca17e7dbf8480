"""Parts of a model, with what they keep for backward, on another device (Caffe2's device shifts)."""

from lightning_dpx.shifting.api import (
    applied_shift,
    apply_shift,
    forget_shift,
    has_shifts,
    shift_activations,
    shift_like,
    unshift_activations,
)
from lightning_dpx.shifting.auto import Part, choose_parts, parts_of, scaled
from lightning_dpx.shifting.between_steps import BetweenSteps
from lightning_dpx.shifting.choose import check_shifts
from lightning_dpx.shifting.device_mode import unshifted
from lightning_dpx.shifting.offload import offload_activations, unoffload_activations
from lightning_dpx.shifting.shift import Shift

__all__ = [
    "BetweenSteps",
    "Part",
    "Shift",
    "applied_shift",
    "apply_shift",
    "check_shifts",
    "choose_parts",
    "forget_shift",
    "has_shifts",
    "offload_activations",
    "parts_of",
    "scaled",
    "shift_activations",
    "shift_like",
    "unoffload_activations",
    "unshift_activations",
    "unshifted",
]
