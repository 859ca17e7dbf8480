"""The values of the last forward, by what their tensors are: one that is saved again is no new value."""

import math
import weakref
from typing import Any

import torch

from lightning_dpx.memory.execute.tensor_identity import Identity, identity_of
from lightning_dpx.memory.execute.values import Value

_NOT_AGAIN: tuple[Any, Any] = (lambda: None), None


class KnownValues:
    """Values by identity, weakly."""

    __slots__ = ("_again", "_by_storage", "_saved")

    def __init__(self) -> None:
        self._saved: dict[Identity, weakref.ref[Value]] = {}
        self._by_storage: dict[int, Identity] = {}  # of the value that was saved last
        self._again: dict[Identity, tuple[Any, Any]] = {}  # of what was made again, with its storage; both weakly

    def __contains__(self, identity: Identity) -> bool:
        return identity in self._saved

    def begin(self) -> None:
        """Another forward begins: the values of the one before are not its own."""
        # What an earlier backward has made again stays known as long as its memory lives.
        self._saved.clear()
        self._by_storage.clear()

    def add(self, identity: Identity, value: Value) -> None:
        """``value`` is saved, and its tensor has that identity."""
        self._saved[identity] = weakref.ref(value)
        self._by_storage[identity.storage] = identity

    def around(self, lies: Identity) -> Value | None:
        """The value that a tensor is a part of which lies so, if nothing was written there between the two."""
        identity = self._by_storage.get(lies.storage)
        if identity is None or identity.version != lies.version or identity.dtype != lies.dtype:
            return None
        # One that is made again has no elements between its own.
        first, behind = _extent(identity)
        if behind - first != math.prod(identity.size):
            return None
        begin, end = _extent(lies)
        if begin < first or end > behind:
            return None
        return self.saved(identity)

    def saved(self, identity: Identity) -> Value | None:
        """The value of that identity, if the last forward has saved it."""
        known = self._saved.get(identity)
        if known is None:
            return None
        return known()

    def find(self, identity: Identity) -> Value | None:
        """The value of that identity, saved by the last forward or made again since."""
        value = self.saved(identity)
        # Only a backward that records gradients leaves anything there.
        if value is None and self._again:
            value = self._again.get(identity, _NOT_AGAIN)[0]()
        return value

    def know_again(self, value: Value, tensor: torch.Tensor) -> None:
        """As long as its memory lives, ``tensor`` is ``value``: a backward that records gradients saves it once more.

        Otherwise it would get a name of its own, and all values after it the names of others.
        """
        identity = identity_of(tensor)
        # An identity is good only while the memory lives: its address may be given out again then.
        storage = weakref.ref(tensor.untyped_storage(), lambda _: self._again.pop(identity, None))
        self._again[identity] = weakref.ref(value), storage

    def present(self) -> list[Value]:
        """The values of the last forward that something still holds."""
        return [value for reference in self._saved.values() if (value := reference()) is not None]

    def share_waiting(self) -> float:
        """Which share of the bytes that the last forward has saved waits for a backward."""
        waiting = 0
        total = 0
        for identity, reference in self._saved.items():
            num_bytes = math.prod(identity.size) * identity.dtype.itemsize
            total += num_bytes
            if reference() is not None:
                waiting += num_bytes
        if not total:
            return 0.0
        return waiting / total


def _extent(identity: Identity) -> tuple[int, int]:
    """The first element in its memory, and the one behind the last."""
    last = identity.offset
    for size, step in zip(identity.size, identity.stride, strict=True):
        last += (size - 1) * step
    return identity.offset, last + 1
