"""Tensors that the user's module held before a step which may run again, so that it counts in them once.

    self.total = 0.9 * self.total + loss.detach()      in slices, and again with the whole batch

Only small ones are copied, as sums and means are: features of a whole batch would take the room of another step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.replicas.remote_tensor import version_of
from lightning_dpx.replicas.seen_values import SeenTensor, is_still
from lightning_dpx.torch_compat import bytes_of

_LARGEST = 2**12  # bytes


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor in an attribute, before the step.

    Attributes:
        state: The attributes of the submodule.
        key: The name of the attribute.
        seen: The tensor.
        values: Its values; ``None`` of a large one.
        itself: The tensor, where no graph of an earlier step would outlive that with it.
    """

    state: dict[str, Any]
    key: str
    seen: SeenTensor
    values: torch.Tensor | None
    itself: torch.Tensor | None

    @property
    def has_changed(self) -> bool:
        return not is_still(self.seen, self.state.get(self.key))

    def put_back(self) -> None:
        if self.values is None or not self.has_changed:
            return
        if self.itself is None:
            self.state[self.key] = self.values
            return
        if version_of(self.itself) != self.seen.version:
            with torch.no_grad():
                self.itself.copy_(self.values)
        self.state[self.key] = self.itself


class TensorsBefore:
    """The tensors in some attributes, as they are now.

    Args:
        seen: The attributes of a submodule, and what was seen in them.
    """

    def __init__(self, seen: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        self._held: list[_Held] = []
        for state, attributes in seen:
            for key, value in attributes.items():
                tensor = value.tensor() if isinstance(value, SeenTensor) else None
                if tensor is not None:
                    self._held.append(_held(state, key, value, tensor))

    @property
    def are_lost(self) -> bool:
        """Whether one has changed since that cannot be put back."""
        return any(held.values is None and held.has_changed for held in self._held)

    def put_back(self) -> None:
        """The attributes have them again, with the values that they had."""
        for held in self._held:
            held.put_back()


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A tensor in a container or an object, before the step.

    Attributes:
        tensor: Itself.
        version: How often it had been written.
        values: Its values; ``None`` of a large one, and of a parameter, as a teacher has many of.
    """

    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None

    @property
    def was_written(self) -> bool:
        return version_of(self.tensor) != self.version


class HiddenBefore:
    """Tensors in containers and objects of the user's module, which a step writes in place, as they are now.

    Args:
        tensors: Them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._held: list[_Hidden] = []
        for tensor in tensors:
            is_copied = _is_small(tensor) and not isinstance(tensor, torch.nn.Parameter)
            values = tensor.detach().clone() if is_copied else None
            self._held.append(_Hidden(tensor, version_of(tensor), values))

    @property
    def are_lost(self) -> bool:
        """Whether one was written that cannot be put back."""
        return any(held.values is None and held.was_written for held in self._held)

    def put_back(self) -> None:
        """They hold what they held."""
        for held in self._held:
            if held.values is not None and held.was_written:
                with torch.no_grad():
                    held.tensor.copy_(held.values)


def _is_small(tensor: torch.Tensor) -> bool:
    # Of a sparse one the number of bytes says nothing, and one of inference mode counts no writes.
    return tensor.layout == torch.strided and not tensor.is_inference() and bytes_of([tensor]) <= _LARGEST


def _held(state: dict[str, Any], key: str, seen: SeenTensor, tensor: torch.Tensor) -> _Held:
    # What a copy of a subclass is, only that knows.
    if type(tensor) is not torch.Tensor or tensor.is_inference() or bytes_of([tensor]) > _LARGEST:
        return _Held(state, key, seen, None, None)
    has_graph = tensor.grad_fn is not None
    return _Held(state, key, seen, tensor.detach().clone(), None if has_graph else tensor)
