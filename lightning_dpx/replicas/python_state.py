"""Plain Python state of the replicas: one set of objects for all; tensors and submodules per replica.

Replicas hold the same Python objects wherever those neither are nor hold a tensor or a submodule (see ``replicate``),
so most of what hooks and steps change need not be carried. What is left for this file:

- an attribute that a hook set on the user's module: before a step the replicas get it;
- an attribute that steps rebind: the first replica's value counts, so ``self.count += 1`` counts once a step;
- containers with tensors: every replica has a mirror of its own, and what steps do to it is done to the user's, too;
- a container without tensors that gets its first one: from then on it is mirrored.

The cost of a step grows with the number of attributes, not with what they hold.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_dpx.errors import GatherError, ReplicationError, WholeBatchError
from lightning_dpx.python_objects.object_contents import OF_EVERY_MODULE
from lightning_dpx.replicas.copied_attributes import CopiedAttributes
from lightning_dpx.replicas.counterparts import Counterparts
from lightning_dpx.replicas.hidden_modules import HiddenModules
from lightning_dpx.replicas.hook_copies import HookCopies
from lightning_dpx.replicas.mirrors import Mirrors
from lightning_dpx.replicas.parameter_attributes import ParameterAttributes
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.seen_attributes import AttributeChanges, SeenAttributes
from lightning_dpx.replicas.shared_containers import SharedContainers
from lightning_dpx.replicas.shared_iterators import IteratorsOfStep
from lightning_dpx.replicas.tensors_before import HiddenBefore
from lightning_dpx.replicas.unseen_changes import UnseenChanges

_MISSING = object()
_NOTHING_HIDDEN = HiddenBefore()  # of steps that do not run again


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
        of_parameters: What the user and libraries have set on parameters.
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
        # Parameters, buffers, submodules and hooks have ways of their own.
        private |= OF_EVERY_MODULE
        self._looked_after = _LookedAfter(skip, list(keep))
        hidden = HiddenModules(self._root, skip, self._others)
        self._counterparts = Counterparts(self._root, Mirrors(hidden), keep)
        self._hidden = _NOTHING_HIDDEN  # of the step that is under way, where it may run again
        # On one device the other replicas can use tensors as they are.
        several_devices = any(replica.device != self._root.device for replica in self._others)
        self._iterators = IteratorsOfStep(self._root.device)
        home = self._root.device if several_devices else None
        self._containers = SharedContainers(self._counterparts.is_boundary, home, self._iterators.were_asked)
        # Between share() and collect(); what hooks do to shared containers is no step's.
        self._begun = False
        self.unseen: UnseenChanges = UnseenChanges(self._root.module)
        self._modules = {replica.index: self._looked_after.of(replica) for replica in replicas}
        self._seen = SeenAttributes(self._modules[0], private)
        there = partial(self._counterparts.there, lazily=True)
        self.hooks: HookCopies = HookCopies(replicas, self._modules, there)
        self.of_parameters: ParameterAttributes = ParameterAttributes(replicas, there)
        self._copies: dict[int, CopiedAttributes] = {}
        if not self._others:
            return
        for index in range(len(self._modules[0])):
            for key, value in self._seen.of(index).items():
                self._watch_value(index, key, value)
                for replica in self._others:
                    attributes = vars(self._modules[replica.index][index])
                    if key in attributes:
                        self._pair((index, key), replica.index, value, attributes[key])
        # What was mirrored until here was copied together with the hooks.
        self.hooks.are_outdated = False
        for replica in self._others:
            modules = self._modules[replica.index]
            self._copies[replica.index] = CopiedAttributes(modules, private, self._note_numbers)

    # ---- before a step ----

    def share(self, *, by_several: bool = True) -> None:
        """Before a step, first of all: the replicas get what was set on the user's module since the last one.

        Args:
            by_several: Whether others than the first replica run it.

        Raises:
            ReplicationError: submodules were added or removed.
        """
        if not self._others:
            return
        self._seen.begin()
        self._hidden = _NOTHING_HIDDEN
        self._follow_structure()
        # Memos go by ids, and what a step has dropped may have left its id to something new.
        self._counterparts.forget()
        for replica in self._others:
            replica.hidden.follow()
        self._send_new_containers()
        for changes in self._seen.take_changes():
            self._send_changes(changes)
        self.hooks.follow()
        for copies in self._copies.values():
            copies.restore()
        # Only now: what was rebound has been noted on the way, before it was overwritten.
        self.unseen.end(self._modules[0])
        self._sync_mirrors()
        # Gradients of every row may hang there, which replicas that idle need not keep.
        if by_several:
            self.of_parameters.follow()
        self._seen.forget_rebound()
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
            self._modules[0] = self._looked_after.of(self._root)
            self._seen.follow(self._modules[0])
        if self._root.buffers is not buffers:  # a step put new tensors in their place, on every replica
            for replica in self._others:
                replica.refresh()
        self.hooks.check_parameters()

    def _send_changes(self, changes: AttributeChanges) -> None:
        """What was set or deleted on the user's submodule goes to its counterparts."""
        for key, value in changes.new.items():
            self._send(changes.index, key, value)
        # What was deleted on the user's module is gone on its replicas as well.
        for key in changes.deleted:
            self._containers.forget((changes.index, key))
            self._iterators.forget((changes.index, key))
            self._forget_mirrors(changes.index, key)
            for copies in self._copies.values():
                copies.delete(changes.index, key)

    def _send(self, index: int, key: str, value: Any) -> None:
        self._forget_mirrors(index, key)
        self._watch_value(index, key, value)
        for replica in self._others:
            # What the step itself has rebound, it mostly rebinds again without reading it: large
            # tensors of it are copied when they are used. What a hook has set is there to be used.
            translated = self._counterparts.there(replica, value, lazily=self._seen.is_rebound(index, key))
            self._copies[replica.index].set(index, key, translated)
            self._pair((index, key), replica.index, value, translated)

    def _watch_value(self, index: int, key: str, value: Any) -> None:
        self._containers.watch((index, key), value)
        self._iterators.note((index, key), value)

    def _note_numbers(self, index: int, expected: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        self.unseen.note_numbers(index, expected, now, self._modules[0])

    def _sync_mirrors(self) -> None:
        if not self._counterparts.mirrors:
            return
        for replica in self._others:
            self._counterparts.mirrors.sync(replica.index, partial(self._counterparts.there, replica, lazily=True))
        # A mirror has the containers that it was made with. Where the user's got others, the whole
        # attribute is copied and paired anew, once for each attribute.
        outdated = self._counterparts.mirrors.note()
        if outdated:
            self._counterparts.forget()  # which knows what they held
        for index, key in outdated:
            value = vars(self._modules[0][index]).get(key, _MISSING)
            if value is not _MISSING:
                self._send(index, key, value)

    def _forget_mirrors(self, index: int, key: str) -> None:
        if self._counterparts.mirrors.forget((index, key)):
            self._counterparts.forget()

    @property
    def has_iterators(self) -> bool:
        """Whether the module holds any iterators."""
        return self._iterators.has_any

    def share_iterators_of_code(self) -> None:
        """From the next step on, replicas also take the same items of iterators that classes and globals hold."""
        self._iterators.include_code_of(self._root.module)

    def iterators_of_whole_batch(self) -> AbstractContextManager[Any]:
        """The user's module runs in here on a batch whose slices may have failed: it takes the items that they took."""
        if self._iterators.has_left:
            return self.iterators_shared()
        return nullcontext()

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
        if self._containers.home is not None and self._begun:
            self._counterparts.forget()
            self._send_new_containers(in_step=True)
            if self.hooks.are_outdated:
                self.hooks.follow()

    def wrote_shared(self) -> bool:
        """Whether the step that is under way changed a container that all replicas share."""
        return self._begun and self._containers.has_changed()

    def collect(self, active: Sequence[Replica]) -> None:
        """After a step: the user's containers get what the active replicas did to their mirrors, in replica order."""
        if not self._others:
            return
        self._begun = False
        self._counterparts.forget()
        # Replica after replica, the order in which one device would have seen the rows.
        for replica in active:
            if replica is not self._root:
                for attribute in self._counterparts.mirrors.merge(
                    replica.index, partial(self._counterparts.back, replica)
                ):
                    self.unseen.note_container(*attribute)
        # Shared containers grow by what every slice appends, where one device appends once.
        for attribute in self._containers.grown():
            self.unseen.note_container(*attribute)
        self._containers.bring_home()
        # For the next step.
        self._seen.note_rebound()

    def hold_tensors(self) -> None:
        """After :meth:`share`, of a step that may run again: :meth:`put_back` gives attributes their tensors."""
        self._seen.hold_tensors()
        # All replicas have pairs with the same ones.
        if self._others:
            self._hidden = HiddenBefore(self._others[0].hidden.sources)

    def can_put_back(self, lists: Iterable[tuple[str, str]] = ()) -> bool:
        """Whether :meth:`put_back` would undo what the step, which has run, has done to tensors.

        Args:
            lists: Attributes with lists that are put back elsewhere, each as the path of a submodule, and a name.
        """
        apart = [(self._root.module.get_submodule(path), name) for path, name in lists]
        modules = self._modules[0]
        for index, key in self._counterparts.mirrors.changed():
            if not any(modules[index] is module and key == name for module, name in apart):
                return False
        if self._seen.tensors_are_lost or self._hidden.are_lost:
            return False
        return self._containers.can_put_back()

    def grown_containers(self) -> set[str]:
        """Before :meth:`collect`: the attributes behind which the step has given shared containers items, by path."""
        if not self._others:
            return set()
        return self.unseen.paths_of(self._containers.grown(), self._modules[0])

    def put_back(self) -> None:
        """After a step that will run again, instead of :meth:`collect`: what it rebound is what it was.

        So are containers that all replicas share; of large ones only the length is known. Tensors are put back where
        they were held (:meth:`hold_tensors`), and stay as the step left them elsewhere.
        """
        if not self._others:
            return
        self._containers.put_back()
        self._seen.put_back()
        self._hidden.put_back()

    # ---- what is shared, and what is mirrored ----

    def _send_new_containers(self, *, in_step: bool = False) -> None:
        """Attributes with a shared container that has changed are looked at again: it may hold tensors now.

        Args:
            in_step: What they held before the step stays known, to which they may be put back.
        """
        for index, key in self._containers.changed():
            value = vars(self._modules[0][index]).get(key, _MISSING)
            if value is _MISSING:
                continue
            # Only where a tensor has come is the attribute mirrored; other changes are seen by all.
            if self._containers.lead_to_tensors((index, key), value):
                self._send(index, key, value)
            elif not in_step:
                self._containers.watch((index, key), value)

    def _pair(self, attribute: tuple[int, str], replica: int, source: Any, copied: Any) -> None:
        if self._counterparts.mirrors.pair(attribute, replica, source, copied):
            self.hooks.are_outdated = True
            self._counterparts.forget(replica)  # which does not know them

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


@dataclass(frozen=True, slots=True)
class _LookedAfter:
    """Which submodules are looked after here.

    Attributes:
        skip: Types of those that are not.
        keep: Objects that all replicas share; with what they hold.
    """

    skip: tuple[type, ...]
    keep: list[object]

    def of(self, replica: Replica) -> list[nn.Module]:
        """The submodules of a replica that are."""
        shared = _modules_of(self.keep)
        return [child for child in replica.modules if not isinstance(child, self.skip) and id(child) not in shared]


def _modules_of(kept: Iterable[Any]) -> set[int]:
    """The ids of all modules among ``kept``, and of what those hold."""
    found: set[int] = set()
    for module in kept:
        if isinstance(module, nn.Module):
            found.update(map(id, module.modules()))
    return found
