"""Keeps the parameters of the replicas equal to replica 0's, whatever the optimizer, a hook or a callback wrote.

optimizer --new values--> owners --optimizer_stepped--> all replicas         where owners are spread over devices
anything  --writes--> replica 0 --synchronize, before the next forward--> the others

A copy that gets the value which it has keeps its version: a graph that a step by hand has made before an optimizer
stepped other parameters may still run its backward, as on one device.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_dpx.devices import copy_values
from lightning_dpx.errors import ReplicationError, SharedWriteError
from lightning_dpx.replicas.parameter_copies import ParameterCopies
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.shared_writes import SharedWrites, UnseenWrites
from lightning_dpx.replicas.tensor_checksums import checksums
from lightning_dpx.torch_compat import preserve_version_counter, version_counter

# What is compared for every parameter in every step: mapped, not looped over, which takes a third of the time. Shapes
# one by one, because lists of thousands of new tuples would start the garbage collector.
_SHAPE = operator.attrgetter("shape")
_IS_TRAINED = operator.attrgetter("requires_grad")
_ADDRESS = operator.methodcaller("data_ptr")


@dataclass(slots=True)
class _Synchronized:
    """Replica 0's parameters as the others have got them.

    Attributes:
        parameters: The list itself, which the replica keeps as long as the parameters are the same objects.
        versions: Their version counters.
        shapes: Their shapes.
        of_copies: Version counters of the copies on other devices, as they were left.
    """

    parameters: list[nn.Parameter] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    of_copies: list[list[int]] = field(default_factory=list)


class ParameterSync:
    """Notices which parameters changed on replica 0 and carries them to the other replicas.

    A change is seen by the parameter's version counter. Writes through ``.data`` leave no trace there, so the owner
    calls :meth:`mark_changed` wherever such writes are customary (around evaluation, weight averaging).

    Args:
        replicas: All of them.
        primaries: Those with parameters of their own, which micro-batches share.

    Attributes:
        unseen: Writes without a trace to the user's module, where other replicas own parameters.
    """

    def __init__(self, replicas: Sequence[Replica], primaries: Sequence[Replica]) -> None:
        self._root = replicas[0]
        self._primaries = tuple(primaries)  # all others have the parameters of one of these
        self._copies = self._primaries[1:]  # whose parameters become those of the root
        self._apart = tuple(replica for replica in self._copies if replica.device != self._root.device)
        self._owners: list[int] = []
        self._versions_of_owners: list[int] = []  # of what they own, as all replicas have it
        self._flags: list[bool] = []
        self._last = _Synchronized(of_copies=[[] for _ in self._apart])
        self._parameter_copies: dict[int, ParameterCopies] = {}  # by replica
        self._is_changed = True
        self._shared = SharedWrites(replicas)
        self.unseen: UnseenWrites = UnseenWrites()

    def mark_changed(self) -> None:
        """The next :meth:`synchronize` copies everything."""
        self._is_changed = True

    def set_owners(self, owners: Sequence[int]) -> None:
        """The replica whose copy of each parameter the optimizer changes; replica 0 unless said otherwise."""
        # No list at all where all are replica 0: nearly every step asks whether there are others.
        self._owners = list(owners) if any(owners) else []
        self._versions_of_owners = []
        self._flags = [parameter.requires_grad for parameter in self._root.parameters]

    def optimizer_stepped(self) -> None:
        """The owners have new values, perhaps written without a trace; with other owners all replicas get them now."""
        self.mark_changed()
        if self._owners:
            self._copy_from_owners()

    @torch.no_grad()
    def _copy_from_owners(self) -> None:
        replicas = self._primaries
        values = self._copies_of_owners()
        versions = list(map(version_counter, values))
        for replica in replicas:
            pairs = zip(replica.parameters, values, strict=True)
            # Replicas of one device have one memory, and a copy onto itself would count as a write.
            stale = [(target, value) for target, value in pairs if not _is_same_memory(target, value)]
            if stale:
                targets, sources = zip(*stale, strict=True)
                with preserve_version_counter(_unmoved(replica.parameters, self._versions_of_owners, versions)):
                    copy_values(targets, sources)
        # What was copied is no change to be sent once more before the next forward.
        owned = self._root.parameters
        self._note(owned, list(map(version_counter, owned)))
        self.unseen.begin(owned)

    def _copies_of_owners(self) -> list[nn.Parameter]:
        """Every parameter's copy on its owner; nothing where all owners are replica 0."""
        return [self._primaries[owner].parameters[index] for index, owner in enumerate(self._owners)]

    def follow_root(self) -> None:
        """A step or hooks may have written the user's parameters: other owners get the values before they step."""
        if self._owners and (self.changes_known or self.unseen.are_in(self._root.parameters)):
            self.mark_changed()
            self.synchronize()

    def look_for_unseen_writes(self) -> None:
        """Where hooks wrote the user's parameters without a trace, the next :meth:`synchronize` copies everything."""
        if self.unseen.are_in(self._root.parameters):
            self.mark_changed()

    def _take_flags_of_owners(self) -> None:
        """Freezing may happen on the user's module or, through an optimizer, on the owner's copy."""
        replicas = self._primaries
        for index, owner in enumerate(self._owners):
            mine = self._root.parameters[index]
            theirs = replicas[owner].parameters[index]
            # The one that changed counts; where both did, the user's own module.
            flag = self._flags[index]
            if mine.requires_grad == flag and theirs.requires_grad != flag:
                mine.requires_grad_(theirs.requires_grad)
            self._flags[index] = mine.requires_grad

    def compare_unless_changed(self) -> None:
        """Where nothing tells of a write, the bits do: the next :meth:`synchronize` copies everything if they differ.

        Reads all parameters of two devices, and waits for both: for callers that no hook tells of writes. What is only
        put in another order, through ``.data``, has the same sum of bits, and stays unseen.
        """
        if not self._apart or self.changes_known:
            return
        # All of these are copies of one kind, so one of them tells.
        if checksums(self._root.parameters) != checksums(self._apart[0].parameters):
            self.mark_changed()

    def synchronize(self) -> None:
        """Before a forward, or where parameters change in the middle of a step: all replicas get replica 0's.

        Raises:
            ReplicationError: a parameter was added, removed or resized since the replicas were made.
        """
        self._take_flags_of_owners()
        owned = self._root.parameters
        versions = list(map(version_counter, owned))
        last = self._last
        changed = self._is_changed or versions != last.versions or owned is not last.parameters
        self._follow_structure(owned)
        before = last.versions if owned is last.parameters else []
        for replica, left in zip(self._apart, last.of_copies, strict=True):
            found = _versions(replica)
            # A write to a copy counts with the copy alone, and must not last.
            if changed or found != left:
                with preserve_version_counter(_unmoved(replica.parameters, before, versions, left, found)):
                    self._copy_parameters(owned, replica)
        self._note(owned, versions)
        if changed or not self.unseen.has_begun:
            self.unseen.begin(owned)
        self._shared.begin(owned, versions)

    def _note(self, owned: list[nn.Parameter], versions: list[int]) -> None:
        """All replicas have these values now."""
        self._last.parameters = owned
        self._last.versions = versions
        self._last.of_copies = [_versions(replica) for replica in self._apart]
        # In every step, and most have no owner but replica 0.
        if self._owners:
            self._versions_of_owners = list(map(version_counter, self._copies_of_owners()))
        self._is_changed = False

    def _follow_structure(self, owned: list[nn.Parameter]) -> None:
        """Names, shapes, storages and flags of all replicas are those of ``owned``."""
        if not self._copies:  # micro-batches of one device: all have the very parameters of the first
            return
        # What the first replica has is read once and compared K - 1 times: for 2,000 parameters of eight
        # replicas that takes half of the 30 ms of comparing in pairs.
        shapes = self._last.shapes
        is_known = owned is self._last.parameters
        shapes_are_known = is_known and all(map(operator.eq, map(_SHAPE, owned), shapes))
        if not shapes_are_known:
            shapes = list(map(_SHAPE, owned))
        addresses = list(map(_ADDRESS, owned)) if len(self._apart) < len(self._copies) else []
        flags = list(map(_IS_TRAINED, owned))
        for replica in self._copies:
            mirrored = replica.parameters
            # Names are computed by a walk, so only where the list of parameters is another one.
            if not is_known:
                check_names(self._root, replica)
            is_neighbor = replica.device == self._root.device
            shares_storage = is_neighbor and list(map(_ADDRESS, mirrored)) == addresses
            # What lies where it lay, under a module whose shapes are what they were, has the shape that it had.
            is_sure = shapes_are_known and shares_storage
            if not is_sure and not all(map(operator.eq, map(_SHAPE, mirrored), shapes)):
                self._refuse_resized(replica, owned)
            if is_neighbor and not shares_storage:
                self._share_storage(owned, mirrored)
            if list(map(_IS_TRAINED, mirrored)) != flags:
                for source, target in zip(owned, mirrored, strict=True):
                    target.requires_grad_(source.requires_grad)
        self._last.shapes = shapes

    def _copy_parameters(self, owned: list[nn.Parameter], replica: Replica) -> None:
        """The replica, on another device, gets the values of ``owned``."""
        copies = self._parameter_copies.get(replica.index)
        if copies is None or not copies.is_for(owned, replica.parameters):
            _take_dtypes(owned, replica)
            copies = self._parameter_copies[replica.index] = ParameterCopies(owned, replica.parameters)
        copies.copy()

    def _share_storage(self, owned: list[nn.Parameter], mirrored: list[nn.Parameter]) -> None:
        """A replica on the first device has its values, whatever storage the user's module has got since."""
        for source, target in zip(owned, mirrored, strict=True):
            if target is not source and target.data_ptr() != source.data_ptr():
                target.data = source.detach()

    def _refuse_resized(self, replica: Replica, owned: list[nn.Parameter]) -> None:
        for source, target in zip(owned, replica.parameters, strict=True):
            if source.shape != target.shape:
                raise ReplicationError(
                    f"Parameter {self._name_of(source)} was resized to {tuple(source.shape)} after setup; replica "
                    f"{replica.index} has {tuple(target.shape)}. Change the module before fit (configure_model)."
                )

    def refuse_shared_writes(self) -> None:
        """After a forward: replicas on one device share the storage of their parameters, so each write hit it again.

        Raises:
            SharedWriteError: the forward wrote a parameter.
        """
        if name := self.written_by_step():
            raise SharedWriteError(
                f"The step wrote parameter {name}, which the replicas on {self._root.device} "
                "share, once for every replica. Write it in a hook between the steps (on_train_batch_end), or make "
                "it a buffer.",
                name,
            )

    def written_by_step(self) -> str:
        """The name of a parameter that was written since it was synchronized, where replicas share it; else empty."""
        written = self._shared.find()
        if written is None:
            return ""
        return self._name_of(written)

    def differing(self) -> list[tuple[str, int]]:
        """Parameters whose bits on a replica are not those on replica 0, by name and replica.

        What replica 0 has changed since the last forward travels first, as it would before the next one.
        """
        if self.changes_known:
            self.synchronize()
        # The others share the memory of replica 0.
        mine = checksums(self._root.parameters) if self._apart else []
        names = [name for name, _ in self._root.module.named_parameters()]
        found: list[tuple[str, int]] = []
        for replica in self._apart:
            theirs = checksums(replica.parameters)
            for name, checksum, other in zip(names, mine, theirs, strict=True):
                if checksum != other:
                    found.append((name, replica.index))
        return found

    @property
    def changes_known(self) -> bool:
        """Whether the others are known to lack what replica 0 has."""
        owned = self._root.parameters
        known = self._is_changed or owned is not self._last.parameters
        return known or list(map(version_counter, owned)) != self._last.versions

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, other in self._root.module.named_parameters() if other is parameter)


def check_names(root: Replica, replica: Replica) -> None:
    """Parameters are matched by their places, so that both must have the same names in the same order.

    Raises:
        ReplicationError: one was added, removed or renamed since the replicas were made.
    """
    mine = list(dict(root.module.named_parameters()))
    theirs = list(dict(replica.module.named_parameters()))
    if mine == theirs:
        return
    added = [name for name in mine if name not in theirs]
    removed = [name for name in theirs if name not in mine]
    changes: list[str] = []
    if added:
        changes.append(f"added: {', '.join(added)}")
    if removed:
        changes.append(f"removed: {', '.join(removed)}")
    raise ReplicationError(
        f"The parameters of the module are not those of its replicas ({'; '.join(changes) or 'another order'}). "
        "Change the module before fit (configure_model)."
    )


def _unmoved(
    targets: Sequence[nn.Parameter],
    before: list[int],
    now: list[int],
    left: list[int] | None = None,
    found: list[int] | None = None,
) -> tuple[nn.Parameter, ...]:
    """Those of the targets whose sources have the version that they had, and which nothing else has written.

    Args:
        targets: What is copied to.
        before: Version counters of the sources at the last copy; empty where nothing is known.
        now: Their version counters.
        left: Version counters of the targets after the last copy; not asked for unless given.
        found: Their version counters.
    """
    if len(before) != len(now):
        return ()
    kept = list(map(operator.eq, before, now))
    if left is not None and found is not None:
        kept = list(map(operator.and_, kept, map(operator.eq, left, found)))
    return tuple(itertools.compress(targets, kept))


def _take_dtypes(owned: Sequence[nn.Parameter], replica: Replica) -> None:
    """The module was cast since the replica was made, as by ``module.half()``, which keeps its parameters."""
    for source, target in zip(owned, replica.parameters, strict=True):
        if source.dtype != target.dtype:
            target.data = torch.empty_like(source, device=replica.device)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or one.data_ptr() == other.data_ptr()


def _versions(replica: Replica) -> list[int]:
    return list(map(version_counter, replica.parameters))
