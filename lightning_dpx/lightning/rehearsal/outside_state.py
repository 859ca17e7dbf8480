"""What a step can change outside its module: classes, globals, callbacks, data sets, attributes of its trainer.

A shadow has its own copies of what the module holds, but not of these. So they are put back after every run of a
rehearsal, and compared like the state of the module. Only what the user wrote is looked at: frameworks keep books of
their own, which a step does not touch. All of it is followed through containers, objects, closures and tensors;
callbacks and data sets, which may hold very much, only as far as a few thousand objects, the nearest ones first.
"""

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_dpx.lightning.lightning_compat import active_loop, combined_loader
from lightning_dpx.python_objects.hook_state import hooks_of_all_modules
from lightning_dpx.python_objects.object_contents import refill
from lightning_dpx.python_objects.object_graph import MUTABLE, PLAIN
from lightning_dpx.python_objects.object_state import ObjectState
from lightning_dpx.python_objects.origin import is_library
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.python_objects.reachable import (
    classes_of_held,
    globals_of_code,
    places_of_code,
    reachable,
)
from lightning_dpx.replicas.caller_context import watching_modes
from lightning_dpx.torch_compat import version_counter
from lightning_dpx.units import MIB

_LARGEST_CONTAINER = 10_000
_MOST_BYTES = 64 * MIB  # of tensors that the user's code names
_MOST_NEAR = 2_000  # objects behind callbacks and data sets: what steps write to lies near them
_DEEPEST_NOTE = 4
_MOST_PARTS = 64  # of one data set that are data sets
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
_MISSING = object()


class Attributes:
    """The attributes of an object that has no shadow, and what its small containers hold.

    Args:
        owner: The object.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        # The values themselves and no copies: a callback may hold data
        # that would take long to copy.
        self._values = dict(vars(owner))
        self._contents = [_Content(value) for value in self._values.values() if is_small_container(value)]

    def restore(self) -> None:
        """Puts all attributes back to what they were."""
        now = vars(self._owner)  # a signal handler may ask for attributes meanwhile, so none is taken away for long
        for key in [key for key in now if key not in self._values]:
            del now[key]
        for key, value in self._values.items():
            if now.get(key) is not value:
                now[key] = value
        for content in self._contents:
            content.restore()


class _Notes:
    """Numbers, text and tensors among the attributes of a trainer, and small containers of them.

    A step may keep its own there. What else a trainer has is Lightning's, and is exchanged for a rehearsal.

    Args:
        trainer: The user's.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._keys = set(vars(trainer))
        self._values = dict(self.values())
        self._contents = [_Content(value) for value in self._values.values() if is_small_container(value)]

    def restore(self) -> None:
        """Puts them back to what they were."""
        attributes = vars(self._trainer)
        for key, _ in list(self.values()):
            if key not in self._keys:
                del attributes[key]
        attributes.update(self._values)
        for content in self._contents:
            content.restore()

    def values(self) -> Iterator[tuple[str, Any]]:
        """Names and values as they are now."""
        for key, value in vars(self._trainer).items():
            if not key.startswith("_") and _is_note(value, _DEEPEST_NOTE):
                yield key, value


class _Content:
    """What a container held."""

    def __init__(self, container: Any) -> None:
        self._container = container
        # One container deep: what a callback or a data set holds may be very much.
        self._held = list(container.items() if isinstance(container, dict) else container)

    def restore(self) -> None:
        # The same object is filled again, as others may hold it too.
        refill(self._container, self._held)


class _Named:
    """What a class or the globals of a file have under one name."""

    def __init__(self, space: Any, key: str) -> None:
        self._space = space
        self._key = key
        self._value = self.value
        self._content = _Content(self._value) if is_small_container(self._value) else None

    @property
    def value(self) -> Any:
        space = vars(self._space) if isinstance(self._space, type) else self._space
        return space.get(self._key, _MISSING)

    def restore(self) -> None:
        # By identity: equality of foreign values may be slow, or no bool.
        if self.value is not self._value:
            # The dict of a class cannot be written; the globals of a file can.
            if isinstance(self._space, type):
                setattr(self._space, self._key, self._value)
            else:
                self._space[self._key] = self._value
        if self._content is not None:
            self._content.restore()


class _Globals:
    """Which names the globals of a file have.

    Args:
        space: The globals.
    """

    def __init__(self, space: dict[str, Any]) -> None:
        self._space = space
        self._names = set(space)

    def restore(self) -> None:
        """Takes away what was made since: a step that looks whether it is there would find that of a rehearsal."""
        for name, _ in list(self.new_values()):
            del self._space[name]

    def new_values(self) -> Iterator[tuple[str, Any]]:
        """Names and values of what was made since."""
        # In one go: another thread may make a global meanwhile.
        for name in [name for name in list(self._space) if name not in self._names]:
            value = self._space[name]
            # Parts of packages are bound as they are imported, and never again. What Python keeps of a file, such as
            # the warnings that it has shown, is no state of a step.
            if not isinstance(value, _CODE) and not name.startswith("__"):
                yield name, value


class _Tensor:
    """What a tensor held."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = version_counter(tensor)
        self._held = tensor.detach().clone()

    def restore(self) -> None:
        tensor = self._tensor.detach()
        # Only where it was written, which the version counter tells at no cost.
        if version_counter(tensor) != self._version and tensor.shape == self._held.shape:
            tensor.copy_(self._held)
            self._version = version_counter(tensor)


class Reached:
    """What a walk has reached, with the tensors among it.

    Results that a function has kept (``functools.lru_cache``) are forgotten, if it had kept none before.

    Args:
        state: What was reached.
        module: Whose parameters and buffers are looked after elsewhere.
    """

    def __init__(self, state: ObjectState, module: nn.Module) -> None:
        self._state = state
        self._marks = self._state.marks()
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._tensors: list[_Tensor] = []
        # A data set in a global may be too large to be there twice.
        left = _MOST_BYTES
        for tensor in self._state.tensors():
            if id(tensor) not in own and _can_be_kept(tensor) and tensor.nbytes <= left:
                left -= tensor.nbytes
                self._tensors.append(_Tensor(tensor))
        # Only those that were empty: results of before cannot be told from those of the rehearsal.
        self._empty_caches = [cache for cache in self._state.caches if not cache.cache_info().currsize]

    def marks(self) -> list[Any]:
        """What all of it holds now."""
        return self._state.marks()

    def difference(self, now: list[Any], meanwhile: list[Any] | None = None) -> str:
        """The path of something that is not what it was; empty if all is.

        Args:
            now: Its marks.
            meanwhile: Marks of before; the path is of something that was not what it was by then, either.
        """
        return self._state.difference(self._marks, now, meanwhile)

    def changed_since(self, before: list[Any], now: list[Any]) -> str:
        """The path of something that is not what it was by the marks of ``before``; empty if all is."""
        return self._state.difference(before, now)

    def restore(self, now: list[Any] | None = None) -> None:
        """All of it is what it was.

        Args:
            now: Its marks, where they are known already.
        """
        self._state.put_back(self._marks, now)
        for tensor in self._tensors:
            tensor.restore()
        for cache in self._empty_caches:
            cache.cache_clear()


class Surroundings:
    """What a step can change outside its module, as it is now.

    Args:
        trainer: Whose callbacks, data sets and datamodule count.
        module: Whose code is searched for what it names.
    """

    def __init__(self, trainer: Any, module: nn.Module) -> None:
        self._objects = _objects_of(trainer, module)
        self._attributes = [Attributes(owner) for owner in self._objects.values()]
        self._notes = _Notes(trainer)
        places = places_of_code(module)
        self._named = {path: _Named(space, key) for path, space, key in places}
        self._globals = [_Globals(space) for space in globals_of_code(module, places)]
        # In order and once each: many submodules are of one class.
        classes = dict.fromkeys([*(type(child) for child in module.modules()), *classes_of_held(module)])
        of_code = ObjectState((), copies=True, classes=classes, only_own=True)
        # A shadow's modules call these very hooks, while it has copies of its own.
        hooks = {f"a hook of all modules, {place}": hook for place, hook in enumerate(hooks_of_all_modules())}
        objects = {**self._objects, **hooks}
        near = ObjectState((), follow_code=False, copies=True, objects=objects, only_own=True, most=_MOST_NEAR)
        self._reached = [Reached(of_code, module), Reached(near, module)]
        # Rehearsals run under them, as they may change what operators return; but a counter of operators counts those
        # of the steps that are trained. Slices call more of them than one device does, which is no fault of a step.
        modes = {f"mode {place}": mode for place, mode in enumerate(watching_modes())}
        self._modes: list[Reached] = []
        for path, mode in modes.items():
            # Behind one of the user's may be all that a trainer has; one of a library keeps its notes in objects of it.
            only_own = not is_library(type(mode))
            held = {path: mode}
            state = ObjectState((), follow_code=False, copies=True, objects=held, only_own=only_own, most=_MOST_NEAR)
            self._modes.append(Reached(state, module))

    def restore(self) -> None:
        """All of it is what it was."""
        for owner in self._attributes:
            owner.restore()
        self._notes.restore()
        for named in self._named.values():
            named.restore()
        for space in self._globals:
            space.restore()
        for reached in self._reached:
            reached.restore()
        self.restore_modes()

    def restore_modes(self) -> None:
        """What modes have noted is what it was."""
        for reached in self._modes:
            reached.restore()

    def values(self) -> Iterator[tuple[str, Any]]:
        """Names and values as they are now."""
        for path, owner in self._objects.items():
            yield from ((f"{path}.{key}", value) for key, value in vars(owner).items())
        yield from ((f"trainer.{key}", value) for key, value in self._notes.values())
        for path, named in self._named.items():
            if named.value is not _MISSING:
                yield path, named.value
        for space in self._globals:
            yield from space.new_values()


def _can_be_kept(tensor: torch.Tensor) -> bool:
    """Whether to keep a copy of a tensor that the user's code names."""
    # Others may hold several tensors behind one, which copy_ would not put back as they were.
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_plain and not tensor.is_inference() and not tensor.is_meta


def is_small_container(value: Any) -> bool:
    """Whether to keep a copy of what ``value`` holds."""
    # The exact types: a subclass may do more than hold items when it is cleared and filled.
    return type(value) in MUTABLE and len(value) <= _LARGEST_CONTAINER


def _is_note(value: Any, depth: int) -> bool:
    """Whether ``value`` is a number, a text or a tensor, or a small container of them, or of such containers."""
    if not is_small_container(value) and not isinstance(value, tuple):
        return isinstance(value, (*PLAIN, torch.Tensor))
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return depth > 0 and all(_is_note(item, depth - 1) for item in items)


def _objects_of(trainer: Any, module: nn.Module) -> dict[str, Any]:
    """Objects of the user's classes that a step reaches through its trainer, and data sets that its module holds."""
    # Replicas and shadows hold the same data set, as it may be large.
    found = [(f"self.{path}", held) for path, held in reachable(module, (Dataset,), follow_code=False)]
    found += [(f"trainer.callbacks[{index}]", callback) for index, callback in enumerate(trainer.callbacks)]
    found.append(("trainer.datamodule", getattr(trainer, "datamodule", None)))
    # Loaders are found at the loop that runs; before it begins there are none.
    loop = active_loop(trainer)
    combined = None if loop is None else combined_loader(loop)
    for index, loader in enumerate([] if combined is None else combined.flattened):
        found.append((f"the data set of loader {index}", getattr(loader, "dataset", None)))
    owners: dict[int, tuple[str, Any]] = {}
    for path, owner in found:
        for own_path, own in _unwrapped(path, owner):
            # Lightning's own callbacks, such as the progress bar, are not called in a rehearsal.
            if own_attributes(own) is not None and not is_library(type(own)):
                owners.setdefault(id(own), (own_path, own))
    return dict(owners.values())


def _unwrapped(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    """``owner``, or the data sets of which torch's own classes make another one, such as a subset."""
    if not isinstance(owner, Dataset) or not is_library(type(owner)):
        yield path, owner
        return
    for key, value in vars(owner).items():
        if isinstance(value, Dataset):
            yield from _unwrapped(f"{path}.{key}", value)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value[:_MOST_PARTS]):
                if isinstance(item, Dataset):
                    yield from _unwrapped(f"{path}.{key}[{index}]", item)
