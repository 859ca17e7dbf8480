"""Values of the autograd graph: tensors that are kept, or made again from other values when they are needed.

Values point upstream only, and never at nodes: a graph that never runs backward is freed like any other.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from lightning_dpx.memory.execute.tensor_identity import Identity
from lightning_dpx.memory.execute.write_checks import refuse
from lightning_dpx.torch_compat import (
    disable_current_modes,
    free_weak_storage,
    version_counter,
    weak_storage,
)

Make = Callable[..., Any]  # a tensor; of a call of a module, its outcome
Look = Callable[[torch.Tensor], torch.Tensor]


class Unnamed:
    """A tensor that backward needs and no plan decides about: a parameter, a view of one, or a small one."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self.tensor: torch.Tensor = tensor
        self.version: int = version

    def read(self) -> torch.Tensor:
        """The tensor, if it was not written to.

        Raises:
            RuntimeError: it was.
        """
        if version_counter(self.tensor) != self.version:
            refuse(self.tensor, self.version, "a parameter" if self.tensor.requires_grad else "a tensor")
        return self.tensor


class Value:
    """A tensor of the forward: kept, or made again from other values when it is needed.

    Attributes:
        name: The call of the module that first saved it, and a number; empty where autograd does not save it.
        tensor: The value itself, or ``None`` while it is dropped.
        identity: By which it is known again when it is saved again; ``None`` where autograd does not save it.
        version: Of the tensor when it was kept or dropped.
        counter: Shares the version of a tensor that was dropped, and nothing of its memory.
        make: Computes it from the tensors of ``inputs``; ``None`` where that is unknown.
        inputs: What ``make`` takes: values, views of values, or anything else as it is.
        sources: The values behind the inputs.
        dropped: Whether ``tensor`` may be forgotten.
        made: Whether it was ever made again, which has asked for its inputs.
        uncached: Whether it is forgotten after every use, even if it will be asked for again.
        nested: Whether it is uncached and made from other such values; see :func:`make_uncached`.
        uses_left: How often it will still be asked for in this backward.
        num_uses: How often it is asked for in a backward.
        operator: The name of the node that produced it.
    """

    # A step makes one for every tensor that a plan decides about.
    __slots__ = (
        "__weakref__",
        "_storage",
        "counter",
        "dropped",
        "identity",
        "inputs",
        "made",
        "make",
        "name",
        "nested",
        "num_uses",
        "operator",
        "sources",
        "tensor",
        "uncached",
        "uses_left",
        "version",
    )  # fmt: skip

    def __init__(self, name: str, operator: str) -> None:
        self.name: str = name
        self.operator: str = operator
        self.identity: Identity | None = None
        self.tensor: torch.Tensor | None = None
        self.counter: torch.Tensor | None = None
        self.make: Make | None = None
        self.inputs: Sequence[Any] = ()
        self.sources: Sequence[Value] = ()
        self.dropped: bool = False
        self.made: bool = False
        self.uncached: bool = False
        self.nested: bool = False
        self.version: int = -1
        self.uses_left: int = 0
        self.num_uses: int = 0
        self._storage = 0  # a weak reference, once nothing here holds the storage

    # A default is there even when the interpreter ends and has emptied the module.
    def __del__(self, _free: Callable[[int], None] = free_weak_storage) -> None:
        if self._storage:
            _free(self._storage)
        # What only a part of the graph has saved that is gone before its backward: nobody else is to wait for it.
        if self.sources and not self.made:
            self.forget_recipe()

    def forget_recipe(self) -> None:
        """It will not ask for its inputs; nor will those that only it would have asked for."""
        stack = [self]
        while stack:
            top = stack.pop()
            for source in top.sources:
                source.uses_left -= 1
                source.num_uses -= 1
                # One with a name is saved itself, so backward will ask for it all the same.
                if source.dropped and not source.name and not source.num_uses:
                    stack.append(source)
            top.learn(None, ())

    def held(self) -> torch.Tensor:
        """The tensor, for those who know that it is there.

        Raises:
            LookupError: it is not.
        """
        if self.tensor is None:
            raise LookupError(f"{self.name or self.operator or 'a value'} is dropped and has not been made again")
        return self.tensor

    def keep(self, tensor: torch.Tensor) -> None:
        """Holds ``tensor``, and notices if it is written into."""
        self.tensor = tensor.detach()
        self.version = version_counter(tensor)

    def let_go(self, tensor: torch.Tensor) -> None:
        """Forgets ``tensor``, which it is; while the value lives no other storage gets the same identity."""
        # The address of a storage is part of an identity, and is not given out again while there is
        # a weak reference; the memory itself is freed.
        if not self._storage:
            self._storage = weak_storage(tensor.untyped_storage())  # type: ignore[assignment]
        self.tensor = None

    def drop(self, tensor: torch.Tensor) -> None:
        """From now on ``tensor``, which it is, is computed when it is needed; who writes into it is noticed still."""
        self.dropped = True
        self.version = version_counter(tensor)
        # A detached tensor shares the count of writes, also after its data were exchanged for
        # nothing: so writes are noticed, and no memory is held for it.
        if type(tensor) in _COUNTED:
            self.counter = tensor.detach()
            self.counter.data = _nothing(tensor.dtype, tensor.device)
        self.let_go(tensor)

    def learn(self, make: Make | None, inputs: Sequence[Any]) -> None:
        """Notes how it is made; ``None`` where that is unknown."""
        self.make = make
        self.inputs = inputs
        # Mostly all inputs are values, and their list does for both: one object less per value.
        for entry in inputs:
            if type(entry) is not Value:
                break
        else:
            self.sources = inputs
            return
        values = (entry.value if isinstance(entry, View) else entry for entry in inputs)
        self.sources = [value for value in values if type(value) is Value]

    def add_use(self) -> None:
        """Notes that one more will ask for it."""
        self.uses_left += 1
        self.num_uses += 1


def keep(tensor: torch.Tensor) -> Unnamed:
    """A tensor that is kept, without the graph that leads to it."""
    return Unnamed(tensor if tensor.grad_fn is None else tensor.detach(), version_counter(tensor))


class View:
    """A value as an operator got it, or as autograd saved it, where that is not the whole value as it is."""

    __slots__ = ("__weakref__", "look", "value")

    def __init__(self, value: Value, look: Look) -> None:
        self.value: Value = value
        self.look: Look = look

    def read(self) -> torch.Tensor:
        """The tensor; its value must be there."""
        return self.look(self.value.held())


class Strides:
    """Shows a value as autograd saved it: with other sizes and strides."""

    __slots__ = ("original", "view")

    def __init__(self, shown: Identity, original: Identity) -> None:
        self.view = (shown.size, shown.stride, shown.offset)
        self.original: Identity = original

    def __call__(self, base: torch.Tensor) -> torch.Tensor:
        original = self.original
        (size, stride, offset) = self.view
        if base.stride() != original.stride:  # it was made anew, with strides of its own
            again = torch.empty_strided(original.size, original.stride, dtype=base.dtype, device=base.device)
            base = again.copy_(base)
        # Made anew, it may begin at another place of its memory.
        return base.as_strided(size, stride, offset - original.offset + base.storage_offset())


class Both:
    """Shows a value as a view of a view, one look after the other."""

    __slots__ = ("first", "then")

    def __init__(self, first: Look, then: Look) -> None:
        self.first: Look = first
        self.then: Look = then

    def __call__(self, base: torch.Tensor) -> torch.Tensor:
        return self.then(self.first(base))


def same_geometry(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view shows its base as it is."""
    return (
        tensor.size() == base.size()
        and tensor.stride() == base.stride()
        and tensor.storage_offset() == base.storage_offset()
    )


def read(entry: Any) -> Any:
    """What an operator takes for ``entry``; its value must be there."""
    if type(entry) is Value:
        return entry.tensor
    if isinstance(entry, View | Unnamed):
        return entry.read()
    return entry


def make_uncached(value: Value) -> None:
    """``value`` is forgotten after every use, with those that are not saved on the way to it.

    One that is made from other uncached values is nested: within one computation it stays until all is made from it
    that is made there. If it were made for each of its uses, as others are, the work would double at every level.
    """
    on_the_way = [value]
    stack = list(value.sources)
    nested = False
    while stack:
        source = stack.pop()
        if source.uncached:
            nested = nested or bool(source.sources)  # a mask is made from nothing else
        elif not source.name and source.dropped:
            on_the_way.append(source)
            stack += source.sources
    for source in on_the_way:
        source.uncached = True
        source.nested = nested


_COUNTED = (torch.Tensor, torch.nn.Parameter)


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor, one for all: a dropped value costs no allocation."""
    # It outlives the step that asks for it first, whose modes would count it or make a fake of it.
    with disable_current_modes():
        return torch.empty(0, dtype=dtype, device=device)
