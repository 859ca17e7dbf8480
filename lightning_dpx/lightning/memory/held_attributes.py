"""Tensors that modules hold in attributes beside parameters and buffers: before the first step, and what steps leave.

What a step leaves there comes in the place of what the one before has left, and is counted with the profile of a step
(``left_behind``). So only what was there before the first step counts by itself; and what is more than both, as where
lists grow with every step.
"""

import weakref
from collections.abc import Iterable
from itertools import chain

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.torch_compat import bytes_of, key_of, stored_parts, tree_leaves


class HeldAttributes:
    """The tensors that modules of a run hold in attributes."""

    def __init__(self) -> None:
        self._first: list[weakref.ref[torch.Tensor]] | None = None  # that were there before the first step

    def bytes_of_copy(self, replicas: ReplicaSet) -> int:
        """Bytes that a copy of the module has of what was there before the first step."""
        return bytes_of(self._held_first(replicas))

    def bytes_on_host(self, replicas: ReplicaSet) -> int:
        """Bytes there of what was there before the first step, with the copies that other replicas have."""
        # An example is data, as those of the loader are; its copies are not.
        example = set(map(id, tree_leaves(getattr(replicas.root.module, "example_input_array", None))))
        held = [tensor for tensor in self._held_first(replicas) if id(tensor) not in example]
        own = _bytes_of_storages(held, replicas)
        copies = sum(is_host(replica.device) for replica in replicas.replicas) - is_host(replicas.root.device)
        return own + copies * self.bytes_of_copy(replicas)

    def bytes_left(self, replicas: ReplicaSet) -> int:
        """Bytes on the host that steps have left on the user's module by now."""
        first = _bytes_of_storages(self._held_first(replicas), replicas)
        return max(0, _bytes_of_storages(replicas.copied_tensors(), replicas) - first)

    def _held_first(self, replicas: ReplicaSet) -> list[torch.Tensor]:
        if self._first is None:
            self._first = list(map(weakref.ref, replicas.copied_tensors()))
        alive = [reference() for reference in self._first]
        return [tensor for tensor in alive if tensor is not None]


def _bytes_of_storages(tensors: Iterable[torch.Tensor], replicas: ReplicaSet) -> int:
    """Bytes on the host, each storage once; none of parameters and buffers, which are counted as such."""
    counted = set[int]()
    for replica in replicas.replicas:
        own = chain.from_iterable(map(stored_parts, chain(replica.parameters, replica.buffers)))
        counted.update(key_of(part.untyped_storage()) for part in own)
    found = dict[int, int]()
    for part in chain.from_iterable(map(stored_parts, tensors)):
        storage = part.untyped_storage()
        if is_host(part.device) and key_of(storage) not in counted:
            found[key_of(storage)] = storage.nbytes()
    return sum(found.values())
