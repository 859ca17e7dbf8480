"""What the code of classes and functions names, followed once: the places that may hold an object.

A search for generators or metrics goes through code at every look, and that of a large library is thousands of
functions. Which names they use does not change, and hardly what these stand for: functions, classes and files. So all
of it is followed once. Later the names are only compared, in C, and read anew are the places that hold anything else.

    CODE_MAPS.follow(roots)   every name holds the same function, class or file as before  -> the map of last time
                              else                                                          -> all is followed anew
    map.places                what may be an object, or lead to one, when it is read

Nothing lives longer for it: functions, classes and files are known by their ids, as long as weak references tell that
they live.
"""

import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from lightning_dpx.python_objects.origin import is_followed

_MAX_MAPS = 8
_MAX_OWNERS = 20_000
_MOST_DECORATORS = 4  # around a function
# Constants: they lead nowhere and may be held. Numbers are none, as classes count with them.
_CONSTANTS = (type(None), bool, str)
_LEAVES = (type, types.ModuleType, types.BuiltinFunctionType)
# By id, which is its own while the code is held; in order, as that of a set of texts differs from process to process.
_KNOWN_NAMES: dict[int, tuple[types.CodeType, dict[str, None]]] = {}

Owner = Any  # of a namespace: a class, a file, or a function, whose globals are meant
Named = tuple[str, Owner, str]  # how messages call a place, whose namespace it is in, and its key there


class NamedPlace(NamedTuple):
    """Where code may find an object.

    Attributes:
        label: What messages call it.
        owner: Whose namespace it is in, weakly.
        key: The name in that namespace.
    """

    label: str
    owner: "weakref.ref[Any]"
    key: str

    def read(self) -> Any:
        """What is there now, functions as such; ``None`` without."""
        owner = self.owner()
        # A class or file that is gone holds nothing; the next look makes another map.
        if owner is None:
            return None
        return function_in(namespace_of(owner).get(self.key))


class _Names:
    """Names of one namespace, and what they held: by id, as all of it is watched."""

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._keys = frozenset(vars(owner)) if isinstance(owner, type) else None
        self._missing: set[str] = set()
        self._held: dict[str, int] = {}
        self._wrapped: dict[str, int] = {}

    def add(self, key: str, space: Any) -> None:
        """``key`` is a name of the namespace ``space``, or no name there."""
        if key not in space:
            self._missing.add(key)
            return
        value = space[key]
        function = function_in(value)
        # A static method or a property may be another object around the same function.
        if function is value:
            self._held[key] = id(value)
        else:
            self._wrapped[key] = id(function)

    def are_same(self) -> bool:
        owner = self._owner()
        if owner is None:
            return False
        space = namespace_of(owner)
        if self._keys is not None and space.keys() != self._keys:
            return False
        # In C, for the names are thousands.
        if not self._missing.isdisjoint(space):
            return False
        if list(map(id, map(space.get, self._held))) != list(self._held.values()):
            return False
        return all(id(function_in(space.get(key))) == function for key, function in self._wrapped.items())


class _Closure:
    """What a function closes over, by id, as all of it is watched."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = weakref.ref(function)
        self._held = list(map(id, contents_of(function)))

    def is_same(self) -> bool:
        function = self._function()
        return function is not None and list(map(id, contents_of(function))) == self._held


class CodeMap:
    """All that the code of some classes and functions names, and so on.

    Args:
        roots: The classes and functions.
        packages: Those whose code is followed.
        covered: The ids of those whose code another map has followed.

    Attributes:
        covered: The ids of the classes and functions whose code was followed, here and before.
        further: Maps of what is found from here on.
        places: Where something may be that leads on, and that is neither class, file nor function.
    """

    def __init__(self, roots: Collection[Owner], packages: frozenset[str], covered: Collection[int] = ()) -> None:
        self._packages = packages
        self._gone: list[Any] = []  # weak references to what lives no longer
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._constants: dict[int, Any] = {}
        self._names: dict[int, _Names] = {}
        self._closures: list[_Closure] = []
        self._waiting: deque[Owner] = deque(roots)
        self.covered: set[int] = set(covered)
        self.places: list[NamedPlace] = []
        self._follow()
        self.further: CodeMaps = CodeMaps(self.covered)

    def is_same(self) -> bool:
        """Whether the code is what it was, and so are the functions, classes and files that it names."""
        if self._gone or not all(names.are_same() for names in self._names.values()):
            return False
        return all(closure.is_same() for closure in self._closures)

    def _follow(self) -> None:
        noted: set[tuple[int, str]] = set()
        while self._waiting and len(self.covered) < _MAX_OWNERS:
            owner = self._waiting.popleft()
            if id(owner) in self.covered:
                continue
            self.covered.add(id(owner))
            self._watch(owner)
            if not is_followed(getattr(owner, "__module__", None), self._packages):
                continue
            # What a decorated function calls is in its closure, and no name leads there.
            if isinstance(owner, types.FunctionType) and (owner.__closure__ or vars(owner)):
                self._closures.append(_Closure(owner))
                for value in contents_of(owner):
                    self._watch(value)
                    self._go_on(None, value)
            for label, space_owner, key in named_by(owner, self._packages):
                space = namespace_of(space_owner)
                self._go_on(space_owner, function_in(space.get(key)))
                # A class makes a new view of its namespace each time.
                place = id(space_owner if isinstance(space_owner, type) else space), key
                if place not in noted:
                    noted.add(place)
                    self._note(place[0], NamedPlace(label, weakref.ref(space_owner), key), space_owner)

    def _go_on(self, owner: Owner, value: Any) -> None:
        """The code behind what ``owner`` names is followed as well: functions, and classes that a function uses."""
        if isinstance(value, types.FunctionType) and is_settled(value):
            self._waiting.append(value)
        elif isinstance(value, type) and isinstance(owner, types.FunctionType):
            self._waiting.extend(value.__mro__)

    def _note(self, space: int, place: NamedPlace, owner: Owner) -> None:
        """What is settled by what it is has only to be compared from now on; else the place is to be read."""
        value = place.read()
        if not is_settled(value):
            self.places.append(place)
            return
        if space not in self._names:
            self._watch(owner)
            self._names[space] = _Names(owner)
        self._names[space].add(place.key, namespace_of(owner))
        self._watch(value)

    def _watch(self, value: Any) -> None:
        """An id says what ``value`` is only as long as it lives."""
        # Constants take no weak references; to hold them costs nothing.
        if isinstance(value, _CONSTANTS):
            self._constants[id(value)] = value
        elif id(value) not in self._watched:
            self._watched[id(value)] = weakref.ref(value, self._gone.append)


class CodeMaps:
    """Maps by what they begin with.

    Args:
        covered: The ids of classes and functions that none of them has to follow.
    """

    def __init__(self, covered: Collection[int] = ()) -> None:
        # By what a search begins with, the classes of a module: copies of it, as a rehearsal makes, share a map.
        self._covered = covered
        self._maps: OrderedDict[tuple[frozenset[int], frozenset[str]], CodeMap] = OrderedDict()

    def follow(self, roots: Collection[Owner], packages: frozenset[str]) -> CodeMap:
        """What the code of ``roots`` names, as it is now.

        Args:
            roots: Classes and functions.
            packages: Those whose code is followed.
        """
        key = frozenset(map(id, roots)), packages
        known = self._maps.pop(key, None)
        if known is None or not known.is_same():
            known = CodeMap(roots, packages, self._covered)
        self._maps[key] = known
        # The one that was not asked for the longest goes first.
        if len(self._maps) > _MAX_MAPS:
            self._maps.popitem(last=False)
        return known


CODE_MAPS = CodeMaps()


def named_by(owner: Owner, packages: frozenset[str]) -> Iterator[Named]:
    """The places that a class has, or that a function names: globals, and attributes of files that it names.

    Args:
        owner: The class or function.
        packages: Those whose code is followed.
    """
    if isinstance(owner, type):
        for key in list(vars(owner)):
            yield f"{owner.__qualname__}.{key}", owner, key
        return
    names = names_in(owner.__code__)
    for name in names:
        yield name, owner, name
        value = owner.__globals__.get(name)
        # Of an imported file only what the function names is looked at, not all that is in it.
        if isinstance(value, types.ModuleType) and is_followed(value.__name__, packages):
            for inner in names:
                yield f"{value.__name__}.{inner}", value, inner


def namespace_of(owner: Owner) -> Any:
    """Where the names of an owner are looked up."""
    if isinstance(owner, types.FunctionType):
        return owner.__globals__
    return vars(owner)


def function_in(value: Any) -> Any:
    """The function that a descriptor hides, and with it the names in its code; ``value`` itself otherwise."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value


def contents_of(function: types.FunctionType) -> list[Any]:
    """What ``function`` closes over, and the function that it was made to stand for; ``None`` where that is nothing."""
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a cell that is still empty captures nothing
            found.append(None)
    # Behind a decorator made with functools.wraps stands the function that was written.
    found.append(getattr(function, "__wrapped__", None))
    return found


def is_settled(value: Any) -> bool:
    """Whether all that it leads to is known from what it is: names, and a closure over what is settled itself."""
    return _is_settled(value, _MOST_DECORATORS)


def _is_settled(value: Any, depth: int) -> bool:
    if not isinstance(value, types.FunctionType):
        return isinstance(value, (*_CONSTANTS, *_LEAVES))
    if not value.__closure__ and not vars(value):
        return True
    # A function may close over itself.
    return depth > 0 and all(_is_settled(held, depth - 1) for held in contents_of(value))


def names_in(code: types.CodeType) -> dict[str, None]:
    """The names of globals and attributes in ``code`` and in what is defined there, in alphabetical order."""
    known = _KNOWN_NAMES.get(id(code))
    if known is None:
        known = _KNOWN_NAMES[id(code)] = code, dict.fromkeys(sorted(raw_names(code)))
    return known[1]


def raw_names(code: types.CodeType) -> Iterator[str]:
    """The same in no order, some of them more than once; nothing is kept of ``code``."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from raw_names(constant)
