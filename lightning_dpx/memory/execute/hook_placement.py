"""On which modules hooks are: on all while forwards are followed call by call, else where a routine needs them."""

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from lightning_dpx.memory.call_names import path_of
from lightning_dpx.memory.execute.module_anatomy import Passive
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.routine import Routine
from lightning_dpx.traced_hooks import AsideInOneGraph


class HookPlacement:
    """The hooks of one module that tell of calls.

    Args:
        names: Tells which module call is running, with hooks on all modules.
        is_off: Whether no hook is on yet.

    Attributes:
        routine: What forwards follow now, and what the hooks are for; ``None`` where they are followed call by call.
        is_off: Whether no hook is on until the first forward.
    """

    def __init__(self, names: CallNames, *, is_off: bool) -> None:
        self.routine: Routine | None = None
        self.is_off: bool = is_off
        self._names = names
        again = names.again if isinstance(names.again, Collection) else ()
        self._called_again = {path_of(name) for name in again}
        self._handles: list[Any] = []
        if is_off:
            names.remove()

    def put_on(self, varying: Collection[str], enter: Callable[[str], None]) -> None:
        """Puts hooks on all modules, or only where the routine needs them.

        Args:
            varying: Modules whose calls are counted beside those of the routine.
            enter: Told of a call, with the path of its module.
        """
        self.is_off = False
        self.remove()
        self._handles = []
        if self.routine is None:
            self._names.install()
            return
        # Before ours, which are prepended: a call is noted with the hooks on.
        self._names.install(self._called_again)
        paths = paths_of(self.routine).union(varying)
        for path in sorted(paths & self._names.parts.keys()):
            # Of a plan that drops nothing a compiler may leave the hooks out, if it tells so.
            told = self._names.told
            hook = _RoutineHookOrAside(enter, path, told) if told else _RoutineHook(enter, path)
            part = self._names.parts[path]
            self._handles.append(part.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def remove(self) -> None:
        """Takes all hooks off."""
        self._names.remove()
        for handle in self._handles:
            handle.remove()


def paths_of(routine: Routine) -> set[str]:
    """The modules that ``routine`` has hooks on."""
    return {call.path for call in (*routine.stretches, *routine.unseen, *routine.noting)} - {""}


class _RoutineHook(Passive):
    """The hook of one module; copies of the module, by deepcopy or pickle, get one that does nothing."""

    def __init__(self, enter: Callable[[str], None] | None, path: str) -> None:
        self._enter = enter
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _RoutineHook, (None, self._path)

    def __call__(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if self._enter is not None:
            self._enter(self._path)


class _RoutineHookOrAside(AsideInOneGraph, _RoutineHook):
    """A hook that a compiler leaves out which has to make one graph of the module."""

    def __init__(self, enter: Callable[[str], None], path: str, told: str) -> None:
        _RoutineHook.__init__(self, enter, path)
        AsideInOneGraph.__init__(self, told)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The module is called."""
        _RoutineHook.__call__(self, module, args, kwargs)
