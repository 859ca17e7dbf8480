"""Tensors of which each process has a part (DTensor), as tensor-parallel layers save them.

The part is a plain tensor, and as a rule one that an operator beside the layer has made:

    gelu ---> plain tensor ---from_local---> DTensor ---view---> DTensor, which the linear layer saves
                   |                                                 |
                   +--------------- the same memory -----------------+

So what autograd holds is the part, which is kept or made again like any other value, and the distributed tensor is put
together when backward asks for it. Which operator has made the part is found along the graph: over views, which leave
the memory where it is, and ``from_local``. Nothing is made again that takes another process for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lightning_dpx.memory.execute.recipes import VIEWS
from lightning_dpx.memory.execute.write_checks import refuse
from lightning_dpx.torch_compat import (
    FakeTensor,
    disable_current_modes,
    is_traceable_wrapper_subclass,
    key_of,
    on_distributed_tensors,
    output_metadata,
    version_counter,
)

_FROM_LOCAL = "_FromTorchTensorBackward"
_LEAF = "torch::autograd::AccumulateGrad"
# A dense tensor stays dense in order. An alias is none of the views of recipes, which make a copy for it.
_RESHAPES = frozenset({"ViewBackward0", "UnsafeViewBackward0", "AliasBackward0"})
_MOST_VIEWS = 16  # in a row


class Origin(NamedTuple):
    """Where a part comes from.

    Attributes:
        base: What the operator has made, on the memory of the part.
        node: The operator.
        output: Which of its results.
    """

    base: torch.Tensor
    node: Any
    output: int


class DistributedValue:
    """What autograd holds for a distributed tensor.

    Args:
        tensor: It.
        held: What is held for its part.
    """

    __slots__ = ("__weakref__", "_consists_of", "_context", "_counter", "_kind", "_size", "_stride", "_version", "held")

    def __init__(self, tensor: Any, held: Any) -> None:
        names, self._context = tensor.__tensor_flatten__()
        self._consists_of = {name: getattr(tensor, name) for name in names}
        self._kind: Any = type(tensor)
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._version = version_counter(tensor)
        self._counter = without_part(tensor)
        for name, value in self._consists_of.items():
            if isinstance(value, torch.Tensor):
                self._consists_of[name] = getattr(self._counter, name)
        self.held: Any = held

    def read(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The tensor.

        Args:
            unpack: Gives the part.

        Raises:
            RuntimeError: it was written to.
        """
        if version_counter(self._counter) != self._version:
            refuse(self._counter, self._version, "a distributed tensor")
        part = unpack(self.held)
        consists_of = dict(self._consists_of)
        for name, entry in consists_of.items():
            if isinstance(entry, torch.Tensor):
                consists_of[name] = part
        whole: torch.Tensor = self._kind.__tensor_unflatten__(consists_of, self._context, self._size, self._stride)
        return whole


def without_part(tensor: torch.Tensor) -> torch.Tensor:
    """What counts the writes to ``tensor``, as that does itself, without its memory."""
    counter: Any = tensor.detach()  # shares the count, also after its data were exchanged
    with disable_current_modes():  # no operator of the step, which something may be watching
        nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if is_traceable_wrapper_subclass(counter):
        names, _ = counter.__tensor_flatten__()
        for name in names:
            if isinstance(getattr(counter, name), torch.Tensor):
                setattr(counter, name, nothing)
    else:
        counter.data = nothing
    found: torch.Tensor = counter
    return found


def part_of(tensor: Any) -> torch.Tensor | None:
    """The part that this process has of ``tensor``; ``None`` of others, and while it is still on its way."""
    if not on_distributed_tensors((type(tensor),)):
        return None
    names, _ = tensor.__tensor_flatten__()
    entries = [getattr(tensor, name) for name in names]
    parts = [entry for entry in entries if isinstance(entry, torch.Tensor)]
    # The result of a collective that is under way has another type; to read it would be to wait.
    if len(parts) != 1 or type(parts[0]) not in (torch.Tensor, FakeTensor):
        return None
    return parts[0].detach()


def part_here(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process has of a distributed tensor, once it has arrived; any other tensor as it is."""
    if not on_distributed_tensors((type(tensor),)):
        return tensor
    part: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def origin_of(tensor: torch.Tensor, part: torch.Tensor, made_by: Callable[[Any, int], Any]) -> Origin | None:
    """Where ``part`` of a distributed tensor comes from; ``None`` if it cannot be told.

    Args:
        tensor: Whose part.
        part: Which.
        made_by: The value that is the result of an operator, if it is known.
    """
    node: Any = tensor.grad_fn
    output = tensor.output_nr
    # Operators on this side of ``from_local`` work on distributed tensors, and may talk to other
    # processes when they are repeated: a value is looked for only on the other side.
    is_plain = False
    is_dense = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
    for _ in range(_MOST_VIEWS):
        if node is None or node.name() == _LEAF:
            return None
        known = made_by(node, output) if is_plain else None
        identity = None if known is None else known.identity
        if identity is not None and identity.storage == key_of(part.untyped_storage()):
            with disable_current_modes():  # likewise
                base = part.as_strided(identity.size, identity.stride, identity.offset)
            return Origin(base, node, output)
        name = node.name()
        if name != _FROM_LOCAL and name not in VIEWS and name not in _RESHAPES:
            break
        # The part can be taken for the operator's whole result only if no view on the way has left
        # out or reordered elements.
        is_plain = is_plain or name == _FROM_LOCAL
        is_dense = is_dense and (name == _FROM_LOCAL or name in _RESHAPES)
        node, output = node.next_functions[0]
    if not (is_plain and is_dense):
        return None
    # The operator itself is no view: what it gave is not there as a tensor, but its shape is known.
    like = output_metadata(node)[output]
    if like.dtype != part.dtype or torch.Size(like.shape).numel() != part.numel():
        return None
    with disable_current_modes():
        return Origin(part.view(torch.Size(like.shape)), node, output)
