"""Registries in which code finds parts of a module by who they are: by ``id()``, or by the very object as a key.

    self.rates = {id(weight): 0.1}        a copy of the module has other weights, whose ids are not there
    Layer.scales[layer] = 2.0             likewise, in a dict of a class or a file, of which there is one for all copies

No comparison with another copy shows what is lost: that one is not found either.
"""

import re
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_dpx.python_objects.code_map import function_in, names_in
from lightning_dpx.python_objects.kept_values import kept_values
from lightning_dpx.python_objects.module_hooks import OF_MODULES, is_ours
from lightning_dpx.python_objects.object_graph import CONTAINERS, items_of, size_of
from lightning_dpx.python_objects.origin import is_installed, is_library
from lightning_dpx.python_objects.reachable import classes_of, classes_of_held, places_of_code, value_at

_MOST_OBJECTS = 5_000
_MOST_FUNCTIONS = 1_000
_MOST_ITEMS = 10_000
_BY_IDENTITY = frozenset({"id", "data_ptr"})  # what code says that looks something up so
_BEFORE_STEPS = frozenset({"__init__", "configure_optimizers", "configure_model", "setup", "on_fit_start"})
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakSet)
# Ids in texts, as keys of what is saved as a file are; no smaller numbers, which names have in them.
_DECIMAL = re.compile(r"(?<!\d)\d{7,20}(?!\d)")
_HEXADECIMAL = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{7,16}(?![0-9a-fA-F])")
_LEAVES = (type, types.ModuleType, torch.Tensor, nn.Module, str, bytes, int, float, type(None))


def identity_registries(module: nn.Module, attributes: Iterable[tuple[str, Any]]) -> list[str]:
    """Paths of the registries that hold parts of ``module``.

    Ids count only where code that may run in a step looks something up by them.

    Args:
        module: Whose parameters, buffers and submodules.
        attributes: What it holds, by path; without what a framework keeps there.
    """
    search = _Search(module)
    for path, value in attributes:
        search.add(f"self.{path}", value, is_shared=False)
    for name, child in module.named_modules():
        for hooks_of in OF_MODULES:
            for hook in hooks_of(child).values():
                if not is_ours(hook):
                    search.add(f"a hook of {name or 'self'}", hook, is_shared=False)
    for place in places_of_code(module):
        search.add(place[0], value_at(place), is_shared=True)
    search.run()
    if search.by_id and _looks_up_ids(module, search.functions, search.kinds):
        return [*search.by_id, *search.by_key]
    return search.by_key


class _Search:
    """A walk through containers, objects of the user's classes and functions.

    Args:
        module: As above.

    Attributes:
        by_id: Paths of containers with ids of its parts.
        by_key: Paths of those that all copies share, with its parts as keys.
        functions: That were met.
        kinds: Classes of the user's of which objects were met.
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        parts: list[Any] = [*tensors, *module.modules()]
        # The module itself may be a key in a list of experiments, which is no part of its steps.
        self._parts = {id(part) for part in parts if part is not module}
        self._ids = {id(part) for part in parts}
        plain = [tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta]
        self._ids.update(tensor.data_ptr() for tensor in plain if tensor.numel())
        self._seen: set[int] = set()
        self._waiting: deque[tuple[str, Any, bool]] = deque()
        self.by_id: list[str] = []
        self.by_key: list[str] = []
        self.functions: list[types.FunctionType] = []
        self.kinds: dict[type, None] = {}

    def add(self, path: str, value: Any, *, is_shared: bool) -> None:
        """Goes to ``value``, too.

        Args:
            path: How it was found.
            value: Anything.
            is_shared: Whether it is no attribute of the module, and one object for all copies.
        """
        if not isinstance(value, _LEAVES):
            self._waiting.append((path, value, is_shared))

    def run(self) -> None:
        """Goes to everything that waits, and to what is behind it."""
        while self._waiting and len(self._seen) < _MOST_OBJECTS:
            path, value, is_shared = self._waiting.popleft()
            # Registries lead to modules, and those to registries.
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, _WEAK):
                self._look_at_keys(path, list(value), is_shared=is_shared)
            elif isinstance(value, CONTAINERS):
                self._look_at_container(path, value, is_shared=is_shared)
            elif isinstance(value, types.FunctionType | types.MethodType) or not is_installed(type(value).__module__):
                self._look_at_object(path, value, is_shared=is_shared)

    def _look_at_container(self, path: str, held: Any, *, is_shared: bool) -> None:
        if size_of(held) > max(_MOST_ITEMS, 2 * len(self._ids)):
            return
        items = items_of(held)
        keys = list(dict.keys(held)) if isinstance(held, dict) else items
        # What is shared finds its parts by its keys; a list finds nothing by its items, but may be searched for ids.
        finds_by_key = isinstance(held, dict | set | frozenset)
        self._look_at_keys(path, keys, is_shared=is_shared and finds_by_key)
        for item in items:
            self.add(path, item, is_shared=is_shared)

    def _look_at_keys(self, path: str, keys: list[Any], *, is_shared: bool) -> None:
        named = list(keys)
        # A pair of a part and a name is a key of that part, too.
        for key in keys:
            if type(key) is tuple:
                named.extend(key)
        if any(map(self._is_id, named)):
            self.by_id.append(path)
        if is_shared and any(id(key) in self._parts for key in named):
            self.by_key.append(path)

    def _is_id(self, key: Any) -> bool:
        """Whether a key is the id of a part, or a text with one in it."""
        if type(key) is int:
            return key in self._ids
        if type(key) is not str:
            return False
        numbers = [int(digits) for digits in _DECIMAL.findall(key)]
        numbers += [int(digits, 16) for digits in _HEXADECIMAL.findall(key)]
        return not self._ids.isdisjoint(numbers)

    def _look_at_object(self, path: str, value: Any, *, is_shared: bool) -> None:
        # Asked of methods alone: an object of the user may answer any name, or fail.
        function = value.__func__ if isinstance(value, types.MethodType) else value
        # Code that nothing of the module's own leads to, such as a method of an object in a global.
        if isinstance(function, types.FunctionType):
            self.functions.append(function)
        else:
            self.kinds.update(dict.fromkeys(type(value).__mro__))
        for name, held in (kept_values(value) or {}).items():
            self.add(f"{path}.{name}", held, is_shared=is_shared)


def _looks_up_ids(module: nn.Module, functions: Collection[types.FunctionType], kinds: Iterable[type]) -> bool:
    """Whether code that may run in a step says ``id`` or ``data_ptr``."""
    waiting = deque([*functions, *_methods_of_steps(module, functions, kinds)])
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = waiting.popleft()
        if id(function) in seen:
            continue
        seen.add(id(function))
        names = names_in(function.__code__)
        if not _BY_IDENTITY.isdisjoint(names):
            return True
        # The user's own functions that it calls.
        for name in names:
            called = function.__globals__.get(name)
            if isinstance(called, types.FunctionType) and not is_installed(called.__module__):
                waiting.append(called)
    return False


def _methods_of_steps(
    module: nn.Module, others: Collection[types.FunctionType], kinds: Iterable[type]
) -> list[types.FunctionType]:
    """Methods without those that run before all steps: what configures optimizers, and what that alone calls.

    Args:
        module: Whose classes are looked at, and those of objects that it holds.
        others: Functions that may call methods, too.
        kinds: Classes of objects that code leads to.
    """
    said_by_others: set[str] = set()
    for function in others:
        said_by_others.update(names_in(function.__code__))
    methods = list(_methods_of(module, kinds))
    called: set[str] = set()
    for kind in classes_of(module):
        if is_library(kind):
            called.update(vars(kind))
    before: set[str] = set(_BEFORE_STEPS)
    grown = True
    while grown:
        said_before: set[str] = set()
        said_later = set(said_by_others)
        for name, function in methods:
            said = said_before if name in before else said_later
            # A method that calls itself is not called by another one for that.
            said.update(names_in(function.__code__).keys() - {name})
        # What a framework calls runs whether or not other code names it.
        only_before = {name for name, _ in methods if name in said_before and name not in called}
        grown = not before.issuperset(only_before - said_later)
        before |= only_before - said_later
    return [function for name, function in methods if name not in before]


def _methods_of(module: nn.Module, others: Iterable[type]) -> Iterator[tuple[str, types.FunctionType]]:
    kinds = dict.fromkeys(others)
    kinds.update(dict.fromkeys(classes_of(module)))
    # What a step calls may be the method of an object that the module holds.
    kinds.update(dict.fromkeys(classes_of_held(module)))
    for kind in kinds:
        if is_library(kind):
            continue
        for name, value in list(vars(kind).items()):
            function = function_in(value)
            if isinstance(function, types.FunctionType):
                yield name, function
