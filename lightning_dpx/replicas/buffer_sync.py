"""Keeps the buffers of the replicas equal to replica 0's, and brings together what a step wrote into them."""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from lightning_dpx.devices import is_host
from lightning_dpx.errors import ReplicationError
from lightning_dpx.python_objects.object_contents import refill
from lightning_dpx.replicas.parameter_sync import check_names
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.torch_compat import (
    buffers_of,
    bytes_of,
    foreach_copy_,
    preserve_version_counter,
    version_counter,
    write_tensor,
)

BufferMode = Literal["broadcast", "mean"]
BufferRule = Literal["first", "mean", "sum", "max", "min"]  # "sum" is what it was, and all changes of it
ChooseBufferRule = Callable[[str, Callable[[BufferRule], torch.Tensor | None]], BufferRule]
# What is compared for every buffer in every step: mapped, not looped over.
_DTYPE = operator.attrgetter("dtype")
_SHAPE = operator.attrgetter("shape")
_PIECE = 2**16  # numbers of a buffer that are brought together at a time, at the least
_MOST_PIECES = 64  # each starts operators of its own, which an accelerator is through with before the next one comes


class _BufferCandidates:
    """What the rules would make of a buffer; on the first device.

    Args:
        owned: The buffer, as the first replica has it.
        column: As every replica has it that took part.
        rows: Of each of these.
        before: As it was before the step, where that is known.

    Attributes:
        owned: The buffer, as the first replica has it.
    """

    def __init__(
        self,
        owned: torch.Tensor,
        column: Sequence[torch.Tensor],
        rows: Sequence[int],
        before: torch.Tensor | None,
    ) -> None:
        self.owned: torch.Tensor = owned
        self._column = column
        self._rows = rows
        self._before = before

    def value(self, rule: BufferRule) -> torch.Tensor | None:
        """``None`` where the rule makes no sense for it."""
        # To weigh, sum and compare they must be on one device; the first one's is where the result
        # goes.
        values = [buffer.to(self.owned.device) for buffer in self._column]
        if any(value.shape != values[0].shape for value in values):
            if rule == "first":
                return values[0]
            return None
        if rule == "mean" and self.owned.is_floating_point():
            total_rows = sum(self._rows)
            # One after the other: a stack of a large buffer would take as much as all replicas have of it, twice.
            mean = torch.zeros_like(values[0], dtype=torch.promote_types(values[0].dtype, torch.float32))
            for value, rows in zip(values, self._rows, strict=True):
                mean += value * (rows / total_rows)
            return mean.to(values[0].dtype)
        if rule == "sum" and self._before is not None and self.owned.dtype != torch.bool:
            # What it was, once, and what each replica added to it: a counter of batches or tokens.
            total = self._before.clone()
            for value in values:
                total += value - self._before
            return total
        if rule in ("max", "min") and not self.owned.is_complex():
            # Most buffers are constants, some of them large. To compare them on an accelerator would be to wait for it.
            if is_host(values[0].device) and all(torch.equal(value, values[0]) for value in values[1:]):
                return values[0]
            choose = torch.maximum if rule == "max" else torch.minimum
            return functools.reduce(choose, values)
        if rule == "first":
            return values[0]
        return None

    def write(self, rule: BufferRule) -> None:
        """The buffer of the first device becomes what the rule makes of it, if that makes sense."""
        # A mean or a sum is there beside all that it is made of, and twice while it is computed: a memory of many MiB
        # would take three times that beside what a budget has planned for. All rules go number by number.
        if rule == "first" and self._column[0] is self.owned:
            return
        for piece in self._pieces():
            value = piece.value(rule)
            if value is not None and value is not piece.owned:
                piece.owned.copy_(value)

    def _pieces(self) -> "Iterator[_BufferCandidates]":
        tensors = [self.owned, *self._column]
        if self._before is not None:
            tensors.append(self._before)
        are_alike = all(tensor.shape == self.owned.shape for tensor in tensors)
        if self.owned.numel() <= _PIECE or not are_alike or not all(map(_is_plain, tensors)):
            yield self
            return
        size = max(_PIECE, math.ceil(self.owned.numel() / _MOST_PIECES))
        for owned, *others in zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True):
            before = None if self._before is None else others.pop()
            # As the whole is: what a buffer is already is not written.
            if self._column[0] is self.owned:
                others[0] = owned
            yield _BufferCandidates(owned, others, self._rows, before)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


class BufferSync:
    """Carries replica 0's buffers to the others before a step, and what the step made of them back to replica 0.

    Args:
        replicas: All of them, each with buffers of its own.
        mode: What replica 0's buffers become after a step.
    """

    def __init__(self, replicas: Sequence[Replica], mode: BufferMode = "broadcast") -> None:
        self._root = replicas[0]
        self._others = tuple(replicas[1:])
        self._mode = mode
        self._before: list[torch.Tensor] = []  # the buffers as they were before the step, while a step is under way
        self._begun_with: list[torch.Tensor] = []  # the buffers themselves, and what each module had of them
        self._places: dict[nn.Module, dict[str, torch.Tensor | None]] = {}
        self._may_restore = False
        self._shown: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers, and the memory that a backward needs
        self._known: frozenset[str] | None = None
        self._known_of: Sequence[torch.Tensor] = ()
        self._watched: dict[int, str] = {}  # names of buffers, by their places, that no step is known to write
        self._as_given: dict[int, list[tuple[torch.Tensor, int]]] = {}  # those of a replica when its step began
        self._to_come: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # in a backward: what follows it, and version

    def follow(self, replica: Replica) -> None:
        """The replica gets buffers of the names and shapes that replica 0's have, if a step or a hook changed them.

        Raises:
            ReplicationError: a parameter was added or removed since the replicas were made.
        """
        if not _alike(self._root.buffers, replica.buffers):
            self._replace(replica)

    def copy(self) -> None:
        if not self._root.buffers:
            return
        # Without a look at versions: unlike parameters, most buffers change in every step (batch norm's statistics).
        with torch.no_grad():
            for replica in self._others:
                for source, target in zip(self._root.buffers, replica.buffers, strict=True):
                    if target is not source:
                        target.copy_(source, non_blocking=not is_host(target.device))
        # After the copies, which count as writes.
        if self._watched:
            replicas = (self._root, *self._others)
            self._as_given = {replica.index: _with_versions(self._watched_in(replica)) for replica in replicas}

    def watch(self, known: frozenset[str]) -> None:
        """Before a step: it is noted whether it writes others than the ``known`` buffers."""
        self._as_given = {}
        # To name buffers is to walk all modules, so it is done where something is new.
        if known is self._known and self._root.buffers is self._known_of:
            return
        self._known, self._known_of = known, self._root.buffers
        places = {id(buffer): place for place, buffer in enumerate(self._root.buffers)}
        self._watched = {}
        for name, buffer in self._root.module.named_buffers():
            if name not in known and id(buffer) in places:
                self._watched[places[id(buffer)]] = name

    def written(self, active: Sequence[Replica]) -> list[str]:
        """After a forward: names of the watched buffers that a step has written, or put others in place of.

        And of those that some replicas have registered in it, and others have not.
        """
        found = dict[str, None]()
        for replica in {self._root, *active}:
            replica.refresh_buffers()
        for replica in active:
            # What some slices have registered, and others not, one device would have or not.
            if len(replica.buffers) != len(self._root.buffers):
                theirs = {name for name, _ in replica.module.named_buffers()}
                own = {name for name, _ in self._root.module.named_buffers()}
                found.update(dict.fromkeys(sorted(theirs ^ own)))
                continue
            given = self._as_given.get(replica.index)
            if given is None:
                continue
            # Where a step has registered some, or has deleted some, places are others.
            is_moved = len(replica.buffers) != len(self._known_of)
            now = _with_versions([buffer for buffer, _ in given] if is_moved else self._watched_in(replica))
            for place, (before, version), (buffer, count) in zip(self._watched, given, now, strict=True):
                if (buffer is not before or count != version) and self._is_other(place, buffer):
                    found[self._watched[place]] = None
        return list(found)

    def _is_other(self, place: int, buffer: torch.Tensor) -> bool:
        """Whether a buffer that was written holds something else than before the step, as far as that is known."""
        # A running maximum is written in every step, and mostly stays what it is.
        if place >= len(self._before) or self._before[place].shape != buffer.shape:
            return True
        return not torch.equal(self._before[place], buffer.to(self._before[place].device))

    def _watched_in(self, replica: Replica) -> list[torch.Tensor]:
        return [replica.buffers[place] for place in self._watched]

    def _replace(self, replica: Replica) -> None:
        """A step, or a hook, registered buffers or gave them another shape: the replica gets the first one's."""
        check_names(self._root, replica)  # pruning renames parameters without changing them
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
        replica.refresh_buffers()

    def remember(self) -> None:
        """Before a step that may fail half-way: replica 0's buffers, for :meth:`restore`."""
        buffers = self._root.buffers
        # The memory of the snapshot is used again, step after step.
        if not _alike(buffers, self._before):
            # Also by those of training, after a validation in inference mode, whose tensors no other mode may write.
            with torch.inference_mode(False), torch.no_grad():
                self._before = [buffer.detach().clone() for buffer in buffers]
        elif buffers:
            with torch.no_grad():
                foreach_copy_(self._before, buffers)
        if self._begun_with is not buffers:
            modules = filter(buffers_of, self._root.modules)
            self._places = {module: dict(buffers_of(module).items()) for module in modules}
            self._begun_with = buffers
        self._may_restore = True
        self._forget_shown()

    def snapshot_bytes(self, *, to_come: bool) -> int:
        """Bytes of what :meth:`remember` keeps on replica 0's device; with ``to_come`` none if they are there."""
        if to_come and _alike(self._root.buffers, self._before):
            return 0
        return bytes_of(self._root.buffers)

    def show(self, active: Sequence[Replica], rows: Sequence[int] = (), choose: ChooseBufferRule | None = None) -> None:
        """Between a forward and its backward: replica 0's buffers are for hooks what :meth:`collect` makes of them.

        They get other memory for it, as the graph of the forward may need the old one: see :meth:`hide`.
        """
        for replica in {self._root, *active}:  # a step may have put new tensors in their place
            replica.refresh_buffers()
        buffers = [buffer for buffer in self._root.buffers if buffer.layout == torch.strided]
        self._shown = [(buffer, buffer.data) for buffer in buffers]
        with torch.no_grad(), preserve_version_counter(tuple(buffers)):
            for buffer, own in self._shown:
                buffer.data = own.clone()
            may_restore = self._may_restore
            self.collect(active, rows, choose)
            self._may_restore = may_restore

    def hide(self) -> None:
        """Before a backward: they are again what the forward has left; :meth:`collect` gives back what was shown."""
        to_come = [(buffer, memory) for buffer, memory, _ in self._to_come]
        for buffer, own in self._shown:
            to_come.append((buffer, buffer.data))
            buffer.data = own
        # Once all are exchanged: buffers may count their writes together.
        self._to_come = [(buffer, memory, version_counter(buffer)) for buffer, memory in to_come]
        self._shown = []

    def _forget_shown(self) -> None:
        self._shown = []
        self._to_come = []

    def _reveal(self) -> bool:
        """Whether buffers have been shown before the backward, and have that again."""
        to_come = self._to_come
        self._to_come = []
        # A backward may write them as well, where it computes a forward again: then they are collected anew.
        if not to_come or any(version_counter(buffer) != version for buffer, _, version in to_come):
            return False
        for buffer, memory, _ in to_come:
            buffer.data = memory
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """After a step that failed: replica 0's buffers are what they were; the others follow before their next one."""
        if self._may_restore:
            # The step may have put new tensors in their place, as by self.seen = self.seen + 1.
            self._root.refresh_buffers()
            if not _alike(self._root.buffers, self._before):
                self._put_back()
            if _alike(self._root.buffers, self._before):
                for buffer, before in zip(self._root.buffers, self._before, strict=True):
                    write_tensor(buffer, before)
        self._may_restore = False
        self._forget_shown()

    def _put_back(self) -> None:
        """The modules have the buffers that they had, where the step has registered some, or some of other shapes."""
        for module in self._root.modules:
            refill(buffers_of(module), self._places.get(module, {}).items())
        self._root.refresh_buffers()

    def keep(self) -> None:
        """After a step that has ended well: the buffers are what it has left."""
        self._may_restore = False

    def added(self, active: Sequence[Replica], names: Sequence[str]) -> dict[str, list[float]]:
        """What each replica has added, in the step that is under way, to buffers that are single numbers.

        Args:
            active: The replicas that take part.
            names: Of the buffers.
        """
        if not names or not self._may_restore:
            return {}
        found: dict[str, list[float]] = {}
        self._root.refresh_buffers()  # the step may have registered some
        own = (name for name, _ in self._root.module.named_buffers())
        before = dict(zip(own, self._values_before(), strict=True))
        for name in names:
            start = before.get(name)
            if start is None or start.numel() != 1:
                continue
            now = [replica.module.get_buffer(name) for replica in active]
            if all(value.shape == start.shape for value in now):
                found[name] = [float(value) - float(start) for value in now]
        return found

    def collect(
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
        if self._reveal():
            return
        if self._mode == "mean" and len(active) > 1:
            for replica in active:  # a step may have put new tensors in their place
                replica.refresh_buffers()
            for replica in active[1:]:
                self._check_buffers(replica)
        if not self._root.buffers:
            return
        # One slice has seen the whole batch; and a mean that the user asked for needs no rule.
        if self._mode == "broadcast" and choose is not None and len(active) > 1:
            self._collect_by_rules(active, rows, choose)
            return
        columns = zip(*(replica.buffers for replica in active), strict=True)
        with torch.no_grad():
            for owned, column in zip(self._root.buffers, columns, strict=True):
                if self._mode == "mean" and owned.is_floating_point() and len(column) > 1:
                    owned.copy_(torch.stack([buffer.to(owned.device) for buffer in column]).mean(0))
                elif column[0] is not owned:
                    owned.copy_(column[0])

    @torch.no_grad()
    def _collect_by_rules(self, active: Sequence[Replica], rows: Sequence[int], choose: ChooseBufferRule) -> None:
        for replica in active:  # a step may have put new tensors in their place
            replica.refresh_buffers()
        columns = list(zip(*(replica.buffers for replica in active), strict=True))
        names = [name for name, _ in self._root.module.named_buffers()]
        before = self._values_before()
        for index, (owned, column) in enumerate(zip(self._root.buffers, columns, strict=True)):
            candidates = _BufferCandidates(owned, column, rows, before[index])
            candidates.write(choose(names[index], candidates.value))

    def _values_before(self) -> Sequence[torch.Tensor | None]:
        """Of each buffer of replica 0 what it was before the step; ``None`` where it was not there."""
        if _alike(self._root.buffers, self._before):
            return self._before
        values = dict(zip(map(id, self._begun_with), self._before, strict=True))
        found: dict[int, torch.Tensor] = {}
        # By name, as a step that has registered one has moved the places of all that follow.
        for module in self._root.modules:
            held = self._places.get(module, {})
            for name, buffer in buffers_of(module).items():
                value = values.get(id(held.get(name)))
                if buffer is not None and value is not None and _alike([buffer], [value]):
                    found[id(buffer)] = value
        return [found.get(id(buffer)) for buffer in self._root.buffers]

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


def _with_versions(buffers: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    # Tensors of inference mode count nothing.
    return [(buffer, 0 if buffer.is_inference() else version_counter(buffer)) for buffer in buffers]


def _alike(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    if len(mine) != len(theirs):
        return False
    have_shapes = all(map(operator.eq, map(_SHAPE, mine), map(_SHAPE, theirs)))
    return have_shapes and all(map(operator.is_, map(_DTYPE, mine), map(_DTYPE, theirs)))
