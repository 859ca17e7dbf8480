"""The batch that one replica's step got, and what the step has written into it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch

from lightning_dpx.lightning.batch_writes.places import (
    MISSING,
    Path,
    child_of,
    children_by_key,
    is_plain_sequence,
    kind_of,
    takes_items,
    value_at,
)
from lightning_dpx.python_objects.object_graph import pairs_of
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas import BatchSlice
from lightning_dpx.replicas.containers import PLAIN
from lightning_dpx.replicas.slicers import slicer_of
from lightning_dpx.torch_compat import tree_leaves, tree_map_only, version_counter


@dataclass(frozen=True, slots=True)
class _Mark:
    """A part of a batch as a step got it; held, so that its id stays its own."""

    value: Any
    leaves: list[Any]
    versions: list[int]

    @classmethod
    def of(cls, value: Any) -> "_Mark":
        leaves = tree_leaves(value)
        return cls(value, leaves, list(map(_version, leaves)))

    def is_current(self, value: Any) -> bool:
        """Whether nothing was written since."""
        leaves = tree_leaves(value)
        if value is not self.value or len(leaves) != len(self.leaves):
            return False
        # The version tells writes in place, the identity tells that another tensor was put there.
        same = all(one is other for one, other in zip(leaves, self.leaves, strict=True))
        return same and list(map(_version, leaves)) == self.versions


_NEVER_CURRENT = _Mark(MISSING, [], [])


@dataclass(slots=True, eq=False)  # not frozen: K are made in every step
class GivenBatch:
    """The batch that a replica's step got.

    Attributes:
        batch_slice: The replica and its rows.
        batch: What its step got.
        is_as_loaded: Whether that is what the loader gave, moved; or something that hooks of the user made of it.
        parts: Of a list or tuple of plain tensors, as most batches are, these; ``None`` of any other batch.
        versions: Of each of the parts.
        others: Marks of the parts of any other batch, by path.
        objects: What those of them that a slicer cuts hold, such as batches of graphs, by path.
        opened: The lists and tuples whose items are parts, by path; a step may give a list more items, or fewer.
    """

    batch_slice: BatchSlice
    batch: Any
    is_as_loaded: bool
    parts: list[torch.Tensor] | None
    versions: list[int]
    others: dict[Path, _Mark]
    objects: dict[Path, list[Any]]
    opened: dict[Path, Any]

    @property
    def is_untouched(self) -> bool:
        """Whether one look tells that the step wrote nothing."""
        if self.parts is None or not self.is_as_loaded or len(self.batch) != len(self.parts):
            return False
        for value, part in zip(self.batch, self.parts, strict=True):
            if value is not part:
                return False
        return _versions(self.parts) == self.versions

    def marks(self) -> dict[Path, _Mark]:
        """Marks of all parts of the batch, by path."""
        if self.parts is None:
            return self.others
        pairs = zip(self.parts, self.versions, strict=True)
        return {(at,): _Mark(part, [part], [version]) for at, (part, version) in enumerate(pairs)}

    def now(self, shown: Any) -> dict[Path, Any]:
        """The parts of the batch as the step has left it, by path; ``shown`` is the whole batch of the hooks."""
        parts = _parts(self.batch, shown, (), of_hooks=not self.is_as_loaded, opened=self.opened)
        return dict(parts)


def given_batch(batch_slice: BatchSlice, batch: Any, shown: Any, *, is_as_loaded: bool) -> GivenBatch:
    """A batch as a replica's step gets it now.

    Args:
        batch_slice: The replica and its rows.
        batch: What its step gets.
        shown: The whole batch, as hooks get it.
        is_as_loaded: Whether ``batch`` is what the loader gave, moved.
    """
    parts = _plain_tensors(batch)
    if parts is not None:
        return GivenBatch(batch_slice, batch, is_as_loaded, parts, _versions(parts), {}, {}, {(): batch})
    # Any other kind of batch is looked at part by part, which takes longer than the usual list of tensors.
    named = _parts(batch, shown, (), of_hooks=not is_as_loaded, opened=None)
    marks = {path: _Mark.of(value) for path, value in named}
    objects = {path: list(_contents(mark.value)) for path, mark in marks.items() if slicer_of(mark.value)}
    return GivenBatch(batch_slice, batch, is_as_loaded, None, [], marks, objects, _opened(batch, marks))


def on_host(given: GivenBatch, shown: Any) -> GivenBatch:
    """The same batch on the host, in which the same counts as written; ``shown`` is the whole batch of the hooks."""
    written = list(written_paths(given, given.now(shown)))
    # Marks hold tensors, so those of the device must not stay in them.
    there = tree_map_only(torch.Tensor, torch.Tensor.cpu, given.batch)
    opened = {path: value_at(there, path) for path, node in given.opened.items() if value_at(given.batch, path) is node}
    copied = GivenBatch(given.batch_slice, there, given.is_as_loaded, None, [], {}, {}, opened)
    for path, value in copied.now(shown).items():
        copied.others[path] = _Mark.of(value)
    for path in written:
        # Whatever is compared with it, the step has written there.
        copied.others[path] = _NEVER_CURRENT
    return copied


def wrote_nothing(given: GivenBatch, shown: Any) -> bool:
    """Whether the step has left its batch as it was; ``shown`` is the whole batch of the hooks."""
    if given.parts is not None:
        return given.is_untouched
    return written_object(given) is None and not any(True for _ in written_paths(given, given.now(shown)))


def written_paths(given: GivenBatch, now: dict[Path, Any]) -> Iterator[Path]:
    """The places that a step has written to, or taken something away from; ``now`` is what it has left, by path."""
    marks = given.marks()
    for path, value in now.items():
        mark = marks.get(path)
        # What a hook made of the batch is not in the batch that other hooks get, so all of it
        # counts as written.
        if mark is None or not given.is_as_loaded or not mark.is_current(value):
            yield path
    for path in marks:
        gone = None if path in now else _gone(given.batch, path, now)
        if gone is not None:
            yield gone


def _gone(batch: Any, path: Path, now: dict[Path, Any]) -> Path | None:
    """What a step has taken out of its batch where ``path`` is no more: a container goes with all that it held.

    ``None`` where something else has its place.
    """
    for depth in range(1, len(path) + 1):
        start = path[:depth]
        if start in now:
            return None
        if value_at(batch, start) is MISSING:
            return start
    return None


def written_object(given: GivenBatch) -> str | None:
    """Names the written object that a slicer cut; only its library knows how to write it to the whole one."""
    for path, before in given.objects.items():
        after = list(_contents(given.others[path].value))
        if len(after) != len(before) or any(not _is_same(*pair) for pair in zip(before, after, strict=True)):
            name = ".".join(["batch", *map(str, path)])
            return f"{name} is a {type(given.others[path].value).__name__}."
    return None


def _plain_tensors(batch: Any) -> list[torch.Tensor] | None:
    """The parts of a list or tuple of plain tensors; ``None`` of anything else."""
    # A subclass, such as a named tuple, is rebuilt by its own rules: see children_by_key.
    if type(batch) not in (list, tuple):
        return None
    for part in batch:
        if type(part) is not torch.Tensor:
            return None
    return list(batch)


def _opened(batch: Any, paths: Iterable[Path]) -> dict[Path, Any]:
    """The lists and tuples that ``paths`` lead through."""
    opened: dict[Path, Any] = {}
    for path in paths:
        for depth in range(len(path)):
            start = path[:depth]
            node = value_at(batch, start)
            if isinstance(node, Sequence):
                opened[start] = node
    return opened


def _parts(
    node: Any, shown: Any, path: Path, *, of_hooks: bool, opened: dict[Path, Any] | None
) -> Iterator[tuple[Path, Any]]:
    """The parts of a slice that are put together one by one; ``shown`` is the same place of the whole batch.

    Args:
        node: Of the slice.
        shown: Of the whole batch.
        path: To both.
        of_hooks: Whether hooks have made the slice's batch, such as a tuple of the tensors in a list.
        opened: Sequences whose items were parts before the step, and are, whatever it did to them; ``None`` before it.
    """
    # What the whole batch does not have, or has another kind of, was made by the step, and is put together as one
    # value.
    is_made = isinstance(node, torch.Tensor) or kind_of(node) != kind_of(shown)
    children = None if is_made else children_by_key(node)
    # One of another length has a row for each item. What is put in the place of a sequence is one value, too: it may
    # have as many rows as that had items.
    is_opened = _is_same_sequence(node, shown) if opened is None else _is_known(node, path, opened)
    if children is None or not (is_opened or (of_hooks and takes_items(shown, node))):
        yield path, node
        return
    for key, child in children:
        yield from _parts(child, child_of(shown, key), (*path, key), of_hooks=of_hooks, opened=opened)


def _is_same_sequence(node: Any, shown: Any) -> bool:
    """Whether two sequences are of one class and length; true of everything else."""
    return not is_plain_sequence(node) or (type(node) is type(shown) and len(node) == len(shown))


def _is_known(node: Any, path: Path, opened: dict[Path, Any]) -> bool:
    """Whether a sequence is the one that was there; true of everything else."""
    return not is_plain_sequence(node) or node is opened.get(path)


def _contents(node: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """What an object of a library's or user's class holds: its tensors with their versions, its keys and its values."""
    seen = set() if seen is None else seen
    if isinstance(node, torch.Tensor):
        yield node, _version(node)
    elif isinstance(node, PLAIN):
        yield node, None
    elif id(node) not in seen:
        seen.add(id(node))
        yield node
        own = own_attributes(node)
        if isinstance(node, list | tuple):
            yield len(node), None
            for value in node:
                yield from _contents(value, seen)
        elif isinstance(node, dict):
            for key, value in pairs_of(node):
                yield key, None
                yield from _contents(value, seen)
        # Classes, modules and functions would lead out of the batch, to the whole program.
        elif type(own) is dict and not isinstance(node, type | ModuleType | FunctionType | torch.nn.Module):
            yield from _contents(own, seen)


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple:  # a tensor and its version, or a key and whose it is
        return all(a is b or (isinstance(a, PLAIN) and a == b) for a, b in zip(one, other, strict=True))
    return one is other


def _version(value: Any) -> int:
    # Tensors of inference mode have no version: to ask for it is an error.
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    if is_counted:
        return version_counter(value)
    return 0


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return [version_counter(tensor) for tensor in tensors]
    except RuntimeError:  # tensors of inference mode count none; to ask each of them first takes twice as long
        return list(map(_version, tensors))
