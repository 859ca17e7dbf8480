"""Attributes as they were, to be compared with what they are now; no tensor is kept alive for it."""

import weakref
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
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


@dataclass(frozen=True, slots=True)
class _SeenItems:
    """A container as it was, item by item; neither it nor what it held is kept alive.

    Attributes:
        kind: Its class.
        keys: Of a mapping; ``None`` of a sequence.
        items: What it held, each as :func:`content_of` has it.
    """

    kind: type
    keys: tuple[Any, ...] | None
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _SeenArray:
    """An array as it was."""

    shape: tuple[int, ...]
    checksum: int


def content_of(value: Any) -> Any:
    """What ``value`` is and holds now, for :func:`is_content_of`; objects of other classes count by identity."""
    if isinstance(value, torch.Tensor):
        return SeenTensor(weakref.ref(value), version_of(value))
    if isinstance(value, np.ndarray):
        return _SeenArray(value.shape, zlib.crc32(value.tobytes()))
    if isinstance(value, Mapping):
        return _SeenItems(type(value), tuple(value), tuple(map(content_of, value.values())))
    if isinstance(value, list | tuple | deque):
        return _SeenItems(type(value), None, tuple(map(content_of, value)))
    return value


def is_content_of(seen: Any, value: Any) -> bool:
    """Whether ``value`` is and holds what was seen."""
    kind: Any = type(value)
    if isinstance(seen, _SeenArray):
        return isinstance(value, np.ndarray) and content_of(value) == seen
    if isinstance(seen, _SeenItems):
        if kind is not seen.kind or len(value) != len(seen.items):
            return False
        if seen.keys is None:
            return all(map(is_content_of, seen.items, value))
        return tuple(value) == seen.keys and all(map(is_content_of, seen.items, value.values()))
    # A number that is computed anew may be the same number and another object.
    are_numbers = isinstance(seen, int | float) and type(value) is type(seen)
    return is_still(seen, value) or (are_numbers and seen == value)
