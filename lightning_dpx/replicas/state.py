"""Keeps the replicas equal to replica 0: parameters after they changed, buffers after a step, train/eval flags."""

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from lightning_dpx.errors import ReplicationError, SharedWriteError
from lightning_dpx.replicas.parameter_copies import ParameterCopies
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.tensor_checksums import checksums
from lightning_dpx.torch_compat import buffers_of, foreach_copy_, version_counter

BufferMode = Literal["broadcast", "mean"]
# What is compared for every parameter in every step: mapped, not looped over, which takes a third of the time. Shapes
# one by one, because lists of thousands of new tuples would start the garbage collector.
_DTYPE = operator.attrgetter("dtype")
_SHAPE = operator.attrgetter("shape")
_IS_TRAINED = operator.attrgetter("requires_grad")
_IS_TRAINING = operator.attrgetter("training")
_ADDRESS = operator.methodcaller("data_ptr")


BufferRule = Literal["first", "mean", "sum", "max", "min"]  # "sum" is what it was, and all changes of it
ChooseBufferRule = Callable[[str, Callable[[BufferRule], torch.Tensor | None]], BufferRule]


class _BufferCandidates:
    """What the rules would make of a buffer; on the first device."""

    def __init__(
        self,
        owned: torch.Tensor,
        column: Sequence[torch.Tensor],
        rows: Sequence[int],
        before: torch.Tensor | None,
    ) -> None:
        self._owned = owned
        self._column = column
        self._rows = rows
        self._before = before

    def value(self, rule: BufferRule) -> torch.Tensor | None:
        """``None`` where the rule makes no sense for it."""
        # To weigh, sum and compare they must be on one device; the first one's is where the result
        # goes.
        values = [buffer.to(self._owned.device) for buffer in self._column]
        if any(value.shape != values[0].shape for value in values):
            return values[0] if rule == "first" else None
        if rule == "mean" and self._owned.is_floating_point():
            total_rows = sum(self._rows)
            weighted = [value * (rows / total_rows) for value, rows in zip(values, self._rows, strict=True)]
            return torch.stack(weighted).sum(0)
        if rule == "sum" and self._before is not None and self._owned.dtype != torch.bool:
            # What it was, once, and what each replica added to it: a counter of batches or tokens.
            total = self._before.clone()
            for value in values:
                total = total + (value - self._before)
            return total
        if rule in ("max", "min") and not self._owned.is_complex():
            stacked = torch.stack(values)
            return stacked.amax(0) if rule == "max" else stacked.amin(0)
        return values[0] if rule == "first" else None


class StateSync:
    """Notices what changed on replica 0 and carries it to the other replicas.

    A change is seen by the parameter's version counter. Writes through ``.data`` leave no trace there, so the owner
    calls :meth:`mark_changed` wherever such writes are customary (around evaluation, weight averaging).

    Args:
        replicas: All of them, each with buffers of its own.
        buffers: What replica 0's buffers become after a step.
        check_every: Every so many steps, replicas are compared with replica 0; never if 0.
        primaries: Those with parameters of their own, which micro-batches share; all unless given.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        buffers: BufferMode = "broadcast",
        check_every: int = 0,
        primaries: Sequence[Replica] = (),
    ) -> None:
        self._root = replicas[0]
        self._others = tuple(replicas[1:])
        self._primaries = tuple(primaries or replicas)  # the others have the parameters of one of these
        self._copies = self._primaries[1:]  # whose parameters become those of the root
        self._apart = tuple(replica for replica in self._copies if replica.device != self._root.device)
        self._has_neighbors = any(replica.device == self._root.device for replica in self._others)
        self._buffers = buffers
        self._owners: list[int] = []
        self._flags: list[bool] = []
        self._owned: list[nn.Parameter] = []
        self._mirrored: list[list[int]] = [[] for _ in self._apart]  # versions of the copies, as they were left
        self._versions: list[int] = []
        self._shapes: list[torch.Size] = []
        self._parameter_copies: dict[int, ParameterCopies] = {}  # by replica
        self._changed = True
        self._unchecked = 3
        self._sums: list[int] = []  # in the first steps, to notice writes through .data
        self._check_every = check_every
        self._checked = 0
        self._before: list[torch.Tensor] = []  # the buffers as they were before the step, while a step is under way
        self._may_restore = False
        self.watches_writes = False  # of hooks that may write the user's module without a trace, with other owners
        self._left: list[int] = []  # what such hooks found: the bits of the user's parameters

    def mark_changed(self) -> None:
        """The next :meth:`synchronize` copies everything."""
        self._changed = True

    def set_owners(self, owners: Sequence[int]) -> None:
        """The replica whose copy of each parameter the optimizer changes; replica 0 unless said otherwise."""
        # No list at all where all are replica 0: nearly every step asks whether there are others.
        self._owners = list(owners) if any(owners) else []
        self._flags = [parameter.requires_grad for parameter in self._root.parameters]

    @torch.no_grad()
    def optimizer_stepped(self) -> None:
        """The owners have new values, perhaps written without a trace; with other owners all replicas get them now."""
        self.mark_changed()
        if not self._owners:
            return
        replicas = self._primaries
        values = [replicas[owner].parameters[index] for index, owner in enumerate(self._owners)]
        for replica in replicas:
            pairs = zip(replica.parameters, values, strict=True)
            # Replicas of one device have one memory, and a copy onto itself would count as a write.
            stale = [(target, value) for target, value in pairs if not _is_same_memory(target, value)]
            if stale:
                targets, sources = zip(*stale, strict=True)
                foreach_copy_(targets, sources, non_blocking=True)
        # What was copied is no change to be sent once more before the next forward.
        self._owned = self._root.parameters
        self._versions = list(map(version_counter, self._owned))
        self._mirrored = [_versions(replica) for replica in self._apart]
        self._changed = False
        self._left = checksums(self._owned) if self.watches_writes else []

    def follow_hooks(self) -> None:
        """Hooks may have written the user's parameters: with other owners, these get the values before they step."""
        if self._owners and (self._changes_known() or self._is_written_unseen()):
            self.mark_changed()
            self.synchronize_parameters()

    def _is_written_unseen(self) -> bool:
        return bool(self._left) and checksums(self._root.parameters) != self._left

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

    def synchronize(self) -> None:
        """Before a forward: parameters, buffers and flags of the replicas become those of replica 0.

        Raises:
            ReplicationError: a parameter was added, removed or resized since the replicas were made.
        """
        if self._root.module.training:
            # Before anything is copied, which would hide the difference.
            self._check_now_and_then()
        if self._is_written_unseen():
            self.mark_changed()
        self.synchronize_parameters()
        modes = list(map(_IS_TRAINING, self._root.modules))
        for replica in self._others:
            if list(map(_IS_TRAINING, replica.modules)) != modes:
                for mode, module in zip(modes, replica.modules, strict=True):
                    module.training = mode
            if not _alike(self._root.buffers, replica.buffers):
                self._replace_buffers(replica)
        self._copy_buffers()

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        # Without a look at versions: unlike parameters, most buffers change in every step (batch norm's statistics).
        if not self._root.buffers:
            return
        for replica in self._others:
            for source, target in zip(self._root.buffers, replica.buffers, strict=True):
                if target is not source:
                    target.copy_(source, non_blocking=True)

    def _replace_buffers(self, replica: Replica) -> None:
        """A step, or a hook, registered buffers or gave them another shape: the replica gets the first one's."""
        self._check_names(replica)  # pruning renames parameters without changing them
        memo: dict[int, torch.Tensor] = {}
        for source_module, target_module in zip(self._root.modules, replica.modules, strict=True):
            if target_module is source_module:
                continue
            for name in set(buffers_of(target_module)) - set(buffers_of(source_module)):
                del buffers_of(target_module)[name]
            for name, source in buffers_of(source_module).items():
                if source is not None and id(source) not in memo:
                    memo[id(source)] = source.detach().to(replica.device, copy=True)
                # A plain attribute of that name would hide the buffer.
                vars(target_module).pop(name, None)
                buffers_of(target_module)[name] = None if source is None else memo[id(source)]
        replica.refresh()

    def differing(self) -> list[tuple[str, int]]:
        """Parameters whose bits on a replica are not those on replica 0, by name and replica.

        What replica 0 has changed since the last forward travels first, as it would before the next one.
        """
        if self._changes_known():
            self.synchronize_parameters()
        # The others share the memory of replica 0.
        apart = [replica for replica in self._primaries if replica.device != self._root.device]
        mine = checksums(self._root.parameters) if apart else []
        names = [name for name, _ in self._root.module.named_parameters()]
        found: list[tuple[str, int]] = []
        for replica in apart:
            theirs = checksums(replica.parameters)
            for name, checksum, other in zip(names, mine, theirs, strict=True):
                if checksum != other:
                    found.append((name, replica.index))
        return found

    def _changes_known(self) -> bool:
        owned = self._root.parameters
        known = self._changed or owned is not self._owned
        return known or list(map(version_counter, owned)) != self._versions

    def _check_now_and_then(self) -> None:
        """Every so many steps: writes that left no trace, and that no coming step would overwrite."""
        self._checked += 1
        if not self._check_every or self._checked % self._check_every or self._changes_known():
            return
        apart = self.differing()
        if apart:
            self.mark_changed()
            name, replica = apart[0]
            more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
            warnings.warn(
                f"Parameter {name} on replica {replica}{more} differed from replica 0 without a trace (written through "
                ".data?); all replicas get the values of replica 0, your module.",
                stacklevel=2,
            )

    @torch.no_grad()
    def synchronize_parameters(self) -> None:
        """Synchronizes the parameters alone, which may change in the middle of a step.

        Raises:
            ReplicationError: a parameter was added, removed or resized since the replicas were made.
        """
        self._take_flags_of_owners()
        owned = self._root.parameters
        versions = list(map(version_counter, owned))
        changed = self._changed or versions != self._versions or owned is not self._owned
        self._follow_structure(owned)
        for replica, left in zip(self._apart, self._mirrored, strict=True):
            # A write to a copy counts with the copy alone, and must not last.
            if changed or _versions(replica) != left:
                self._copy_parameters(owned, replica)
        self._mirrored = [_versions(replica) for replica in self._apart]
        self._owned = owned
        self._versions = versions
        self._changed = False
        if self.watches_writes and (changed or not self._left):
            self._left = checksums(owned)
        self._sums = []  # those of a step of one replica, which nobody compared, are of no use any more
        if self._unchecked and self._has_neighbors:
            self._sums = checksums(owned)
            self._unchecked -= 1

    def _follow_structure(self, owned: list[nn.Parameter]) -> None:
        """Names, shapes, storages and flags of all replicas are those of ``owned``.

        What the first replica has is read once and compared K - 1 times: for 2,000 parameters of eight replicas that
        takes half of the 30 ms of comparing in pairs.
        """
        shapes = self._shapes
        shapes_are_known = owned is self._owned and all(map(operator.eq, map(_SHAPE, owned), shapes))
        if not shapes_are_known:
            shapes = list(map(_SHAPE, owned))
        addresses = list(map(_ADDRESS, owned)) if len(self._apart) < len(self._copies) else []
        flags = list(map(_IS_TRAINED, owned))
        for replica in self._copies:
            mirrored = replica.parameters
            # Names are computed by a walk, so only where the list of parameters is another one.
            if owned is not self._owned:
                self._check_names(replica)
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
        self._shapes = shapes

    def _copy_parameters(self, owned: list[nn.Parameter], replica: Replica) -> None:
        """The replica, on another device, gets the values of ``owned``."""
        copies = self._parameter_copies.get(replica.index)
        if copies is None or not copies.is_for(owned, replica.parameters):
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
        if not self._has_neighbors:
            return ""
        sums = self._sums
        self._sums = []
        now = checksums(self._owned) if sums else []
        if sums == now and list(map(version_counter, self._owned)) == self._versions:
            return ""
        for index, (parameter, version) in enumerate(zip(self._owned, self._versions, strict=True)):
            if version_counter(parameter) != version or (sums and sums[index] != now[index]):
                return self._name_of(parameter)
        return ""

    def remember_buffers(self) -> None:
        """Before a step that may fail half-way: replica 0's buffers, for :meth:`restore_buffers`."""
        buffers = self._root.buffers
        # The memory of the snapshot is used again, step after step.
        if not _alike(buffers, self._before):
            self._before = [buffer.detach().clone() for buffer in buffers]
        elif buffers:
            with torch.no_grad():
                foreach_copy_(self._before, buffers)
        self._may_restore = True

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """After a step that failed: replica 0's buffers are what they were; the others follow before their next one."""
        if self._may_restore and self._before and _alike(self._root.buffers, self._before):
            foreach_copy_(self._root.buffers, self._before)
        self._may_restore = False

    def collect_buffers(
        self, active: Sequence[Replica], rows: Sequence[int] = (), choose: ChooseBufferRule | None = None
    ) -> None:
        """After a step: replica 0's buffers become the first active replica's, or the mean over the active ones.

        Integer buffers (such as ``num_batches_tracked``) are never averaged.

        Args:
            active: The replicas that took part.
            rows: Of each of them.
            choose: Says, given a buffer's name and what the rules would make of it, by which one it comes together.
        """
        self._may_restore = False
        if self._buffers == "mean" and len(active) > 1:
            for replica in active:  # a step may have put new tensors in their place
                replica.refresh()
            for replica in active[1:]:
                self._check_buffers(replica)
        if not self._root.buffers:
            return
        # One slice has seen the whole batch; and a mean that the user asked for needs no rule.
        if self._buffers == "broadcast" and choose is not None and len(active) > 1:
            self._collect_by_rules(active, rows, choose)
            return
        columns = zip(*(replica.buffers for replica in active), strict=True)
        with torch.no_grad():
            for owned, column in zip(self._root.buffers, columns, strict=True):
                if self._buffers == "mean" and owned.is_floating_point() and len(column) > 1:
                    owned.copy_(torch.stack([buffer.to(owned.device) for buffer in column]).mean(0))
                elif column[0] is not owned:
                    owned.copy_(column[0])

    @torch.no_grad()
    def _collect_by_rules(self, active: Sequence[Replica], rows: Sequence[int], choose: ChooseBufferRule) -> None:
        for replica in active:  # a step may have put new tensors in their place
            replica.refresh()
        columns = list(zip(*(replica.buffers for replica in active), strict=True))
        names = [name for name, _ in self._root.module.named_buffers()]
        # Where the step has put other tensors in their place, nothing is known from before it.
        before: Sequence[torch.Tensor | None] = [None] * len(columns)
        if _alike(self._root.buffers, self._before):
            before = self._before
        for index, (owned, column) in enumerate(zip(self._root.buffers, columns, strict=True)):
            candidates = _BufferCandidates(owned, column, rows, before[index])
            value = candidates.value(choose(names[index], candidates.value))
            if value is not owned and value is not None:
                owned.copy_(value)

    def _check_buffers(self, replica: Replica) -> None:
        mine, theirs = (dict(module.named_buffers()) for module in (self._root.module, replica.module))
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            shape = tuple(mine[name].shape) if name in mine else None
            other = tuple(theirs[name].shape) if name in theirs else None
            if shape != other:
                raise ReplicationError(
                    f"Buffer {name} has shape {shape} on replica 0 and {other} on replica {replica.index}, "
                    "so there is no mean; use buffers='broadcast'."
                )

    def _check_names(self, replica: Replica) -> None:
        mine, theirs = (list(dict(module.named_parameters())) for module in (self._root.module, replica.module))
        # In order, since parameters are matched by their places.
        if mine == theirs:
            return
        added = [name for name in mine if name not in theirs]
        removed = [name for name in theirs if name not in mine]
        what = [f"{verb}: {', '.join(names)}" for verb, names in (("added", added), ("removed", removed)) if names]
        raise ReplicationError(
            f"The parameters of the module are not those of its replicas ({'; '.join(what) or 'another order'}). "
            "Change the module before fit (configure_model)."
        )

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, other in self._root.module.named_parameters() if other is parameter)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or one.data_ptr() == other.data_ptr()


def _versions(replica: Replica) -> list[int]:
    return list(map(version_counter, replica.parameters))


def _alike(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    if len(mine) != len(theirs):
        return False
    have_shapes = all(map(operator.eq, map(_SHAPE, mine), map(_SHAPE, theirs)))
    return have_shapes and all(map(operator.is_, map(_DTYPE, mine), map(_DTYPE, theirs)))
