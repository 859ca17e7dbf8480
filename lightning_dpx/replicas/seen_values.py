"""Attributes as they were, to be compared with what they are now; no tensor is kept alive for it."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.replicas.remote_tensor import version_of


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """A tensor as it was; held weakly, or the graph behind it would outlive the step."""

    tensor: "weakref.ref[torch.Tensor]"
    version: int


def remembered(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """``attributes`` as they are now, for :func:`is_still`."""
    seen = dict(attributes)
    for key, value in attributes.items():
        if isinstance(value, torch.Tensor):
            seen[key] = SeenTensor(weakref.ref(value), version_of(value))
    return seen


def is_still(seen: Any, value: object) -> bool:
    """Whether ``value`` is the object that was seen, and, if it is a tensor, has not been written since."""
    if isinstance(seen, SeenTensor):
        return isinstance(value, torch.Tensor) and seen.tensor() is value and seen.version == version_of(value)
    return seen is value
