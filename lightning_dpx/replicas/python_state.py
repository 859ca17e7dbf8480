"""Plain Python state of the replicas: one set of objects for all; tensors and submodules per replica.

Replicas hold the same Python objects wherever those neither are nor hold a tensor or a submodule (see ``replicate``),
so most of what hooks and steps change need not be carried. What is left for this file:

- an attribute that a hook set on the user's module: before a step the replicas get it;
- an attribute that steps rebind: the first replica's value counts, so ``self.count += 1`` counts once a step;
- containers with tensors: every replica has a mirror of its own, and what steps do to it is done to the user's, too;
- a container without tensors that gets its first one: from then on it is mirrored.

The cost of a step grows with the number of attributes, not with what they hold.
"""

import copy
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightning_dpx.devices import device_beside
from lightning_dpx.errors import GatherError, ReplicationError, WholeBatchError
from lightning_dpx.python_objects.object_contents import OF_EVERY_MODULE
from lightning_dpx.python_objects.object_graph import (
    ATOMS,
    MUTABLE,
    ObjectGraph,
    is_tensor_or_module,
    items_of,
    pairs_of,
    size_of,
)
from lightning_dpx.replicas.attribute_watch import AttributeWatch
from lightning_dpx.replicas.hook_copies import HookCopies
from lightning_dpx.replicas.mirrors import Mirrors
from lightning_dpx.replicas.remote_tensor import RemoteTensor, source_of, version_of
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replicate import SHARED_TYPES, like_parameter, prepare_memo
from lightning_dpx.replicas.shared_iterators import IteratorsOfStep
from lightning_dpx.replicas.unseen_changes import UnseenChanges

_MISSING = object()
_SMALL = 64  # items up to which a shared container is watched item by item; beyond, by its length
_FEW = 2**16  # elements of a tensor that is copied to other replicas whether they use it or not
_MOST_WATCHED = 4096  # containers of one attribute that are watched


class PythonState:
    """Keeps the plain attributes of the replicas together.

    Args:
        replicas: K replicas that are equal now.
        private: Names of attributes that belong to the framework.
        skip: Types of submodules that are looked after elsewhere.
        keep: Objects that are shared whatever they hold.

    Attributes:
        unseen: What steps change.
        hooks: Those of the user, on the first replica's submodules and parameters.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        private: frozenset[str] = frozenset(),
        skip: tuple[type, ...] = (),
        keep: Sequence[object] = (),
    ) -> None:
        self._root = replicas[0]
        self._others = list(replicas[1:])
        self._private = private | OF_EVERY_MODULE
        self._skip = skip
        self._kept = {id(kept): kept for kept in keep}
        self._several_devices = any(replica.device != self._root.device for replica in self._others)
        self._mirrors = Mirrors()
        self._watched: dict[tuple[int, str], list[tuple[Any, Any]]] = {}
        self._contents: dict[tuple[int, str], list[Any]] = {}  # copies of what these hold, where that is little
        self._memos: dict[int, dict[int, Any]] = {}
        self._rebound: set[tuple[int, str]] = set()  # by the step that has just ended
        self._begun = False
        self.unseen: UnseenChanges = UnseenChanges(self._root.module)
        self._iterators = IteratorsOfStep(self._root.device)
        self._modules = {replica.index: self._looked_after(replica) for replica in replicas}
        self._seen = [_remembered(self._own(child)) for child in self._modules[0]]
        self._expected: dict[int, list[dict[str, Any]]] = {}
        self._watches = self._new_watches()
        self.hooks: HookCopies = HookCopies(replicas, self._modules, partial(self._translated, lazily=True))
        if not self._others:
            return
        for index, child in enumerate(self._modules[0]):
            for key, value in self._own(child).items():
                self._watch(index, key, value)
                self._iterators.note((index, key), value)
                for replica in self._others:
                    attributes = vars(self._modules[replica.index][index])
                    if key in attributes:
                        self._pair((index, key), replica.index, value, attributes[key])
        # What was mirrored until here was copied together with the hooks.
        self.hooks.are_outdated = False
        for replica in self._others:
            self._expected[replica.index] = [self._own(child) for child in self._modules[replica.index]]

    # ---- before a step ----

    def share(self) -> None:
        """Before a step, first of all: the replicas get what was set on the user's module since the last one.

        Raises:
            ReplicationError: submodules were added or removed.
        """
        if not self._others:
            return
        self._follow_structure()
        # Memos go by ids, and what a step has dropped may have left its id to something new.
        self._memos = {}
        for replica in self._others:
            replica.hidden.follow()
        self._send_new_containers()
        modules = self._modules[0]
        for index in self._watches[0].suspects():
            self._send_attributes(index, modules[index])
        self.hooks.follow()
        for replica in self._others:
            self._restore(replica)
        # Only now: what was rebound has been noted on the way, by _send and by _restore.
        self.unseen.end(self._modules[0])
        self._sync_mirrors()
        self._rebound.clear()
        self._begun = True

    def _follow_structure(self) -> None:
        known = self._root.modules
        buffers = self._root.buffers
        self._root.refresh()
        # Replica.refresh() keeps its lists where the module consists of the same objects.
        if self._root.modules is not known:
            self._check_modules()
            for replica in self._others:
                replica.refresh()
            self._modules[0] = self._looked_after(self._root)
            self._watches = self._new_watches()
        if self._root.buffers is not buffers:  # a step put new tensors in their place, on every replica
            for replica in self._others:
                replica.refresh()
        self.hooks.check_parameters()

    def _send_attributes(self, index: int, child: nn.Module) -> None:
        """What was set or deleted on the user's submodule goes to its counterparts."""
        seen = self._seen[index]
        now = self._own(child)
        self._watches[0].note(index)
        # A module with a tensor is looked at in every step, and mostly is as it was.
        if len(seen) == len(now) and all(map(_is_still, seen.values(), now.values())) and seen.keys() == now.keys():
            return
        for key, value in now.items():
            if key not in seen or not _is_still(seen[key], value):
                self._send(index, key, value)
        # What was deleted on the user's module is gone on its replicas as well.
        for key in seen.keys() - now.keys():
            self._watched.pop((index, key), None)
            self._contents.pop((index, key), None)
            self._iterators.forget((index, key))
            self._forget_mirrors(index, key)
            for replica in self._others:
                vars(self._modules[replica.index][index]).pop(key, None)
                self._expected[replica.index][index].pop(key, None)
        self._seen[index] = _remembered(now)

    def _send(self, index: int, key: str, value: Any) -> None:
        self._forget_mirrors(index, key)
        self._watch(index, key, value)
        self._iterators.note((index, key), value)
        for replica in self._others:
            # What the step itself has rebound, it mostly rebinds again without reading it: large
            # tensors of it are copied when they are used. What a hook has set is there to be used.
            translated = self._translated(replica, value, lazily=(index, key) in self._rebound)
            state = vars(self._modules[replica.index][index])
            # A number that the replica has made of it in the last step would be overwritten unseen.
            if key in state:
                expected = self._expected[replica.index][index]
                self.unseen.note_numbers(index, expected, {key: state[key]}, self._modules[0])
            state[key] = translated
            self._expected[replica.index][index][key] = translated
            self._pair((index, key), replica.index, value, translated)

    def _restore(self, replica: Replica) -> None:
        """What a step rebound on another replica than the first is forgotten."""
        watch = self._watches[replica.index]
        for index in watch.suspects():
            child = self._modules[replica.index][index]
            expected = self._expected[replica.index][index]
            state = vars(child)
            # All that was expected is there, and by its number nothing else beside what is private.
            is_as_expected = all(state.get(key, _MISSING) is value for key, value in expected.items())
            if is_as_expected and len(state) - len(expected) == self._num_private(child):
                watch.note(index)
                continue
            now = {key: state.get(key) for key in expected}
            self.unseen.note_numbers(index, expected, now, self._modules[0])
            for key in [key for key in state if key not in self._private and key not in expected]:
                del state[key]
            state.update(expected)

    def _num_private(self, child: nn.Module) -> int:
        return len(self._private & vars(child).keys())

    def _sync_mirrors(self) -> None:
        if not self._mirrors:
            return
        for replica in self._others:
            self._mirrors.sync(replica.index, partial(self._translated, replica, lazily=True))
        # A mirror has the containers that it was made with. Where the user's got others, the whole
        # attribute is copied and paired anew, once for each attribute.
        for index, key in self._mirrors.note():
            value = vars(self._modules[0][index]).get(key, _MISSING)
            if value is not _MISSING:
                self._send(index, key, value)

    def _forget_mirrors(self, index: int, key: str) -> None:
        if self._mirrors.forget((index, key)):
            self._memos = {}

    @property
    def has_iterators(self) -> bool:
        """Whether the module holds any iterators."""
        return self._iterators.has_any

    def share_iterators_of_code(self) -> None:
        """From the next step on, replicas also take the same items of iterators that classes and globals hold."""
        self._iterators.include_code_of(self._root.module)

    @contextmanager
    def iterators_shared(self) -> Iterator[IteratorsOfStep]:
        """The step runs in here, between :meth:`share` and :meth:`collect`: all replicas take the same items."""
        # One proxy for the same iterator in all modules, so that their takes are counted together.
        if self._others:
            self._iterators.begin([self._modules[0], *(self._modules[replica.index] for replica in self._others)])
        try:
            yield self._iterators
        except (GatherError, WholeBatchError):  # what the step took, it takes again with the whole batch
            self._iterators.end(undone=True)
            raise
        finally:
            self._iterators.end()

    # ---- between the turns of a step, and after it ----

    def hand_over(self) -> None:
        """Between two replicas that take turns on different devices: containers that got tensors are mirrored."""
        # On one device the other replica can use the tensors as they are.
        if self._several_devices and self._begun:
            self._memos = {}
            self._send_new_containers()
            if self.hooks.are_outdated:
                self.hooks.follow()

    def wrote_shared(self) -> bool:
        """Whether the step that is under way changed a container that all replicas share."""
        if not self._begun:
            return False
        watched = chain.from_iterable(self._watched.values())
        return any(_mark(container) != mark for container, mark in watched)

    def collect(self, active: Sequence[Replica]) -> None:
        """After a step: the user's containers get what the active replicas did to their mirrors, in replica order."""
        if not self._others:
            return
        self._begun = False
        self._memos = {}
        # Replica after replica, the order in which one device would have seen the rows.
        for replica in active:
            if replica is not self._root:
                for attribute in self._mirrors.merge(replica.index, partial(self._translated_back, replica)):
                    self.unseen.note_container(*attribute)
        # Shared containers grow by what every slice appends, where one device appends once.
        for attribute, entries in self._watched.items():
            if any(map(_has_grown, entries)):
                self.unseen.note_container(*attribute)
        self._bring_home()
        # For the next step: what this one has rebound by itself, on the user's own module.
        for index in self._watches[0].suspects():
            seen = self._seen[index]
            for key, value in self._own(self._modules[0][index]).items():
                if key not in seen or not _is_still(seen[key], value):
                    self._rebound.add((index, key))

    def put_back(self) -> None:
        """After a step that will run again, instead of :meth:`collect`: what it rebound is what it was.

        So are containers that all replicas share; of large ones only the length is known. Tensors are not held from
        before the step, and stay as the step left them.
        """
        if not self._others:
            return
        for attribute, entries in self._watched.items():
            for (container, mark), content in zip(entries, self._contents[attribute], strict=True):
                if _mark(container) != mark:
                    _fill(container, mark, content)
        for index in self._watches[0].suspects():
            seen = self._seen[index]
            state = vars(self._modules[0][index])
            for key, value in self._own(self._modules[0][index]).items():
                if key not in seen:
                    del state[key]
                elif not _is_still(seen[key], value) and not isinstance(seen[key], _SeenTensor):
                    state[key] = seen[key]

    def _bring_home(self) -> None:
        """Tensors that other replicas put into shared containers are moved to the first device."""
        if not self._several_devices:
            return
        home = self._root.device
        seen: set[int] = set()
        for entries in self._watched.values():
            for container, mark in entries:
                # Where nothing was changed, nothing of another device can have come.
                if _mark(container) != mark:
                    _on_device(container, home, seen)

    # ---- what is shared, and what is mirrored ----

    def _watch(self, index: int, key: str, value: Any) -> None:
        """Notes the containers behind an attribute that hold no tensor yet."""
        self._watched.pop((index, key), None)
        self._contents.pop((index, key), None)
        # These are no containers; each replica has its own, or all have the same.
        if type(value) in ATOMS or isinstance(value, (torch.Tensor, nn.Module)):
            return
        graph = ObjectGraph(is_tensor_or_module, self._is_boundary)
        graph.walk([value])
        # What leads to tensors is mirrored already. All else is one object for all replicas, and is
        # watched for its first tensor.
        leading = graph.leading()
        shared = [held for key, held in graph.objects.items() if isinstance(held, MUTABLE) and key not in leading]
        if shared:
            watched = shared[:_MOST_WATCHED]
            self._watched[index, key] = [(held, _mark(held)) for held in watched]
            self._contents[index, key] = list(map(_content_of, watched))

    def _send_new_containers(self) -> None:
        """Attributes with a shared container that has changed are looked at again: it may hold tensors now."""
        for (index, key), entries in list(self._watched.items()):
            if all(_mark(container) == mark for container, mark in entries):
                continue
            value = vars(self._modules[0][index]).get(key, _MISSING)
            if value is _MISSING:
                continue
            graph = ObjectGraph(is_tensor_or_module, self._is_boundary)
            graph.walk([value])
            leading = graph.leading()
            # Only where a tensor has come is the attribute mirrored; other changes are seen by all.
            if any(id(container) in leading for container, _ in entries):
                self._send(index, key, value)
            else:
                self._watch(index, key, value)

    def _pair(self, attribute: tuple[int, str], replica: int, source: Any, copied: Any) -> None:
        if self._mirrors.pair(attribute, replica, source, copied):
            self.hooks.are_outdated = True
            self._memos.pop(replica, None)  # which does not know them

    def _is_boundary(self, value: Any) -> bool:
        return id(value) in self._kept or isinstance(value, SHARED_TYPES)

    def _translated(self, replica: Replica, value: Any, *, lazily: bool) -> Any:
        """``value`` of the root for ``replica``."""
        if type(value) in ATOMS:
            return value
        memo = self._memo(replica)
        if isinstance(value, torch.Tensor) and id(value) not in memo:
            plain = value.detach()
            device = device_beside(plain, self._root.device, replica.device)
            # A step of the first replica may write it in place before another one looks at it.
            lazily = lazily and plain.numel() > _FEW
            return RemoteTensor(plain, device) if lazily else plain.to(device, copy=True)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            device = device_beside(tensor, self._root.device, replica.device)
            if not isinstance(tensor, nn.Parameter):
                return RemoteTensor(tensor.detach(), device)
            # Hooks average such parameters in place: each replica needs a copy to write to, and
            # its hidden tensors follow the first one's before every step.
            copied = like_parameter(tensor, tensor.detach().to(device, copy=True))
            replica.hidden.add([(tensor, copied)])
            return copied

        return self._copied(value, memo, place)

    def _translated_back(self, replica: Replica, value: Any) -> Any:
        """``value`` of ``replica`` for the root."""
        if type(value) in ATOMS:
            return value

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, RemoteTensor):
                return source_of(tensor)
            return tensor.to(device_beside(tensor, replica.device, self._root.device))

        return self._copied(value, self._memo(replica, back=True), place)

    def _copied(self, value: Any, known: dict[int, Any], place: Any) -> Any:
        memo = dict(known)
        try:
            prepare_memo(memo, [value], [], place=place, is_boundary=self._is_boundary)
            return copy.deepcopy(value, memo)
        except Exception:  # noqa: BLE001  iterators, files, C handles: there is one of it, for all
            return value

    def _memo(self, replica: Replica, *, back: bool = False) -> dict[int, Any]:
        """The counterparts of submodules, parameters, buffers and mirrored containers, by id."""
        # Replica 0 has no counterparts of its own, so the sign tells the directions apart.
        place = -replica.index if back else replica.index
        if place not in self._memos:
            memo: dict[int, Any] = {}
            pairs = [
                *zip(self._root.modules, replica.modules, strict=True),
                *zip(self._root.parameters, replica.parameters, strict=True),
                # Not strict: between two turns only one of both may have registered a new buffer.
                *zip(self._root.buffers, replica.buffers, strict=False),
            ]
            pairs += self._mirrors.pairs(replica.index)
            for mine, theirs in pairs:
                if back:
                    memo[id(theirs)] = mine
                else:
                    memo[id(mine)] = theirs
            self._memos[place] = memo
        return self._memos[place]

    # ---- structure and hooks ----

    def _check_modules(self) -> None:
        mine, theirs = (dict(replica.module.named_modules()) for replica in (self._root, self._others[0]))
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            now, then = (type(modules.get(name)).__name__ for modules in (mine, theirs))
            if type(mine.get(name)) is not type(theirs.get(name)):
                raise ReplicationError(
                    f"The module has other submodules now than its replicas: {name} is {now} and was {then}. Change it "
                    "before fit (configure_model)."
                )

    def _looked_after(self, replica: Replica) -> list[nn.Module]:
        shared = _modules_of(self._kept.values())
        return [child for child in replica.modules if not isinstance(child, self._skip) and id(child) not in shared]

    def _new_watches(self) -> dict[int, AttributeWatch]:
        watches = {}
        for index, modules in self._modules.items():
            # What a step leaves on the user's own module may have a graph; replicas get copies.
            is_copy = index > 0
            watches[index] = AttributeWatch(modules, keeps_tensors=is_copy, private=OF_EVERY_MODULE)
        return watches

    def _own(self, child: nn.Module) -> dict[str, Any]:
        return {key: value for key, value in vars(child).items() if key not in self._private}


def _on_device(value: Any, home: torch.device, seen: set[int]) -> Any:
    """``value`` with all tensors on ``home``, or on the host where a step has put them; containers stay themselves.

    Args:
        value: A tensor, or anything that may hold some.
        home: A device.
        seen: The ids of the containers that have been gone through.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device_beside(value, home, home) else value.to(home)
    if type(value) is tuple:
        moved = [_on_device(item, home, seen) for item in value]
        return value if all(map(operator.is_, moved, value)) else tuple(moved)
    if not isinstance(value, MUTABLE) or id(value) in seen:
        return value
    seen.add(id(value))
    held: Any = value
    if isinstance(held, set):
        strange = [(item, moved) for item in held if (moved := _on_device(item, home, seen)) is not item]
        held.difference_update(item for item, _ in strange)
        held.update(moved for _, moved in strange)
        return value
    for key, item in pairs_of(held) if isinstance(held, dict) else enumerate(list(held)):
        moved = _on_device(item, home, seen)
        # Only then, as a class of its own may do something when an item is set.
        if moved is not item:
            held[key] = moved
    return value


def _modules_of(kept: Iterable[Any]) -> set[int]:
    """The ids of all modules among ``kept``, and of what those hold."""
    found: set[int] = set()
    for module in kept:
        if isinstance(module, nn.Module):
            found.update(map(id, module.modules()))
    return found


def _mark(container: Any) -> Any:
    """Differs if a container was changed; beyond a few items, if their number was."""
    # Asked in every step: a list of thousands of losses must not be walked for it.
    size = size_of(container)
    if size > _SMALL:
        return size
    return list(map(id, items_of(container)))


def _content_of(container: Any) -> list[Any] | None:
    """What a small container holds, for :func:`_fill`."""
    if size_of(container) > _SMALL:
        return None
    return pairs_of(container) if isinstance(container, dict) else items_of(container)


def _fill(container: Any, mark: Any, content: list[Any] | None) -> None:
    """Gives a container what it held, or at least takes out of a list what was appended."""
    if content is None:
        if isinstance(container, list):
            del container[mark:]
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in content:
            container[key] = value  # to update a counter would be to count
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _has_grown(entry: tuple[Any, Any]) -> bool:
    """Whether a container has another number of items than its mark says."""
    container, mark = entry
    return size_of(container) != (mark if isinstance(mark, int) else len(mark))


@dataclass(frozen=True, slots=True)
class _SeenTensor:
    """A tensor as it was; held weakly, or the graph behind it would outlive the step."""

    tensor: "weakref.ref[torch.Tensor]"
    version: int


def _remembered(attributes: dict[str, Any]) -> dict[str, Any]:
    seen = dict(attributes)
    for key, value in attributes.items():
        if isinstance(value, torch.Tensor):
            seen[key] = _SeenTensor(weakref.ref(value), version_of(value))
    return seen


def _is_still(seen: Any, value: object) -> bool:
    if isinstance(seen, _SeenTensor):
        return isinstance(value, torch.Tensor) and seen.tensor() is value and seen.version == version_of(value)
    return seen is value
