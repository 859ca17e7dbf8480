"""A run of a module that leaves no trace: tensors, Python objects and random generators are put back afterwards."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_dpx.python_objects.module_hooks import HooksOfOthers
from lightning_dpx.python_objects.object_state import ObjectState
from lightning_dpx.python_objects.preserve import GeneratorStates, held_generators
from lightning_dpx.torch_compat import (
    FakeTensor,
    TorchDispatchMode,
    buffers_of,
    has_storage,
    is_traceable_wrapper_subclass,
    key_of,
    on_tensors_of_tensors,
    parameters_of,
    schema_of,
    tree_leaves,
    with_memory_in,
)


class CopyOnWrite:
    """Keeps the numbers of tensors from before an operator first writes to them; the others cost nothing.

    Args:
        tensors: Which; those that are views or share memory are kept together.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._watched: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            for part in with_memory_in(tensor):
                # Fake and meta tensors have no numbers to keep, and a sparse tensor has no storage
                # of its own.
                if type(part) is not FakeTensor and part.layout is torch.strided and not part.is_meta:
                    self._watched[key_of(part.untyped_storage())] = part.untyped_storage()
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Called before the operator ``func`` runs."""
        for tensor in written_tensors(func, args, kwargs or {}):
            if tensor.layout is not torch.strided:
                continue
            address = key_of(tensor.untyped_storage())
            storage = self._watched.get(address)
            if storage is not None and address not in self._kept:
                # The whole storage, because views of it, and tensors that share it, are written to
                # by other names.
                self._kept[address] = storage, storage.clone()  # type: ignore[no-untyped-call]

    @property
    def has_seen_any(self) -> bool:
        """Whether one of them has been written to."""
        return bool(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes that the kept copies take."""
        return sum(before.nbytes() for _, before in self._kept.values())

    def put_back(self) -> None:
        """Tensors hold again what they held; from now on nothing is watched, and nothing kept."""
        for storage, before in self._kept.values():
            storage.copy_(before)
        self._kept.clear()
        self._watched.clear()


class MemoryOfTensors:
    """Which memory tensors look at, as it is now: ``tensor.data = other`` gives one another without a write.

    Args:
        tensors: Which.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # An alias is a tensor of its own over the same memory, which goes on to be there while it is held.
        self._aliases: list[tuple[torch.Tensor, torch.Tensor]] = []
        seen: set[int] = set()
        for tensor in tensors:
            if id(tensor) not in seen and _has_own_memory(tensor):
                seen.add(id(tensor))
                self._aliases.append((tensor, tensor.data))

    def put_back(self) -> None:
        """Tensors look again at the memory that they looked at."""
        for tensor, alias in self._aliases:
            if not _is_same_memory(tensor, alias):
                tensor.data = alias


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor.data = other`` could give it another one: of a wrapper it changes none of what that holds."""
    if is_lazy(tensor) or type(tensor) is FakeTensor or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided and has_storage(tensor)


def _is_same_memory(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    """Whether both show the same numbers, in whatever they are kept."""
    return (
        tensor.layout is torch.strided
        and key_of(tensor.untyped_storage()) == key_of(alias.untyped_storage())
        and tensor.dtype == alias.dtype
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.storage_offset() == alias.storage_offset()
    )


class BeforeWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells ``writes`` of every operator, where nothing else watches them.

    Args:
        writes: What is told.
        makes: Is given the bytes of what an operator has made, beside those that exist already.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every call, for a tenth of its time; compiled code runs eagerly in here

    def __init__(self, writes: CopyOnWrite, makes: Callable[[int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes = writes
        self._makes = makes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if on_tensors_of_tensors(types):
            # Such a tensor then calls operators on what it holds, and those come here.
            return NotImplemented
        self._writes.before(func, args, kwargs)
        made = func(*args, **(kwargs or {}))
        if self._makes is not None and not _returns_what_it_got(func):
            tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
            here = [one for one in tensors if one.layout is torch.strided and one.device.type == "cpu"]
            self._makes(sum(one.nbytes for one in here if not isinstance(one, FakeTensor)))
        return made


@cache
def _returns_what_it_got(func: Any) -> bool:
    """Whether results are views of operands, or operands that were written to."""
    return any(result.alias_info is not None for result in schema_of(func).returns)


@cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    arguments = schema_of(func).arguments if schema_of(func).is_mutable else ()
    return [(n, one.name) for n, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write]


def written_tensors(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The operands that the operator ``func`` writes to, also those in lists."""
    for place, name in _written_places(func):
        for leaf in tree_leaves(args[place] if place < len(args) else kwargs.get(name)):
            if isinstance(leaf, torch.Tensor):
                yield leaf


class Reach:
    """What a module leads to, found once for several runs that leave no trace.

    Args:
        module: The module.

    Attributes:
        parts: The modules.
        state: What they hold.
        generators: Of random numbers, beside those of the process and of devices.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts: list[nn.Module]
        self.state: ObjectState
        self.parts, self.state = _with_those_outside(module)
        self.generators: list[Any] = held_generators([module])


@contextmanager
def untouched(module: nn.Module, *, tensors: bool = True, reach: Reach | None = None) -> Iterator[CopyOnWrite]:
    """What runs in here leaves ``module`` as it was: parameters, buffers, gradients, attributes and what they hold.

    Hooks as well, but for those of this package, which come and go by themselves.

    Random generators of the process, of the devices in question and of the module continue as if nothing had been
    drawn. Objects whose state Python cannot see, such as iterators and files, stay where the run leaves them.

    Args:
        module: What the run may change.
        tensors: Whether its own tensors take part; else the run has others in their place.
        reach: What ``module`` leads to, where that is known and nothing has changed it since.

    Yields:
        What must be told before an operator writes to a tensor.
    """
    before = _ModuleBefore(reach or Reach(module), tensors=tensors)
    try:
        yield before.writes
    finally:
        before.put_back()


class _ModuleBefore:
    """A module as it is before a run.

    Args:
        reach: What it leads to.
        tensors: Whether its own tensors take part.

    Attributes:
        writes: What must be told before an operator writes to a tensor.
    """

    def __init__(self, reach: Reach, *, tensors: bool) -> None:
        self._parts = reach.parts
        self._state = reach.state
        self._marks = self._state.marks()
        # A scripted part keeps its tensors in C++; what looks like its dicts refuses to be emptied.
        owners = [part for part in self._parts if not isinstance(part, torch.jit.ScriptModule)]
        self._own = [(part, dict(parameters_of(part)), dict(buffers_of(part))) for part in owners]
        held: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        for part in self._parts:
            held += [tensor for tensor in parameters_of(part).values() if tensor is not None]
            buffers += [tensor for tensor in buffers_of(part).values() if tensor is not None]
        self._hooks = HooksOfOthers(owners, held)
        # Parameters are copied when something writes to them and not before: a large model has no room
        # for a second one.
        self.writes: CopyOnWrite = CopyOnWrite(
            tensor for tensor in (*held, *self._state.tensors()) if _is_there(tensor)
        )
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        own: list[torch.Tensor] = []
        if tensors:
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers if _is_there(buffer)]
            self._gradients = [(parameter, parameter.grad) for parameter in held]
            own = [*held, *buffers]
        self._memory = MemoryOfTensors((*own, *self._state.tensors()) if tensors else ())
        self._generators = GeneratorStates({tensor.device for tensor in own}, generators=reach.generators)
        # A lazy module is one of another class after its first call.
        self._types = [type(part) for part in self._parts]

    def put_back(self) -> None:
        """What the run has changed is as it was."""
        self._generators.restore()
        self._state.put_back(self._marks)
        with torch.no_grad():
            # First, as writes are put back into the memory from before, which may be a buffer's no longer.
            self._memory.put_back()
            self.writes.put_back()
            self._put_buffers_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        initialized = set[int]()
        for part, kind in zip(self._parts, self._types, strict=True):
            if type(part) is not kind:
                initialized.add(id(part))
        self._hooks.put_back(initialized)
        for part, parameters, buffers in self._own:
            if id(part) not in initialized:  # a lazy module has its tensors from now on
                _put_in(parameters_of(part), parameters)
                _put_in(buffers_of(part), buffers)

    def _put_buffers_back(self) -> None:
        """Without a write where the numbers are the same: it would make a buffer look changed to autograd."""
        for buffer, copy in self._buffers:
            if buffer.shape != copy.shape:
                continue
            if buffer.layout is not torch.strided or not torch.equal(buffer, copy):
                buffer.copy_(copy)


def _with_those_outside(module: nn.Module) -> tuple[list[nn.Module], ObjectState]:
    """All modules that ``module`` leads to, also in a list of its own, and what they hold."""
    parts = list(module.modules())
    while True:
        state = ObjectState(parts, follow_code=False, copies=True)
        # Modules in a list of the user's are no submodules, and lead to others in their turn.
        more: list[nn.Module] = []
        for outside in state.outside:
            more += outside.modules()
        if not more:
            return parts, state
        parts = list(dict.fromkeys([*parts, *more]))


def _is_there(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor)


def _put_in(held: dict[str, Any], before: dict[str, Any]) -> None:
    if held.keys() != before.keys() or any(held[key] is not before[key] for key in held):
        # Emptied first, so that the old entries come back in their old order.
        held.clear()
        held.update(before)
