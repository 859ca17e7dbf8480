"""Values of the autograd graph: tensors that are kept, or made again from other values when they are needed.

Values point upstream only, and never at nodes: a graph that never runs backward is freed like any other.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.memory.execute.calls import SelectiveReplay
from lightning_dpx.memory.execute.offload import Offloader
from lightning_dpx.memory.execute.recipes.registry import NotRecomputable
from lightning_dpx.torch_compat import (
    DisableAutocast,
    DisableTorchFunction,
    disable_current_modes,
    free_weak_storage,
    is_any_autocast_enabled,
    is_torch_function_mode_enabled,
    key_of,
    version_counter,
    weak_storage,
)

Make = Callable[..., Any]  # a tensor; of a call of a module, its outcome
Look = Callable[[torch.Tensor], torch.Tensor]


class Identity(NamedTuple):
    """Tensors that agree in this hold the same numbers, as long as the storage lives."""

    storage: int
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def is_dense_unlike(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has its dims in another order in memory: operators of libraries rely on theirs."""
        steps = list[tuple[int, int, int]]()
        for step, size, other in zip(self.stride, self.size, tensor.stride(), strict=True):
            if size != 1:  # the stride of a dim of one element means nothing, and may be any
                steps.append((step, size, other))
        expected = 1
        for step, size, _ in sorted(steps):
            if step != expected:
                return False  # a part of something larger, that cannot be relied on
            expected *= size
        return any(step != other for step, _, other in steps)


def identity_of(base: torch.Tensor) -> Identity:
    """The identity of ``base``, by which it is known again."""
    storage = key_of(base.untyped_storage())
    offset = int(base.storage_offset())
    return Identity(storage, version_counter(base), base.dtype, base.size(), base.stride(), offset)


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
        pending: How often it will still be asked for in this backward.
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
        "pending",
        "sources",
        "tensor",
        "uncached",
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
        self.pending: int = 0
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
                source.pending -= 1
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

    def want(self) -> None:
        """Notes that one more will ask for it."""
        self.pending += 1
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


def compute(wanted: Value) -> torch.Tensor:
    """The tensor of ``wanted``, made from what is kept; leaves behind what others still wait for."""
    is_plain = _surroundings_are_plain()
    if is_plain and not isinstance(wanted.make, SelectiveReplay) and _has_all(wanted):  # as it is nearly always
        made_now = wanted.tensor = run_recipe(wanted)
        used(wanted)
        return made_now
    under_way = _Computation(wanted)
    while under_way.stack:
        if is_plain:
            under_way.run_operators()
        else:  # a function mode of the step, such as a shift's, must not move what is repeated where it was
            # Autocast has converted the inputs already, and would do so once more.
            with torch.no_grad(), DisableAutocast(), DisableTorchFunction():
                under_way.run_operators()
        if under_way.stack:
            # A call of a module ends the loop over operators: it runs outside of these contexts.
            call = under_way.stack.pop()
            call.tensor = run_recipe(call)  # with gradients and autocast as in forward
            under_way.have(call)
    for value in under_way.later:
        used(value)
    return wanted.held()


def _surroundings_are_plain() -> bool:
    """Whether operators run without gradients, autocast and function modes anyway; contexts for that take longer."""
    return not (torch.is_grad_enabled() or is_any_autocast_enabled() or is_torch_function_mode_enabled())


def _has_all(value: Value) -> bool:
    return all(source.tensor is not None for source in value.sources)


class _Computation:
    """A value that is being made, with all on the way to it that is not there.

    Attributes:
        stack: What is yet to be made, the next one last.
        later: What was made, and whose inputs are told of it only at the end.
    """

    __slots__ = ("_made", "_uses", "_wanted", "later", "stack")

    def __init__(self, wanted: Value) -> None:
        self.stack = [wanted]
        self.later = list[Value]()
        self._wanted = wanted
        self._made = set[Value]()
        self._uses: dict[Value, int] | None = None  # of nested values, that are still to come

    def run_operators(self) -> None:
        """Until the stack is empty, or a call of a module is on top of it and has all that it takes."""
        stack = self.stack
        while stack:
            value = stack[-1]
            if value.tensor is not None:  # two values on the stack were waiting for it
                stack.pop()
                continue
            missing = [source for source in value.sources if source.tensor is None]
            if missing:
                if len(missing) > 1:  # what can be made at once, such as a mask, is not to wait for a long way
                    missing.sort(key=_has_all, reverse=True)
                stack += missing
                continue
            if isinstance(value.make, SelectiveReplay):
                return
            value.tensor = run_recipe(value)
            stack.pop()
            self.have(value)

    def have(self, value: Value) -> None:
        """``value`` has just been made."""
        needed = self._nested_that_stay(value)
        if self.later or (value in self._made and not value.uncached):
            self.later.append(value)  # the counts are off, after a part of a backward: forget nothing before the end
        else:
            self._made.add(value)
            used(value)
        # Giving the uses back has forgotten uncached inputs; those of more to come are put back.
        for source, tensor in needed:
            source.tensor = tensor

    def _nested_that_stay(self, made: Value) -> list[tuple[Value, torch.Tensor | None]]:
        """Of the nested values that ``made`` was made from, those from which more is made; forgets the others."""
        sources = [source for source in made.sources if source.nested]
        if not sources:
            return []
        if self._uses is None:
            self._uses = self._uses_to_come()  # without those of ``made``, which is there
        else:
            for source in sources:
                self._uses[source] = self._uses.get(source, 0) - 1
        stay = []
        for source in sources:
            if self._uses.get(source, 0) > 0:
                stay.append((source, source.tensor))
            else:
                source.tensor = None
        return stay

    def _uses_to_come(self) -> dict[Value, int]:
        """How often each nested value is an input of what is not there yet."""
        uses = dict[Value, int]()
        stack = [self._wanted]
        seen = {self._wanted}
        while stack:
            value = stack.pop()
            if value.tensor is not None:
                continue
            for source in value.sources:
                if source.nested:
                    uses[source] = uses.get(source, 0) + 1
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return uses


def repeat(value: Value) -> torch.Tensor:
    """One operator or call, on inputs that are there, as backward will make it."""
    if isinstance(value.make, SelectiveReplay):
        return run_recipe(value)
    with torch.no_grad(), DisableAutocast():
        return run_recipe(value)


def run_recipe(value: Value) -> torch.Tensor:
    """One operator, on inputs that are there."""
    make = value.make
    if make is None:
        raise NotRecomputable(f"{value.name or value.operator} has no recipe")
    # Saved tensors are checked when backward asks for them; inputs of recipes only here.
    for source in value.sources:
        if not source.dropped and source.tensor is not None and version_counter(source.tensor) != source.version:
            refuse_changed(source)
    value.made = True
    made: torch.Tensor = make(*[entry.tensor if type(entry) is Value else read(entry) for entry in value.inputs])
    identity = value.identity
    # The profile has compared the numbers, of one step; in all others shape and dtype must agree.
    if identity is not None and (made.dtype is not identity.dtype or made.size() != identity.size):
        raise RuntimeError(
            f"{value.operator} gave {list(made.size())} in {made.dtype} for {value.name} when it was repeated, instead "
            f"of {list(identity.size)} in {identity.dtype}. Please report this; keep the value in the plan until then."
        )
    if identity is not None and made.stride() != identity.stride and identity.is_dense_unlike(made):
        made = torch.empty_strided(identity.size, identity.stride, dtype=made.dtype, device=made.device).copy_(made)
    return made


def used(value: Value) -> None:
    """``value`` has been made: its inputs are asked for once less, unless it will be made again."""
    for source in value.sources:
        if not value.uncached:
            release_use(source)
        elif source.uncached and not source.nested:
            source.tensor = None


def release_use(value: Value) -> None:
    """One of those that need ``value`` has had it; after the last its tensor is forgotten."""
    stack = [value]
    while stack:  # a chain of uncached values may be longer than Python recurses
        value = stack.pop()
        value.pending -= 1
        if not value.dropped:
            continue
        if value.uncached or value.pending <= 0:
            value.tensor = None
        if value.pending <= 0:
            value.pending = value.num_uses  # a second backward through the same graph starts anew
            if value.uncached:
                stack += value.sources


def compress(value: Value) -> bool:
    """Keeps a tensor of zeros and one other number, such as the mask of a dropout, in a byte per element.

    Returns:
        Whether it is such a tensor; nothing is changed otherwise.
    """
    mask = value.held()
    if not mask.dtype.is_floating_point or not is_host(mask.device) or not mask.numel():
        return False  # devices have operators that save masks as bytes, and finding out would wait for them
    # The value was a mask when it was profiled; this time it is looked at again, bit by bit.
    with torch.no_grad(), DisableAutocast():
        other = mask.amax()
        small = mask.ne(0)
        if not torch.equal(small.to(mask.dtype).mul_(other), mask):
            return False
    value.learn(_expand_mask, (small, other, mask.dtype))
    value.operator = "mask"
    value.drop(mask)
    return True


def offload(value: Value, offloading: Offloader) -> None:
    """Keeps a tensor of a device in the host's memory until backward asks for it."""
    tensor = value.held()
    fetch, slot = offloading.offload(tensor, value.version, value.name)
    value.learn(fetch, (slot,))
    value.drop(tensor)


def _expand_mask(small: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return small.to(dtype).mul_(other)


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


def refuse_changed(value: Value) -> NoReturn:
    """A value was written to, as autograd refuses it.

    Raises:
        RuntimeError: always; names the value, its operator and both versions.
    """
    tensor = value.held() if value.counter is None else value.counter
    size = tensor.size() if value.identity is None else value.identity.size
    refuse(tensor, value.version, value.name or "a parameter", size, value.operator)


def refuse(
    tensor: torch.Tensor, version: int, name: str, size: Sequence[int] | None = None, operator: str = ""
) -> NoReturn:
    """A tensor was written to that is no value, as autograd refuses it.

    Raises:
        RuntimeError: always.
    """
    made_by = f", the output of {operator}," if operator else ""
    shape = list(tensor.shape) if size is None else list(size)
    raise RuntimeError(
        "One of the variables needed for gradient computation has been modified by an inplace operation. A tensor that "
        f"backward needs was changed in place: {name} of shape {shape}{made_by} "
        f"has version {version_counter(tensor)} instead of {version}."
    )


_COUNTED = (torch.Tensor, torch.nn.Parameter)


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor, one for all: a dropped value costs no allocation."""
    # It outlives the step that asks for it first, whose modes would count it or make a fake of it.
    with disable_current_modes():
        return torch.empty(0, dtype=dtype, device=device)
