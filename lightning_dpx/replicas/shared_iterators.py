"""Iterators that a module holds advance once in a step of several replicas, as they do on one device.

Replicas hold the same iterator, and each of them would take its next item: K in a step instead of one. So while a step
runs, something stands in for the iterator, in the places where the module holds it. What the first replica takes is
fetched and noted; the others get copies of the same items, in the same order, on their devices.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import IOBase
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dpx.devices import canonical_device, is_host
from lightning_dpx.python_objects.object_graph import may_hold
from lightning_dpx.python_objects.origin import is_library
from lightning_dpx.python_objects.reachable import places_of_code
from lightning_dpx.replicas.context import current_rank
from lightning_dpx.replicas.mirrors import has_attributes
from lightning_dpx.torch_compat import tree_map_only

# A vocabulary or a list of samples is not walked through in every step.
_MOST_ITEMS = 64  # of a list or dict that is searched for iterators
_MISSING = object()
Place = tuple[str, Any, Any]  # a path, the namespace or container there, and a key in it


@dataclass(frozen=True, slots=True)
class Taken:
    """What a call gave: a value, with a copy from before the first replica could write it; or an error."""

    value: Any = None
    kept: Any = None
    error: Exception | None = None

    def again(self) -> "Taken":
        """The same item, or error, for a step that is taken again."""
        if self.error is not None:
            return self
        return Taken(value=_copied(self.kept, None), kept=self.kept)


class IteratorProxy(Iterator[Any]):
    """Shows the attributes of an iterator, and its class to code that asks for it.

    Args:
        iterator: The real one.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        # Past __setattr__, which hands everything on to the iterator.
        vars(self)["_iterator"] = iterator

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the iterator, for ``isinstance``."""
        return type(vars(self)["_iterator"])

    def __next__(self) -> Any:
        return self._take(next)

    def send(self, value: Any) -> Any:
        """The next item of a generator, which gets ``value``."""
        return self._take(lambda iterator: iterator.send(value))

    def _take(self, fetch: Callable[[Any], Any]) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_iterator"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_iterator"], name, value)

    def __len__(self) -> int:
        return len(vars(self)["_iterator"])

    def __bool__(self) -> bool:
        return bool(vars(self)["_iterator"])

    def __getitem__(self, key: Any) -> Any:
        return vars(self)["_iterator"][key]


class SharedIterator(IteratorProxy):
    """What replicas have instead of an iterator while they take a step.

    Args:
        iterator: The real one.
        home: The device of the first replica; what the iterator yields there is copied to where the others live.
        taken: What a step that is taken again had taken.
    """

    def __init__(self, iterator: Iterator[Any], home: torch.device, taken: Sequence[Taken] = ()) -> None:
        super().__init__(iterator)
        vars(self).update(_home=home, _lock=threading.Lock(), _taken=list(taken), _places={}, _may_fetch=True)

    def _take(self, fetch: Callable[[Any], Any]) -> Any:
        """The next item of the caller: each replica has its own place in what the step has taken so far."""
        state = vars(self)
        rank = current_rank()
        number = 0 if rank is None else rank.rank
        # Also while an item is fetched: a generator that a second thread enters meanwhile raises an error.
        with state["_lock"]:
            place = state["_places"].get(number, 0)
            state["_places"][number] = place + 1
            # The first to come here fetches; that is not always the first replica, if they run in
            # threads.
            if place == len(state["_taken"]):
                state["_taken"].append(self._fetched(fetch))
            taken: Taken = state["_taken"][place]
            if taken.error is not None:
                raise taken.error
            # From the copy, which was made before any replica could write what was fetched.
            if number == 0:
                return taken.value
            return _copied(taken.kept, state["_home"])

    def _fetched(self, fetch: Callable[[Any], Any]) -> Taken:
        state = vars(self)
        # The same step on the whole batch has ended; a slice that wants more items does something
        # else.
        if not state["_may_fetch"]:
            raise RuntimeError("A step in slices takes more items of an iterator than the whole batch did.")
        return _fetched(state["_iterator"], fetch)


def _fetched(iterator: Any, fetch: Callable[[Any], Any]) -> Taken:
    try:
        value = fetch(iterator)
    except Exception as error:  # noqa: BLE001  StopIteration too: all replicas come to the end
        return Taken(error=error)
    return Taken(value=value, kept=_copied(value, None))


class IteratorTaken(Exception):  # noqa: N818  ends a rehearsal, and is no fault of the step
    """A rehearsal takes an item of an iterator that cannot be copied, so it could not be given back."""


class UntakenIterator(IteratorProxy):
    """What a shadow has instead of an iterator that cannot be copied.

    Args:
        iterator: The real one.
        path: Where the module holds it.
        requested: Gets the path, when an item is asked for.
    """

    def __init__(self, iterator: Iterator[Any], path: str, requested: list[str]) -> None:
        super().__init__(iterator)
        vars(self).update(_path=path, _requested=requested)

    def _take(self, fetch: Callable[[Any], Any]) -> Any:
        state = vars(self)
        state["_requested"].append(state["_path"])
        raise IteratorTaken(state["_path"])


class PeekedIterator(IteratorProxy):
    """Gives the same items to every run of a step that is only tried, and then to the step itself.

    Args:
        iterator: The real one.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__(iterator)
        vars(self).update(_taken=[], _place=0, _is_tried=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PeekedIterator":
        """The iterator itself: a copy would not be rewound with the rest."""
        return self

    @property
    def was_requested(self) -> bool:
        """Whether an item was taken."""
        return bool(vars(self)["_taken"])

    @property
    def is_used_up(self) -> bool:
        """Whether all items that were taken for runs that were only tried have been given to real ones."""
        state = vars(self)
        return not state["_is_tried"] and state["_place"] >= len(state["_taken"])

    def rewind(self, *, is_tried: bool) -> None:
        """The next one to ask gets the first item.

        Args:
            is_tried: It is a run that is only tried.
        """
        vars(self).update(_place=0, _is_tried=is_tried)

    def _take(self, fetch: Callable[[Any], Any]) -> Any:
        state = vars(self)
        taken = state["_taken"]
        place = state["_place"]
        if place == len(taken):
            if not state["_is_tried"]:
                # A real step that takes more than the trials did goes on where they stopped.
                return fetch(state["_iterator"])
            taken.append(_fetched(state["_iterator"], fetch))
        state["_place"] = place + 1
        # A copy each time, since a run may write what it takes.
        item: Taken = taken[place].again()
        if item.error is not None:
            raise item.error
        return item.value


class IteratorsOfStep:
    """The iterators that a module holds, and what stands in for them while a step runs.

    Args:
        home: The device of the first replica.
    """

    def __init__(self, home: torch.device) -> None:
        self._home = home
        self._held: dict[tuple[int, str], None] = {}  # attributes that are, or hold, iterators; in order
        self._shared: list[SharedIterator] = []
        self._asked: list[Iterator[Any]] = []  # those that the last step has taken items of
        self._exchanged: list[tuple[Any, Any, Any, SharedIterator]] = []  # namespace, key, what was there and is now
        self._again: dict[int, tuple[Any, list[Taken]]] = {}  # by id of an iterator: taken by a step that never was
        self._of_code: list[Place] = []
        self._exchanged_of_code: list[tuple[Place, Any, SharedIterator]] = []  # what was there, and is now

    @property
    def has_any(self) -> bool:
        """Whether there is anything to stand in for."""
        return bool(self._held or self._exchanged or self._of_code)

    @property
    def has_left(self) -> bool:
        """Whether a step has taken items in vain, which are still to be given."""
        return bool(self._again)

    def were_asked(self, iterator: Any) -> bool:
        """Whether the step that is under way, or was the last, has taken an item of ``iterator``."""
        wanted = _unwrapped(iterator)
        under_way = (vars(shared)["_iterator"] for shared in self._shared if vars(shared)["_places"])
        return any(one is wanted for one in chain(under_way, self._asked))

    def include_code_of(self, module: nn.Module) -> None:
        """Includes iterators of the module's classes, and of globals, from the next step on.

        No rehearsal has found out whether the step takes any of them, and which rows they belong to.
        """
        self._of_code = [place for place in places_of_code(module) if is_iterator(_of_space(place[1], place[2]))]

    def note(self, attribute: tuple[int, str], value: Any) -> None:
        """An attribute of a submodule, by its index and name, has this value now."""
        if _is_own_object(value) or next(places_in(attribute[1], None, value), None) is not None:
            self._held[attribute] = None
        else:
            self._held.pop(attribute, None)

    def forget(self, attribute: tuple[int, str]) -> None:
        """There is no such attribute any more."""
        self._held.pop(attribute, None)

    def begin(self, modules: Sequence[Sequence[nn.Module]]) -> None:
        """A step of several replicas begins.

        Args:
            modules: By replica, its submodules in one order.
        """
        self.end()
        self._asked.clear()
        empty = set[int]()  # ids of values in which there is none
        for index, name in self._held:
            places_by_replica: list[list[Place]] = []
            for of_replica in modules:
                attributes = vars(of_replica[index])
                value = attributes.get(name)
                # All modules of a library's model may hold one object with its settings, of a hundred attributes.
                places = [] if id(value) in empty else list(places_in(name, attributes, value))
                if not places:
                    empty.add(id(value))
                places_by_replica.append(places)
            for path, space, key in places_by_replica[0]:
                iterator = _unwrapped(space[key])
                known, taken = self._again.pop(id(iterator), (iterator, []))
                assert known is iterator, "held here, so that its id stays its own"
                shared = SharedIterator(iterator, self._home, taken)
                self._shared.append(shared)
                # By path: containers that lead to tensors are each replica's own, and so are the
                # places in them.
                for its_path, its_space, its_key in chain.from_iterable(places_by_replica):
                    if its_path != path:
                        continue
                    if its_space[its_key] is not shared:  # one list may be that of all replicas
                        before = _unwrapped(its_space[its_key])
                        self._exchanged.append((its_space, its_key, before, shared))
                        its_space[its_key] = shared
        for place in self._of_code:
            iterator = _of_space(place[1], place[2])
            # A global may be named by several functions, and has its proxy after the first.
            if is_iterator(iterator) and type(iterator) is not SharedIterator:
                _, taken = self._again.pop(id(iterator), (iterator, []))
                shared = SharedIterator(iterator, self._home, taken)
                self._shared.append(shared)
                self._exchanged_of_code.append((place, iterator, shared))
                _write_to_space(place[1], place[2], shared)

    def rewind(self) -> None:
        """Callers from here on get the items that were taken in this step, from the first one, and no others."""
        for shared in self._shared:
            vars(shared)["_places"].clear()
            vars(shared)["_may_fetch"] = False

    def end(self, *, undone: bool = False) -> None:
        """The step is over: the module holds its iterators again, unless the step has put something else there.

        Args:
            undone: The step will be taken again, and what it took is given once more.
        """
        for space, key, before, shared in self._exchanged:
            if _value(space, key) is shared:
                space[key] = before
        for (_, space, key), before, shared in self._exchanged_of_code:
            if _of_space(space, key) is shared:
                _write_to_space(space, key, before)
        for shared in self._shared:
            state = vars(shared)
            if state["_places"]:
                self._asked.append(state["_iterator"])
            # What no replica has taken, of what the step before had taken in vain, is still to be
            # given.
            used = 0 if undone else max(state["_places"].values(), default=0)
            left = [taken.again() for taken in state["_taken"][used:]]
            if left:
                self._again[id(state["_iterator"])] = state["_iterator"], left
        self._exchanged.clear()
        self._exchanged_of_code.clear()
        self._shared.clear()


_PEEKED: "WeakKeyDictionary[nn.Module, list[Place]]" = WeakKeyDictionary()


def is_iterator(value: Any) -> bool:
    """Whether ``value`` gives its items one after the other, each once; files and modules are something else."""
    return isinstance(value, Iterator) and not isinstance(value, IOBase | nn.Module | torch.Tensor)


def places_in(name: str, namespace: Any, value: Any, key: Any = None, depth: int = 2) -> Iterator[Place]:
    """The places of iterators in an attribute: itself, small lists and dicts, own objects.

    Args:
        name: Of the attribute.
        namespace: What holds it.
        value: What it is.
        key: Where ``namespace`` holds it; ``name`` unless given.
        depth: Of containers and objects in each other that are looked into.
    """
    if is_iterator(value):
        yield name, namespace, name if key is None else key
    elif depth:
        space, items = _items_of(value)
        for inner, item in items:
            yield from places_in(f"{name}.{inner}", space, item, inner, depth - 1)


def _items_of(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    if type(value) in (list, dict):
        few = value if len(value) <= _MOST_ITEMS else ()
        return value, list(few.items() if isinstance(few, dict) else enumerate(few))
    if _is_own_object(value):
        return vars(value), list(vars(value).items())
    return None, []


def _is_own_object(value: Any) -> bool:
    """Whether ``value`` is of a class of the user's, and no part of what replicas have versions of."""
    kind = type(value)
    if is_library(kind) or isinstance(value, nn.Module | torch.Tensor | type | Dataset | DataLoader):
        return False
    return has_attributes(value)


def iterators_that_cannot_be_copied(module: nn.Module) -> list[Iterator[Any]]:
    """The iterators of ``module`` and its submodules of which no copy can be made."""
    return [iterator for iterator in _iterators_of(module) if not _can_be_copied(iterator)]


def _iterators_of(module: nn.Module) -> list[Iterator[Any]]:
    found: dict[int, Iterator[Any]] = {}
    for child in module.modules():
        for key, value in list(vars(child).items()):
            if may_hold(value):
                for _, space, place in places_in(key, vars(child), value):
                    found.setdefault(id(space[place]), space[place])
    return list(found.values())


def _is_peeked(iterator: Iterator[Any]) -> bool:
    """Whether runs that are only tried get its items from a proxy: a copy would come to its end in so many runs.

    Iterators of the user's own classes may be looked at in other ways than by ``next``: they are copied if they can be.
    """
    return type(iterator).__module__ in ("builtins", "itertools") or not _can_be_copied(iterator)


def guard_iterators(shadow: nn.Module, iterators: Sequence[Iterator[Any]], requested: list[str]) -> None:
    """Whatever takes an item of ``iterators`` through ``shadow``, which holds them, is refused.

    Args:
        shadow: Any module.
        iterators: Which.
        requested: Gets the path of every one that an item is asked of.
    """
    if not iterators:
        return
    guarded = {id(iterator) for iterator in iterators}
    for prefix, child in shadow.named_modules():
        for key, value in list(vars(child).items()):
            for path, space, place in list(places_in(key, vars(child), value)):
                if id(space[place]) in guarded:
                    full = ".".join(["self", *filter(None, [prefix, path])])
                    space[place] = UntakenIterator(space[place], full, requested)


@contextmanager
def code_iterators_guarded(module: nn.Module, requested: list[str]) -> Iterator[None]:
    """Whatever takes items of iterators of classes of ``module``, or of globals of its code, is refused for a while.

    Args:
        module: Whose code is searched for what it names.
        requested: See :func:`guard_iterators`.
    """
    found = [(space, key, _of_space(space, key), path) for path, space, key in places_of_code(module)]
    guarded = [(space, key, value, path) for space, key, value, path in found if is_iterator(value)]
    try:
        for space, key, value, path in guarded:
            _write_to_space(space, key, UntakenIterator(value, path, requested))
        yield
    finally:
        for space, key, value, _ in guarded:
            _write_to_space(space, key, value)


@contextmanager
def iterators_peeked(module: nn.Module) -> Iterator[list[PeekedIterator]]:
    """Steps that are only tried in here take items that the next real step gets.

    Afterwards :func:`put_iterators_back` puts the iterators themselves back where all of those have been given.

    Yields:
        What must be rewound before each of them.
    """
    # Items that an earlier trial took come first: their proxy stays, and is not wrapped in another.
    put_iterators_back(module)
    those = {id(iterator) for iterator in _iterators_of(module) if _is_peeked(iterator)}
    places = [place for place in places_of_code(module) if is_iterator(_of_space(place[1], place[2]))]
    for child in module.modules():
        for key, value in list(vars(child).items()):
            found = places_in(key, vars(child), value)
            places += [place for place in found if id(place[1][place[2]]) in those]
    peeked: dict[int, PeekedIterator] = {}
    for _, space, key in places:
        iterator = _of_space(space, key)
        proxy = peeked.setdefault(id(iterator), PeekedIterator(iterator))
        _write_to_space(space, key, proxy)
    try:
        yield list(peeked.values())
    finally:
        for _, space, key in places:
            proxy = _of_space(space, key)
            # Of what nothing was taken, nothing need be given back.
            if type(proxy) is PeekedIterator and not proxy.was_requested:
                _write_to_space(space, key, vars(proxy)["_iterator"])
        for proxy in peeked.values():
            proxy.rewind(is_tried=False)
        left = [place for place in places if type(_of_space(place[1], place[2])) is PeekedIterator]
        if left:
            _PEEKED.setdefault(module, []).extend(left)


def put_iterators_back(module: nn.Module) -> None:
    """Puts back what :func:`iterators_peeked` has left something else for, if that is used up."""
    # Asked in every step.
    if not _PEEKED:
        return
    left = []
    for place in _PEEKED.pop(module, []):
        proxy = _of_space(place[1], place[2])
        if type(proxy) is PeekedIterator and proxy.is_used_up:
            _write_to_space(place[1], place[2], vars(proxy)["_iterator"])
        elif type(proxy) is PeekedIterator:
            left.append(place)
    if left:
        _PEEKED[module] = left


def _of_space(space: Any, key: str) -> Any:
    """What a namespace, a container or a class has under ``key``."""
    # A class's own dict cannot be written, so classes are spaces by themselves.
    held = vars(space) if isinstance(space, type) else space
    if not isinstance(held, dict):
        return held[key]
    return held.get(key)


def _write_to_space(space: Any, key: str, value: Any) -> None:
    if isinstance(space, type):
        setattr(space, key, value)
    else:
        space[key] = value


def _can_be_copied(iterator: Iterator[Any]) -> bool:
    try:
        copy.deepcopy(iterator)
    except Exception:  # noqa: BLE001  generators, C handles, whatever their classes say
        return False
    return True


def _copied(value: Any, home: torch.device | None) -> Any:
    """Containers and tensors anew; those on ``home`` on the device of the calling replica."""

    def of_replica(tensor: torch.Tensor) -> torch.Tensor:
        if home is None or is_host(home) or canonical_device(tensor.device) != home:
            return tensor.detach().clone()
        # The executor has made the replica's device current in this thread.
        return tensor.detach().to(canonical_device(home.type), copy=True)

    return tree_map_only(torch.Tensor, of_replica, value)


def _unwrapped(iterator: Any) -> Any:
    """What was put back to the middle of an earlier step may hold what stood in for its iterators."""
    if type(iterator) is SharedIterator:
        return vars(iterator)["_iterator"]
    return iterator


def _value(space: Any, key: Any) -> Any:
    if isinstance(space, dict):
        return space.get(key, _MISSING)
    if key < len(space):
        return space[key]
    return _MISSING
