"""Names for what a step saves: the module call that is running, and a number."""

import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from lightning_dpx.memory.execute.calls import Call, repeating
from lightning_dpx.memory.execute.compiled_calls import hook_compiled_call
from lightning_dpx.memory.execute.module_anatomy import Anatomies, Passive
from lightning_dpx.memory.plan.plan import module_of
from lightning_dpx.python_objects.compiled import OfClasses, functions_compiled_in, is_compiled
from lightning_dpx.torch_compat import (
    DisableTorchFunction,
    compiled_call_of,
    hook_compiled_function,
    is_compiled_function,
    is_traceable_wrapper_subclass,
)
from lightning_dpx.traced_hooks import AsideInOneGraph

_OF_NO_CALL = "?:0"  # no module has such a path, so no plan has such a name
OF_CODE = "?"  # nor this one, with which names of calls of compiled functions begin


class _Running:
    """A step that is under way.

    Attributes:
        stack: Name, number of values so far and what is noted of the running calls, innermost last.
        saved: Tensors that autograd has saved so far.
        noted: The calls that may have to be made again.
        given: The name of the next value, where names are given elsewhere.
        watch: Told of every call.
        hears: Whether all that autograd saves is counted.
    """

    __slots__ = ("given", "hears", "noted", "saved", "stack", "watch")

    def __init__(self) -> None:
        # Entries are lists because numbers are counted up in place; the first one is the root's.
        self.stack: list[list[Any]] = [["", 0, None]]
        self.saved = 0
        self.noted: list[weakref.ref[Call]] = []
        self.given: str | None = None
        self.watch: Callable[[str, int], None] | None = None
        self.hears = True


class Listener(Protocol):
    """Is told of the calls that are noted."""

    def begins(self, call: Call) -> None:
        """A call begins."""

    def ends(self, call: Call) -> None:
        """A call is over."""

    def code_begins(self) -> None:
        """A compiled function begins."""

    def code_ends(self) -> None:
        """It is over."""


class CallNames:
    """Which module call is running: hooks that stay on the modules and cost two list operations a call.

    Args:
        module: The root; its own name is empty.
        again: Names of calls that may have to be made again.
        opened: Paths of modules whose compiled functions are told from what they run beside them, of those that
            :func:`openable` finds; others are one code with all of their parts.
        told: The warning where hooks of a part are left out that is compiled as one graph later on; empty for hooks
            that must not be.

    Attributes:
        again: As given.
        told: As given.
        is_distributed: Whether parameters are tensors of which each process has a part.
        compiled: Paths of the parts that are compiled, in which there are no hooks, as of :func:`compiled_parts`.
        closed: Of ``opened``, those whose compiled functions have called modules with hooks.
        functions: The compiled functions of ``opened``, with the paths of those that call them.
        runs_code: Whether anything is compiled.
        parts: The modules with hooks, by path.
        listener: Is told of the calls that are noted.
    """

    def __init__(
        self, module: nn.Module, again: Container[str] = (), opened: Collection[str] = (), told: str = ""
    ) -> None:
        self.listener: Listener | None = None
        self.told: str = told
        self._local = threading.local()
        self.again = again
        self._anatomies = Anatomies()
        self._running: list[_Running] = []
        self._handles: list[Any] = []
        self.compiled: frozenset[str] = frozenset(compiled_parts(module, opened))
        self.closed: set[str] = set()
        self.runs_code: bool = bool(self.compiled or opened)
        self.functions: list[tuple[Any, frozenset[str]]] = _functions_of(module, opened)
        # Only where this holds is every saved tensor looked at for the part of it that is here.
        self.is_distributed: bool = any(map(is_traceable_wrapper_subclass, module.parameters()))
        self.parts: dict[str, nn.Module] = {}
        for path, child in module.named_modules():
            if any(_is_inside(path, part) for part in self.compiled):
                continue  # hooks would be compiled, too
            # The root's name is empty and needs no hook; scripted parts refuse hooks.
            if child is not module and not isinstance(child, torch.jit.ScriptModule):
                self.parts[path] = child
        self.install()

    def install(self, paths: Collection[str] | None = None) -> None:
        """Puts the hooks on: on all parts, or on those with these ``paths``."""
        for function, owners in self.functions:
            self._handles.append(hook_compiled_function(function, partial(self._enter_code, owners)))
        for path, part in self.parts.items():
            if paths is not None and path not in paths:
                continue
            # Only those that may stand aside ask a compiler, which takes a while at every call.
            enter = _CallHooksOrAside(self, path, self.told) if self.told else _CallHooks(self, path)
            # First before the forward and last after it: what other hooks of the module save is
            # told by its call, too.
            if compiled_call_of(part) is not None:
                self._handles.append(hook_compiled_call(part, enter, enter.leave))
                continue
            self._handles.append(part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._handles.append(part.register_forward_hook(enter.leave, always_call=True))

    @property
    def are_on(self) -> bool:
        """Whether any hooks are on."""
        return bool(self._handles)

    def begin(self) -> None:
        """A new step of this thread."""
        self._local.running = running = _Running()
        self._local.stack = running.stack
        self._local.calls = {}
        self._running.append(running)

    def watch(self, watch: Callable[[str, int], None]) -> None:
        """From now on ``watch`` is told of every call of this step: its path, and how many there were of it."""
        self._local.running.watch = watch

    def give(self, name: str) -> None:
        """The name of the next value."""
        running = self._saving
        if running is not None:
            running.given = name

    @property
    def stack(self) -> list[list[Any]] | None:
        """Name, number of values so far and what is noted of the running calls, innermost last.

        ``None`` outside of a step, and while a call is made again.
        """
        stack: list[list[Any]] | None = getattr(self._local, "stack", None)
        if stack is None or repeating():
            return None
        return stack

    @property
    def in_compiled_code(self) -> bool:
        """Whether the innermost running call is one of compiled code, which saves what it likes."""
        if not self.runs_code:
            return False
        stack = self.stack
        if not stack:
            return False
        return stack[-1][0] == OF_CODE or stack[-1][0].partition("#")[0] in self.compiled

    def _enter_code(self, owners: frozenset[str]) -> Callable[[], None]:
        """A compiled function that these modules call begins; gives what tells that it is over."""
        stack = self.stack
        # Within other code it is a part of that.
        if stack is None or self.in_compiled_code:
            return do_nothing
        stack.append([OF_CODE, 0, None, owners])
        if self.listener is not None:
            self.listener.code_begins()
        return partial(self._leave_code, stack)

    def _leave_code(self, stack: list[list[Any]]) -> None:
        stack.pop()
        if self.listener is not None:
            self.listener.code_ends()

    def is_called_by_code(self) -> bool:
        """Whether the module call that begins or ends is one of a compiled function, and a part of it."""
        stack = self.stack
        if not stack or stack[-1][0] != OF_CODE:
            return False
        self.closed |= stack[-1][3]
        return True

    @property
    def calls(self) -> dict[str, int]:
        """Calls so far, by path."""
        calls: dict[str, int] = self._local.calls
        return calls

    @property
    def saved(self) -> int:
        """Tensors that autograd has saved so far, counted by :meth:`count`."""
        running = self._saving
        if running is None:
            return 0
        return running.saved

    def count(self) -> None:
        """Counts one more tensor that autograd saves."""
        running = self._saving
        if running is not None:
            running.saved += 1

    @property
    def _saving(self) -> "_Running | None":
        """The step that saves a tensor in this thread."""
        # In a backward of the step's own that is a thread of autograd's, in which nothing began. If several
        # threads run the module at once, it is not known which of them that belongs to.
        running: _Running | None = getattr(self._local, "running", None)
        if running is None and len(self._running) == 1:
            return self._running[0]
        return running

    def note(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> Call:
        """A call that begins, and that may have to be made again."""
        with DisableTorchFunction():  # the mode of a shift would take every look at a tensor for a use
            call = Call(module, name, args, kwargs, self.saved, self._anatomies)
        call.is_counted = self._local.running.hears
        self._local.running.noted.append(weakref.ref(call))
        if self.listener is not None:
            self.listener.begins(call)
        return call

    def call_that_makes(self, storage: int) -> Call | None:
        """The innermost of the running calls that was not given that memory, if it is noted, and heard all along."""
        # A call does not make what it was given, but the one around it may.
        for _, _, noted, *_ in reversed(self.stack or ()):
            call: Call | None = noted
            if call is not None and not any(argument.is_in(storage) for argument in call.arguments.tensors):
                if call.is_counted:
                    return call
                return None
        return None

    def hear(self, *, hears: bool) -> None:
        """Whether :meth:`count` is told of all that is saved from now on; without that, those in running calls
        are not known."""
        running = self._saving
        if running is None:
            return
        running.hears = hears
        if not hears:
            for _, _, call, *_ in running.stack:
                if call is not None:
                    call.is_counted = False

    def end(self) -> None:
        """The step is over."""
        running: _Running = self._local.running
        self._local.stack = self._local.running = None
        self._running.remove(running)
        # Arguments know where they come from in the graph, which must go with the step's tensors.
        for reference in running.noted:
            call = reference()
            if call is not None:
                call.settle()

    def next_name(self) -> str:
        """The name of the next value of the running call; one of no plan if that is not known."""
        running = self._saving
        if running is None:
            return _OF_NO_CALL
        # In a routine most modules have no hooks, so calls are not followed: it knows the name.
        if running.given is not None:
            return running.given
        call = running.stack[-1]
        call[1] += 1
        return f"{call[0]}:{call[1]}"

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def compiled_parts(module: nn.Module, opened: Collection[str] = ()) -> list[str]:
    """Paths of the parts that ``torch.compile`` has compiled; not of those inside others, which are one code.

    Args:
        module: The root.
        opened: Paths of those whose compiled functions alone are code.
    """
    paths: list[str] = []
    known: OfClasses = {}
    for path, child in module.named_modules():  # outer ones first
        if path not in opened and is_compiled(child, known) and not any(_is_inside(path, outer) for outer in paths):
            paths.append(path)
    return paths


def openable(module: nn.Module) -> frozenset[str]:
    """Paths of modules that call compiled functions and have most of the model, which may be called outside of these.

    Smaller ones are replayed as a whole with the code in them.
    """
    found = set[str]()
    known: OfClasses = {}
    for path, child in module.named_modules():
        functions = functions_compiled_in(child, known)
        if not functions or not all(map(is_compiled_function, functions)):
            continue
        # A replay of what has most of the model would have most of the step there at once.
        has_most = not path or 2 * _size_of(child) > _size_of(module)
        if has_most and next(child.children(), None) is not None:
            found.add(path)
    return frozenset(found)


def _size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def opened_by(names: Iterable[str], module: nn.Module) -> frozenset[str]:
    """Of those that :func:`openable` finds, the ones in whose parts a plan names anything.

    Args:
        names: Of all values and calls that the plan knows: where a profile has found parts within code, none are.
        module: The root.
    """
    known = {module_of(name) for name in names}
    return frozenset(path for path in openable(module) if any(_is_inside(other, path) for other in known))


def _functions_of(module: nn.Module, opened: Collection[str]) -> list[tuple[Any, frozenset[str]]]:
    """The compiled functions of modules with the paths ``opened``: each once, with the paths of those that call it."""
    owners: dict[int, tuple[Any, set[str]]] = {}
    for path, child in module.named_modules():
        if path not in opened:
            continue
        for function in functions_compiled_in(child):
            owners.setdefault(id(function), (function, set()))[1].add(path)
    return [(function, frozenset(paths)) for function, paths in owners.values()]


def do_nothing() -> None:
    """What tells of the end of a compiled function that is a part of other code."""


def _is_inside(path: str, outer: str) -> bool:
    """Whether the module at ``path`` is a part of the other one, as all are of the root."""
    return path != outer and (not outer or path.startswith(f"{outer}."))


class _CallHooks(Passive):
    """The hooks of one module; copies of the module, by deepcopy or pickle, get some that do nothing."""

    def __init__(self, names: CallNames | None, path: str) -> None:
        self._names = names
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return _CallHooks, (None, self._path)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        names = self._names
        stack = names.stack if names is not None else None
        if names is not None and stack is not None and not names.is_called_by_code():
            calls = names.calls
            calls[self._path] = number = calls.get(self._path, 0) + 1
            watch = names._local.running.watch
            if watch is not None:
                watch(self._path, number)
            name = self._path if number == 1 else f"{self._path}#{number}"
            call = names.note(module, name, args, kwargs) if name in names.again else None
            stack.append([name, 0, call])

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        names = self._names
        stack = names.stack if names is not None else None
        if names is None or stack is None or len(stack) < 2:  # the first entry is the step's own
            return
        if names.is_called_by_code():
            return
        call = stack.pop()[2]
        if call is None:
            return
        with DisableTorchFunction():
            call.left(output)
            if names.listener is not None:
                names.listener.ends(call)


class _CallHooksOrAside(AsideInOneGraph, _CallHooks):
    """Hooks that a compiler leaves out which has to make one graph of the module."""

    def __init__(self, names: CallNames | None, path: str, told: str) -> None:
        _CallHooks.__init__(self, names, path)
        AsideInOneGraph.__init__(self, told)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the same class: what is registered behind the forward is a method of it, bound to the copy.
        return _CallHooksOrAside, (None, self._path, self._told)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The call begins."""
        _CallHooks.__call__(self, module, args, kwargs)

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """It is over."""
        _CallHooks.leave(self, module, inputs, output)
