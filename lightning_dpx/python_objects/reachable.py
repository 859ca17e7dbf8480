"""Objects that the code of a module can reach without an argument: what its attributes hold, and globals that it names.

Random generators and metrics may live anywhere: on a submodule, in a list or a helper object, or at the top of the
user's script. The search follows attributes, containers, and the functions that the code of those classes calls, as
far as those belong to the packages that the classes come from; it stops at a bound, so that its cost is some
milliseconds.
"""

import functools
import sys
import types
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dpx.python_objects.code_map import (
    CODE_MAPS,
    contents_of,
    function_in,
    is_settled,
    named_by,
    names_in,
    namespace_of,
)
from lightning_dpx.python_objects.kept_values import kept_values
from lightning_dpx.python_objects.object_graph import CONTAINERS, items_of, may_hold, pairs_of, size_of
from lightning_dpx.python_objects.origin import is_followed, is_library, package_of, without_libraries
from lightning_dpx.python_objects.own_attributes import own_attributes

_MAX_OBJECTS = 20_000
_MAX_FUNCTIONS = 1_000
_MOST_HELD = 2_000  # objects that attributes hold, whose classes are looked at
_MAX_ITEMS = 1_000  # of one container: a vocabulary holds no generators
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.device, torch.dtype, type, types.ModuleType,
    types.BuiltinFunctionType,
)  # fmt: skip
_NOT_HELD = (*_LEAVES, nn.Module)
# What keeps nothing, or is looked at by itself.
_CODE = (type, types.ModuleType, types.BuiltinFunctionType, nn.Module, property, functools._lru_cache_wrapper)


# What is followed even where a library has made it.
_FOLLOWED = (dict, list, tuple, set, frozenset, deque, types.FunctionType, types.MethodType, nn.Module)


@dataclass(frozen=True, slots=True)
class _Type:
    """What a walk has to know of a type, asked once for all objects of it.

    Attributes:
        is_leaf: Whether nothing is found behind such an object.
        is_library: Whether it belongs to Python or a framework.
        is_match: Whether it is what is looked for; ``None`` where every object of it answers for itself, as proxies do.
    """

    is_leaf: bool
    is_library: bool
    is_match: bool | None

    @classmethod
    def of(cls, kind: type, wanted: tuple[type, ...]) -> "_Type":
        """Looks at ``kind``; ``wanted`` are the types that are looked for."""
        # The last class is `object`, which has both names; types that are built in have a `__getattribute__` of C.
        is_builtin = kind.__module__ == "builtins"
        is_proxy = not is_builtin and any(
            vars(base).keys() & {"__class__", "__getattribute__"} for base in kind.__mro__[:-1]
        )
        is_match = None if is_proxy else issubclass(kind, wanted)
        leads_nowhere = is_library(kind) and not issubclass(kind, _FOLLOWED) and is_match is False
        return cls(issubclass(kind, _LEAVES) or leads_nowhere, is_library(kind), is_match)


class _Search:
    """One walk from a module; what was seen once is not looked at again.

    Args:
        wanted: The types that are looked for.
        packages: Those whose code is followed, beside the user's own; ``None`` to follow none.
    """

    def __init__(self, wanted: tuple[type, ...], packages: frozenset[str] | None) -> None:
        self._wanted = wanted
        self._follows_code = packages is not None
        self._packages = packages or frozenset()
        self._types: dict[type, _Type] = {}
        self._seen: set[int] = set()
        # First in, first out, so that what is near is found before what is far, with
        # the shorter path.
        self._waiting: deque[tuple[_Step | None, Any, _Type]] = deque()
        self._num_visited = 0
        # Classes and functions by id, whose code is followed once the objects have been looked at.
        self._roots: dict[int, Any] = {}
        self._covered: Collection[int] = ()

    def run(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """All objects of the types that ``module`` leads to, with their paths, the nearest ones first."""
        self._add(None, module)
        yield from self._visit()
        # What code leads to comes after what the module itself holds: the path through the module is the shorter one.
        maps = CODE_MAPS
        while self._roots:
            code = maps.follow(self._roots.values(), self._packages)
            maps = code.further
            self._roots = {}
            self._covered = code.covered
            for place in code.places:
                value = place.read()
                # It held an object when the code was followed.
                if isinstance(value, type) and isinstance(place.owner(), types.FunctionType):
                    self._add_class(value)
                self._add((None, "name", place.label), value)
            yield from self._visit()

    def _visit(self) -> Iterator[tuple[str, Any]]:
        while self._waiting and self._num_visited < _MAX_OBJECTS:
            self._num_visited += 1
            # A proxy answers for itself; all others are what their type is.
            step, value, kind = self._waiting.popleft()
            if isinstance(value, self._wanted) if kind.is_match is None else kind.is_match:
                yield _path_of(step), value
            self._add_children(step, value, kind)

    def _add(self, step: "_Step | None", value: Any) -> None:
        """``value`` waits for its turn, unless it has had one or can lead nowhere."""
        kind = self._types.get(type(value))
        if kind is None:
            kind = self._types[type(value)] = _Type.of(type(value), self._wanted)
        if not kind.is_leaf and id(value) not in self._seen:
            self._seen.add(id(value))
            self._waiting.append((step, value, kind))

    def _add_children(self, step: "_Step | None", value: Any, kind: _Type) -> None:
        if isinstance(value, dict):
            # Past what a subclass redefines: a lazy dict of a library may import all of its
            # models to answer.
            if 0 < dict.__len__(value) <= _MAX_ITEMS:
                for key, item in pairs_of(value):
                    self._add((step, "item", key), item)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            if 0 < size_of(value) <= _MAX_ITEMS:
                for index, item in enumerate(items_of(value)):
                    self._add((step, "item", index), item)
        elif isinstance(value, types.FunctionType | types.MethodType):
            self._add_names(value)
        elif isinstance(value, nn.Module):
            self._add_module(step, value)
            self._add_class(type(value))
        elif not kind.is_library and not isinstance(value, Dataset | DataLoader):
            for key, item in list((own_attributes(value) or {}).items()):
                self._add((step, "attribute", key), item)
            self._add_class(type(value))

    def _add_module(self, step: "_Step | None", module: nn.Module) -> None:
        for key, value in list(vars(module).items()):
            if key == "_modules":
                for name, child in list(value.items()):
                    self._add((step, "attribute", name), child)
            # A trainer leads to everything of the run, and tensors lead nowhere.
            elif key not in ("_trainer", "_fabric", "_parameters", "_buffers") and may_hold(value):
                self._add((step, "attribute", key), value)

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            self._add_root(base)

    def _add_root(self, owner: Any) -> None:
        """The code of a class or a function is to be followed, if it belongs to the packages."""
        if id(owner) not in self._covered and self._is_followed(owner):
            self._roots[id(owner)] = owner

    def _is_followed(self, owner: Any) -> bool:
        return self._follows_code and is_followed(getattr(owner, "__module__", None), self._packages)

    def _add_names(self, function: Any) -> None:
        """What a function leads to: what it names, and what its closure holds."""
        # By class: an object that answers for whatever it is asked may raise anything instead.
        if isinstance(function, types.MethodType | staticmethod | classmethod):
            function = function.__func__
        if not isinstance(function, types.FunctionType) or id(function) in self._covered:
            return
        if is_settled(function):
            self._add_root(function)
            return
        if not self._is_followed(function):
            return
        for label, owner, key in named_by(function, self._packages):
            value = function_in(namespace_of(owner).get(key))
            if isinstance(value, type) and owner is function:
                self._add_class(value)
            else:
                self._add((None, "name", label), value)
        for value in contents_of(function):
            self._add((None, "name", function.__qualname__), value)


_Step = tuple[Any, str, Any]  # the step before, and how it went on: to an "item", to an "attribute", or to a "name"


def _path_of(step: _Step | None) -> str:
    if step is None:
        return ""
    before, how, key = step
    if how == "name":
        return str(key)
    path = _path_of(before)
    if how == "item":
        return f"{path}[{key!r}]"
    return f"{path}.{key}".lstrip(".")


def reachable(module: nn.Module, kinds: tuple[type, ...], *, follow_code: bool = True) -> list[tuple[str, Any]]:
    """All objects of ``kinds`` that ``module`` and the code of its classes can reach, each once, with a path.

    Args:
        module: Where the search starts; the trainer behind it, loaders and datasets are left out.
        kinds: What is looked for; the search goes on inside what it finds.
        follow_code: Also search the globals and closures that the methods name.
    """
    packages = _packages_of(module) if follow_code else None
    return list(_Search(kinds, packages).run(module))


Place = tuple[str, Any, Any]  # a name, a namespace (a class, or the globals of a file) and a key in it


def places_of_code(module: nn.Module) -> list[Place]:
    """Where the code of the classes that ``module`` is made of may keep something: outside of ``module``.

    Attributes of those classes, and of the classes of objects that it holds (a schedule, a memory), and globals that
    their methods name, with the namespaces that hold them, also of imported files (``states.total += 1``); likewise of
    the classes and functions that this code names (``Counter.total += 1``), and so on, within the same packages and
    wherever code is not installed but the user's own.

    Args:
        module: Whose classes, and those that they inherit from, are looked at, as far as they are no library's.
    """
    packages = _packages_of(module)
    kinds = classes_of_held(module)
    packages |= without_libraries(frozenset(package_of(kind.__module__) for kind in kinds))
    found: dict[tuple[int, str], Place] = {}
    waiting: deque[Any] = deque([*classes_of(module), *kinds])
    seen: set[int] = set()
    num_functions = 0
    while waiting and num_functions < _MAX_FUNCTIONS:
        owner = waiting.popleft()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if not is_followed(owner.__module__, packages):
            continue
        if isinstance(owner, type):
            for key, value in list(vars(owner).items()):
                function = function_in(value)
                if isinstance(function, types.FunctionType):
                    waiting.append(function)
                elif not key.startswith("__"):
                    found[id(owner), key] = f"{owner.__qualname__}.{key}", owner, key
        else:
            num_functions += 1
            names = names_in(owner.__code__)
            # Of an imported file only what the function names, not all that is in it.
            for space in _namespaces_of(owner, names, packages):
                for name in names:  # in their order, as a set has another one in each process
                    if name not in space:
                        continue
                    found[id(space), name] = name, space, name
                    if isinstance(space[name], type | types.FunctionType):
                        waiting.append(space[name])
    return _with_paths_of_their_own([place for place in found.values() if _is_data(place)])


def globals_of_code(module: nn.Module, places: Collection[Place]) -> list[dict[str, Any]]:
    """The globals of the files that the user's classes and what their code names are in, as far as they are own code.

    A step may make a global that is not there yet, so that no place of :func:`places_of_code` tells of it.

    Args:
        module: Whose classes, and those of what it holds, are looked at.
        places: Those of :func:`places_of_code`.
    """
    packages = _packages_of(module)
    spaces: dict[int, dict[str, Any]] = {}
    for kind in [*classes_of(module), *classes_of_held(module)]:
        file = sys.modules.get(kind.__module__)
        if file is not None and is_followed(kind.__module__, packages):
            spaces[id(vars(file))] = vars(file)
    for _, space, _ in places:
        if isinstance(space, dict):
            spaces[id(space)] = space
    return list(spaces.values())


def _with_paths_of_their_own(places: list[Place]) -> list[Place]:
    """The same, where globals of several files that have one name are told apart by those of the files."""
    times = Counter(path for path, _, _ in places)
    found: list[Place] = []
    for path, space, key in places:
        if times[path] > 1:
            file = space.__module__ if isinstance(space, type) else space.get("__name__")
            found.append((f"{file}.{path}", space, key))
        else:
            found.append((path, space, key))
    return found


def value_at(place: Place) -> Any:
    """What is there."""
    _, space, key = place
    return vars(space)[key] if isinstance(space, type) else space[key]


def _is_data(place: Place) -> bool:
    value = value_at(place)
    if isinstance(value, types.FunctionType):
        return not is_plain_function(value)
    # An object that can be called may keep as much as any other.
    return not isinstance(value, _CODE)


def classes_of_held(module: nn.Module) -> list[type]:
    """The classes of which the attributes of ``module`` and its submodules hold objects.

    Objects in containers and in attributes of other objects count, the nearest ones first. Of installed classes those
    count that come with a class of ``module``.
    """
    packages = _packages_of(module)
    found: dict[type, None] = {}
    waiting: deque[Any] = deque()
    for child in module.modules():
        waiting += [value for value in vars(child).values() if may_hold(value)]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_HELD:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, _NOT_HELD):
            continue
        seen.add(id(value))
        is_own = is_followed(type(value).__module__, packages)
        if is_own:
            kinds = [kind for kind in type(value).__mro__ if is_followed(kind.__module__, packages)]
            found.update(dict.fromkeys(kinds))
        if isinstance(value, CONTAINERS):
            waiting += items_of(value) if size_of(value) <= _MAX_ITEMS else ()
        elif is_own or isinstance(value, types.FunctionType | types.MethodType):
            waiting += (kept_values(value) or {}).values()
    return list(found)


def _packages_of(module: nn.Module) -> frozenset[str]:
    """Top-level packages of the classes that ``module`` is made of; ``__main__`` is one, too."""
    return without_libraries(frozenset(package_of(base.__module__) for base in classes_of(module)))


def classes_of(module: nn.Module) -> list[type]:
    """The classes of ``module`` and its submodules, and those that these inherit from, each once."""
    found: dict[type, None] = {}
    for child in module.modules():
        found.update(dict.fromkeys(type(child).__mro__))
    return list(found)


def _of_base(base: type, packages: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """What ``base`` itself defines, functions as such, if it belongs to ``packages``."""
    if package_of(base.__module__) not in packages:
        return
    for name, value in list(vars(base).items()):
        yield name, function_in(value)


def globals_of(kind: type | types.FunctionType) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The globals that the code of a class or a function names, and those of what it calls; also in imported files.

    Code is followed within the packages of ``kind``, and wherever it is not installed but the user's own.

    Yields:
        The globals of a file, and names among them; modules, classes and functions without a state are left out.
    """
    if isinstance(kind, type):
        packages = without_libraries(frozenset(package_of(base.__module__) for base in kind.__mro__))
        waiting: list[Any] = [function for base in kind.__mro__ for _, function in _of_base(base, packages)]
    else:
        packages = without_libraries(frozenset([package_of(kind.__module__)]))
        waiting = [kind]
    seen: set[int] = set()
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    while waiting and len(seen) < _MAX_FUNCTIONS:
        function = waiting.pop()
        # By class: an object that answers for whatever it is asked may raise anything instead.
        if isinstance(function, types.MethodType | staticmethod | classmethod):
            function = function.__func__
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if not is_followed(function.__module__, packages):
            continue
        names = names_in(function.__code__)
        for namespace in _namespaces_of(function, names, packages):
            _, held = found.setdefault(id(namespace), (namespace, set()))
            for name in names.keys() & namespace.keys():
                value = namespace[name]
                if isinstance(value, types.FunctionType):
                    waiting.append(value)
                if not isinstance(value, type | types.ModuleType) and not is_plain_function(value):
                    held.add(name)
        # Likewise the function behind a decorator.
        waiting.append(getattr(function, "__wrapped__", None))
    yield from ((namespace, tuple(sorted(held))) for namespace, held in found.values())


def is_plain_function(value: Any) -> bool:
    """Whether ``value`` is a function that keeps nothing from call to call."""
    if not isinstance(value, types.FunctionType):
        return False
    given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    # A default value that can be written to is kept from call to call.
    return not value.__closure__ and not vars(value) and all(isinstance(one, _LEAVES) for one in given)


def _namespaces_of(
    function: types.FunctionType, names: dict[str, None], packages: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """The globals of a function, and those of the files that it names."""
    yield function.__globals__
    for name in names.keys() & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType) and is_followed(value.__name__, packages):
            yield vars(value)
