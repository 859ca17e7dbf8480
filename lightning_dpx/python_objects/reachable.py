"""Objects that the code of a module can reach without an argument: what its attributes hold, and globals that it names.

Random generators and metrics may live anywhere: on a submodule, in a list or a helper object, or at the top of the
user's script. The search follows attributes, containers, and the functions that the code of those classes calls, as
far as those belong to the packages that the classes come from; it stops at a bound, so that its cost is some
milliseconds.
"""

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dpx.python_objects.origin import is_library, package_of, without_libraries

_MAX_OBJECTS = 20_000
_MAX_FUNCTIONS = 1_000
_MAX_ITEMS = 1_000  # of one container: a vocabulary holds no generators
_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.device, torch.dtype)


def reachable(module: nn.Module, kinds: tuple[type, ...], *, follow_code: bool = True) -> list[tuple[str, Any]]:
    """All objects of ``kinds`` that ``module`` and the code of its classes can reach, each once, with a path.

    Args:
        module: Where the search starts; the trainer behind it, loaders and datasets are left out.
        kinds: What is looked for; the search goes on inside what it finds.
        follow_code: Also search the globals and closures that the methods name.
    """
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    packages = _packages_of(module) if follow_code else frozenset()
    waiting: deque[tuple[str, Any]] = deque([("", module)])
    while waiting and len(seen) < _MAX_OBJECTS:
        path, value = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            found.append((path, value))
        waiting.extend(_children(path, value, packages))
    return found


Place = tuple[str, Any, Any]  # a name, a namespace (a class, or the globals of a file) and a key in it


def places_of_code(module: nn.Module) -> list[Place]:
    """Where the code of the classes that ``module`` is made of may keep something: outside of ``module``.

    Attributes of those classes, and globals that their methods name, with the namespaces that hold them.

    Args:
        module: Whose classes, and those that they inherit from, are looked at, as far as they are no library's.
    """
    packages = _packages_of(module)
    classes = {base: None for child in module.modules() for base in type(child).__mro__}
    found: dict[tuple[int, str], Place] = {}
    for base in classes:
        if package_of(base.__module__) not in packages:
            continue
        for key, value in list(vars(base).items()):
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            function = function.fget if isinstance(function, property) else function
            if isinstance(function, types.FunctionType):
                spaces = function.__globals__
                names = set(_names(function.__code__)) & spaces.keys()
                found.update({(id(spaces), name): (name, spaces, name) for name in sorted(names)})
            elif not key.startswith("__"):
                found[id(base), key] = f"{base.__qualname__}.{key}", base, key
    return [place for place in found.values() if _is_data(place)]


def _is_data(place: Place) -> bool:
    _, space, key = place
    value = vars(space)[key] if isinstance(space, type) else space[key]
    return not callable(value) and not isinstance(value, types.ModuleType | nn.Module | property)


def _children(path: str, value: Any, packages: frozenset[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        if len(value) <= _MAX_ITEMS:
            yield from ((f"{path}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        if len(value) <= _MAX_ITEMS:
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(list(value)))
    elif isinstance(value, types.FunctionType | types.MethodType):
        yield from _of_function(value, packages)
    elif isinstance(value, nn.Module):
        yield from _of_module(path, value)
        yield from _of_class(type(value), packages)
    elif not isinstance(value, type | types.ModuleType | Dataset | DataLoader) and not is_library(type(value)):
        yield from ((f"{path}.{key}".lstrip("."), item) for key, item in list(getattr(value, "__dict__", {}).items()))
        yield from _of_class(type(value), packages)


def _of_module(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in list(vars(module).items()):
        if key == "_modules":
            yield from ((f"{path}.{name}".lstrip("."), child) for name, child in list(value.items()))
        elif key not in ("_trainer", "_fabric", "_parameters", "_buffers") and not isinstance(value, _LEAVES):
            yield f"{path}.{key}".lstrip("."), value


def _packages_of(module: nn.Module) -> frozenset[str]:
    """Top-level packages of the classes that ``module`` is made of; ``__main__`` is one, too."""
    classes = {base for child in module.modules() for base in type(child).__mro__}
    return without_libraries(frozenset(package_of(base.__module__) for base in classes))


def _of_class(kind: type, packages: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if package_of(base.__module__) in packages:
            for name, value in list(vars(base).items()):
                function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                function = function.fget if isinstance(function, property) else function
                yield f"{base.__qualname__}.{name}", function


def _of_function(function: Any, packages: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """What a function names: globals, attributes of imported helpers that it names, and its closure."""
    function = getattr(function, "__func__", function)
    if package_of(getattr(function, "__module__", None)) not in packages:
        return
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if package_of(value.__name__) in packages:
                yield from ((f"{value.__name__}.{one}", vars(value)[one]) for one in names & vars(value).keys())
        elif isinstance(value, type):
            yield from _of_class(value, packages)
        else:
            yield name, value
    for cell in function.__closure__ or ():
        try:
            yield function.__qualname__, cell.cell_contents
        except ValueError:  # a cell that is still empty captures nothing
            continue
    if isinstance(function, types.FunctionType):
        yield function.__qualname__, getattr(function, "__wrapped__", None)


def globals_of(kind: type | types.FunctionType) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The globals that the code of a class or a function names, and those of functions of its package that it calls.

    Yields:
        The globals of a file, and names among them; modules, classes and functions are left out.
    """
    if isinstance(kind, type):
        packages = without_libraries(frozenset(package_of(base.__module__) for base in kind.__mro__))
        waiting: list[Any] = [function for _, function in _of_class(kind, packages)]
    else:
        packages = without_libraries(frozenset([package_of(kind.__module__)]))
        waiting = [kind]
    seen: set[int] = set()
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    while waiting and len(seen) < _MAX_FUNCTIONS:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if package_of(function.__module__) not in packages:
            continue
        namespace = function.__globals__
        _, names = found.setdefault(id(namespace), (namespace, set()))
        for name in set(_names(function.__code__)) & namespace.keys():
            value = namespace[name]
            if isinstance(value, types.FunctionType):
                waiting.append(value)
            elif not isinstance(value, type | types.ModuleType):
                names.add(name)
        waiting.append(getattr(function, "__wrapped__", None))
    yield from ((namespace, tuple(sorted(names))) for namespace, names in found.values())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
