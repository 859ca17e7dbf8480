"""What a module consists of: its parts, their parameters and hooks, and the objects that its attributes lead to.

It is found once a module and again where something in it was replaced, for the walk over objects is long and calls are
many. What cannot be seen through, such as a hook of others or an iterator, is an obstacle to calling the module again.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from lightning_dpx.memory.execute.flat_units import holds_views, is_flat_unit
from lightning_dpx.memory.execute.unit_casts import is_cast
from lightning_dpx.python_objects.object_graph import CopiedEmpty
from lightning_dpx.python_objects.object_state import ObjectState
from lightning_dpx.python_objects.process_generators import GeneratorWatch
from lightning_dpx.python_objects.same_values import SameValues
from lightning_dpx.torch_compat import (
    forward_hooks_of,
    forward_pre_hooks_of,
    is_layout_hook,
    on_distributed_tensors,
    parameters_of,
    submodules_of,
    version_counter,
)


class Passive(CopiedEmpty):
    """Hooks that do nothing while a call is made again."""


class Anatomy:
    """What a module consists of, found once and again where something in it was replaced.

    Args:
        module: Which.
        looks: Whether to look at what its attributes lead to.

    Attributes:
        parts: The module and those in it.
        parameters: Of all of them.
        is_distributed: Whether processes have parts of these, as of tensor-parallel ones, also in a forward.
        state: What the objects behind their attributes hold.
        obstacle: Why no call of it can be made again, whatever it is given; empty if one can.
    """

    def __init__(self, module: nn.Module, *, looks: bool = True) -> None:
        # What is found is held: of a call that is never made again, nothing.
        self.parts: list[nn.Module] = list(module.modules()) if looks else []
        self.parameters: list[torch.Tensor] = []
        self.obstacle: str = _obstacle_in(self.parts)
        # The walk over objects is long.
        walked = [] if self.obstacle else self.parts
        self.is_distributed: bool = _are_distributed(self.parts)
        # What fully_shard keeps of a unit is written by its hooks alone, and a call is made again
        # without them. Where no processes meet in a unit, its values are made again one by one.
        self.state: ObjectState = ObjectState(walked, sharding=not self.is_distributed)
        self.obstacle = self.obstacle or self.state.obstacle
        inside = list[dict[Any, Any]]()
        hooks = list[dict[Any, Any]]()
        for part in self.parts:
            inside.append(submodules_of(part))
            # Views of a flat parameter are other tensors in forward, in backward and in between.
            if not holds_views(part):
                inside.append(parameters_of(part))
                for parameter in parameters_of(part).values():
                    if parameter is not None:
                        self.parameters.append(parameter)
            hooks += (forward_pre_hooks_of(part), forward_hooks_of(part))
        self._inside = _Watched(inside)
        self._hooks = _Watched(hooks)

    def is_same(self) -> bool:
        """Whether it consists of the same still."""
        return self._inside.are_same()

    def has_same_hooks(self) -> bool:
        """Whether no hooks came since, or went."""
        return self._hooks.are_same()

    @property
    def device(self) -> torch.device | None:
        """The device of the first parameter, if there is one."""
        if self.parameters:
            return self.parameters[0].device
        return None

    def versions(self) -> list[int]:
        """The versions of the parameters."""
        return [version_counter(parameter) for parameter in self.parameters]

    def training(self) -> list[bool]:
        """Whether each part is in training."""
        return [part.training for part in self.parts]

    @contextmanager
    def as_it_was(self, training: list[bool]) -> Iterator[None]:
        """It consists of the same in here, each part in ``training`` or not; afterwards all is as it was before.

        Parts may be others by the time of backward: ``functional_call`` puts its parameters in for one forward only.
        """
        now = self.training()
        if now == training and self.is_same():
            yield
            return
        with self._inside.put_back():
            _set_training(self.parts, training)
            try:
                yield
            finally:
                _set_training(self.parts, now)


def _set_training(parts: Sequence[nn.Module], training: Sequence[bool]) -> None:
    for part, trains in zip(parts, training, strict=True):
        part.training = trains


class _Watched(SameValues):
    """What some dicts held when they were first looked at."""

    def __init__(self, dicts: list[dict[Any, Any]]) -> None:
        super().__init__(dicts)
        self._keys = list(map(tuple, dicts))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """The dicts hold in here what they held then."""
        now = [dict(each) for each in self._dicts]
        found = iter(self.values)
        try:
            for each, keys in zip(self._dicts, self._keys, strict=True):
                each.clear()
                each.update(zip(keys, islice(found, len(keys)), strict=True))
            yield
        finally:
            for each, before in zip(self._dicts, now, strict=True):
                each.clear()
                each.update(before)


class Anatomies:
    """What modules consist of, and what the objects behind their attributes hold, of those that calls were noted of."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[nn.Module, Anatomy, list[Any]]] = {}
        self.generators: GeneratorWatch = GeneratorWatch()

    def of(self, module: nn.Module) -> tuple[Anatomy, list[Any]]:
        """What was found for ``module``, and what that holds now."""
        # The entry holds the module, so no other one gets its id.
        known = self._known.get(id(module))
        if known is not None and known[1].is_same() and known[1].has_same_hooks():
            _, anatomy, before = known
            now = anatomy.state.marks()
            if not anatomy.state.difference(before, now):
                return anatomy, now
        # Another object may lead to other objects: those are looked for anew.
        anatomy = Anatomy(module)
        now = anatomy.state.marks()
        if not anatomy.obstacle:
            self._known[id(module)] = module, anatomy, now
        return anatomy, now

    def forget(self, module: nn.Module) -> None:
        """Forgets what was found for ``module``."""
        self._known.pop(id(module), None)


def _obstacle_in(parts: Collection[nn.Module]) -> str:
    """Why calls of these modules cannot be made again; empty if they can."""
    for number, part in enumerate(parts):
        if isinstance(part, nn.SyncBatchNorm):
            return "a SyncBatchNorm in it meets the other replicas"
        if number and is_flat_unit(part):
            return "a unit of FullyShardedDataParallel in it meets the other processes"
        # functional_call puts tensors in their place that the step has computed: a call would hold
        # these, and is not counted for that.
        if not holds_views(part) and not all(map(_is_parameter, parameters_of(part).values())):
            return f"a {type(part).__name__} in it has other tensors in the place of its parameters"
        for hook in (*forward_pre_hooks_of(part).values(), *forward_hooks_of(part).values()):
            if number == 0 and is_sharding_hook(hook):
                continue  # its own parameters are there in its backward, and it is called without hooks
            if number and is_layout_hook(hook):
                continue  # it is called again with its module
            # A hook is an object of ours or one of its methods.
            if not isinstance(getattr(hook, "__self__", hook), Passive):
                return f"a {type(part).__name__} in it has forward hooks"
    return ""


def _are_distributed(parts: Collection[nn.Module]) -> bool:
    """Whether processes have parts of the parameters, also while these are gathered."""
    return any(on_distributed_tensors(map(type, parameters_of(part).values())) for part in parts)


def _is_parameter(entry: torch.Tensor | None) -> bool:
    """Whether it is what a module has under the name of a parameter unless others put something else there."""
    return entry is None or isinstance(entry, nn.Parameter)


def is_sharding_hook(hook: Any) -> bool:
    """Whether ``fully_shard`` has registered it, to gather parameters before a forward and free them afterwards.

    So is what stands there while that is off.
    """
    return is_cast(hook) or str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
