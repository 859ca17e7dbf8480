"""What a step writes into its batch is what hooks find there afterwards, as on one device.

On one device the step and ``on_train_batch_end(outputs, batch, batch_idx)`` have one batch. Here a step has a slice of
it, on its own device and in containers of its own. So where a hook of the user's gets the batch, it gets one whose
tensors and containers may be exchanged without anything happening to what the loader gave; and after the step, what was
written into the slices is put together and put in there, and the rest is moved to the device of the module. An
optimizer that calls its closure again finds it, too.
"""

import threading
from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.optim import LBFGS

from lightning_dpx.devices import is_host
from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.gradient_hooks import has_hooks
from lightning_dpx.lightning.lightning_api import LightningModule
from lightning_dpx.lightning.transfers import TRANSFER_HOOKS, Transfer
from lightning_dpx.python_objects.object_graph import pairs_of
from lightning_dpx.python_objects.own_attributes import own_attributes
from lightning_dpx.replicas import BatchSlice, MergeRules, children_of, rebuild, weights_of
from lightning_dpx.replicas.containers import PLAIN
from lightning_dpx.replicas.slicers import slicer_of
from lightning_dpx.torch_compat import tree_leaves, tree_map_only, version_counter

_HOOKS = {
    "train": "on_train_batch_end",
    "sanity_check": "on_validation_batch_end",
    "validate": "on_validation_batch_end",
    "test": "on_test_batch_end",
    "predict": "on_predict_batch_end",
}
Path = tuple[Any, ...]  # keys, indices and names of attributes
_MISSING = object()


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


_NEVER_CURRENT = _Mark(_MISSING, [], [])


@dataclass(slots=True, eq=False)  # not frozen: K are made in every step
class _Given:
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


class BatchWrites:
    """The batch of one step, as hooks see it.

    Attributes:
        values: What the last step wrote, put together; by a name for messages.
    """

    def __init__(self) -> None:
        self._shown: Any = _MISSING
        self._given: list[_Given] = []
        self._lock = threading.Lock()
        self.values: dict[str, Any] = {}
        self._looked_at: dict[Any, bool] = {}  # by stage and number of callbacks
        self._stage: tuple[Any, int] = (None, 0)  # the last of them: Lightning's stages are slow to hash
        self._is_watching = False

    def is_for(self, module: LightningModule) -> bool:
        """Whether a hook looks at the next batch after its step; if not, the last one is forgotten."""
        trainer: Any = module.trainer
        stage = trainer.state.stage
        num_callbacks = len(trainer.callbacks)
        if stage is not self._stage[0] or num_callbacks != self._stage[1]:
            # Callbacks may be added in the middle of a run, and each stage has hooks of its own.
            kind = self._stage = stage, num_callbacks
            if kind not in self._looked_at:
                self._looked_at[kind] = _is_looked_at(module)
                _tell_of_start_hooks(module)
            self._is_watching = self._looked_at[kind]
        if not self._is_watching:
            self.forget()
        return self._is_watching

    def move_to(self, device: torch.device) -> None:
        """Hooks find the batch there, where they give it to the module again, or compare it with outputs.

        Not in the trial of a step, which runs no hooks.
        """
        if is_host(device):
            return
        for _, leaf in _all_leaves(self._shown, ()):
            if _is_exchangeable(leaf) and leaf.device != device:
                _exchange(leaf, leaf.to(device))

    def forget(self) -> None:
        """Hooks get the next batch as it is, or do not look at it."""
        self._shown = _MISSING
        self._given = []

    @property
    def is_watched(self) -> bool:
        """Whether a hook looks at the batch after its step."""
        return self._shown is not _MISSING

    def show(self, batch: Any) -> Any:
        """The batch that hooks get: equal to ``batch``, and exchangeable in all its parts."""
        self._given = []
        self.values = {}  # of the last batch, which would be there beside this one
        self._shown = _exchangeable(batch)
        return self._shown

    def note(self, batch_slice: BatchSlice, batch: Any, *, is_as_loaded: bool) -> None:
        """A replica's step begins; for the arguments see :class:`_Given`."""
        # Without a hook that looks, nothing is noted in any step.
        if self._shown is _MISSING:
            return
        given = self._marked(batch_slice, batch, is_as_loaded)
        # Replicas in threads note theirs at the same time.
        with self._lock:
            self._given.append(given)

    def let_go(self, batch_slice: BatchSlice, *, others_follow: bool) -> None:
        """A replica's step is over: what it got need not stay on its device until the last one is.

        Args:
            batch_slice: Of the replica.
            others_follow: Whether its device has micro-batches, which are for where all rows at once are too much.
        """
        if is_host(batch_slice.replica.device):
            return
        with self._lock:
            found = [place for place, one in enumerate(self._given) if one.batch_slice is batch_slice]
        if not found:
            return
        given = self._given[found[-1]]
        if given.is_as_loaded and self._wrote_nothing(given):
            # Where others have written, its rows are wanted again: those that were loaded are the same.
            self._given[found[-1]] = self._marked(batch_slice, batch_slice.batch, True)
        # What an object of a library's holds is compared with what it held, on the device.
        elif others_follow and not given.objects:
            self._given[found[-1]] = self._on_host(given)

    def _on_host(self, given: _Given) -> _Given:
        """The same batch on the host, in which the same counts as written."""
        written = list(_written(given, given.now(self._shown)))
        there = tree_map_only(torch.Tensor, torch.Tensor.cpu, given.batch)
        opened = {path: _at(there, path) for path, node in given.opened.items() if _at(given.batch, path) is node}
        copied = _Given(given.batch_slice, there, given.is_as_loaded, None, [], {}, {}, opened)
        for path, value in copied.now(self._shown).items():
            copied.others[path] = _Mark.of(value)
        for path in written:
            copied.others[path] = _NEVER_CURRENT
        return copied

    def _wrote_nothing(self, given: _Given) -> bool:
        if given.parts is not None:
            return given.is_untouched
        return _written_object(given) is None and not any(True for _ in _written(given, given.now(self._shown)))

    def _marked(self, batch_slice: BatchSlice, batch: Any, is_as_loaded: bool) -> _Given:
        parts = _plain_tensors(batch)
        if parts is not None:
            return _Given(batch_slice, batch, is_as_loaded, parts, _versions(parts), {}, {}, {(): batch})
        named = _parts(batch, self._shown, (), of_hooks=not is_as_loaded, opened=None)
        marks = {path: _Mark.of(value) for path, value in named}
        objects = {path: list(_contents(mark.value)) for path, mark in marks.items() if slicer_of(mark.value)}
        return _Given(batch_slice, batch, is_as_loaded, None, [], marks, objects, _opened(batch, marks))

    def finish(self, rules: MergeRules, device: torch.device, dim: int) -> str | None:
        """After the step: hooks find what was written; or else what cannot be put together, and why not.

        Args:
            rules: How values are put together, as far as it is known.
            device: Where.
            dim: The batch dim.
        """
        # They were noted in the order in which threads began; rows are joined in that
        # of the slices.
        given = sorted(self._given, key=lambda one: one.batch_slice.replica.index)
        self._given = []
        self.values = {}
        if all(one.is_untouched for one in given):
            return None
        # One slice has all rows: the object that it has written is the one that hooks find.
        if len(given) > 1 and (problem := next(filter(None, map(_written_object, given)), None)) is not None:
            return problem
        # Only hooks of the user's make another kind of container of a batch, and there is no place
        # for that in the one that other hooks have got.
        rows = sum(one.batch_slice.num_rows for one in given)
        if not given[0].is_as_loaded:
            problem = _other_kind(self._shown, given[0].batch, (rows, given[0].batch_slice.num_rows), "batch")
            if problem is not None:
                return problem
        now = [one.now(self._shown) for one in given]
        # A path that one slice has written is taken from all of them, as the others have
        # its other rows.
        paths = dict.fromkeys(path for one, parts in zip(given, now, strict=True) for path in _written(one, parts))
        for path in paths:
            name = ".".join(["batch", *map(str, path)])
            parts = [own.get(path, _MISSING) for own in now]
            if len({part is _MISSING for part in parts}) > 1:
                return f"{name} is there on some slices only."
            try:
                whole = self._together(name, path, parts, given, rules, device, dim)
            except GatherError as error:
                return f"{name}: {error}"
            self._put(path, whole)
        for path in paths:
            start = self._of_all_rows(path, rows)
            for place, value in _all_leaves(_at(self._shown, start), start):
                self.values[".".join(["batch", *map(str, place)])] = value
        return None

    def _of_all_rows(self, path: Path, rows: int) -> Path:
        """The list of one item per row that ``path`` leads through, if there is one; slices have a part of it."""
        for depth in range(len(path)):
            node = _at(self._shown, path[:depth])
            if isinstance(node, list | tuple) and len(node) == rows:
                return path[:depth]
        return path

    def _together(
        self,
        name: str,
        path: Path,
        parts: Sequence[Any],
        given: Sequence[_Given],
        rules: MergeRules,
        device: torch.device,
        dim: int,
    ) -> Any:
        # Numbers may count rows, and be equal by chance; a text, or that there is nothing, is of no rows.
        is_text = isinstance(parts[0], str | None)
        if len(parts) == 1 or parts[0] is _MISSING or (is_text and all(part == parts[0] for part in parts)):
            return parts[0]
        shown = _at(self._shown, path)
        rows = [one.batch_slice.num_rows for one in given]
        lengths = [len(part) if isinstance(part, list | tuple) else None for part in parts]
        # One item per row, also of a list that is another length by now than the one that it stands for.
        if isinstance(shown, list | tuple) and lengths == rows and len(shown) == sum(rows):
            items = list(chain.from_iterable(parts))
            return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), type(shown)(items))
        weights = weights_of([one.batch_slice for one in given])
        if shown is _MISSING or not isinstance(shown, torch.Tensor):
            # What has no rows, such as a number, is merged as a logged value of that name would be.
            known = rules.merge_logged(name, parts, weights, device) if rules.decides(name) else _MISSING
            if known is not _MISSING:
                return known
        # The step's own rules are about its outputs; values with rows are joined by
        # their shapes alone.
        return MergeRules().merge_outputs([[part] for part in parts], weights, device, dim)[0]

    def _put(self, path: Path, value: Any) -> None:
        node = _at(self._shown, path[:-1])
        if not path or (isinstance(node, tuple) and value is not _MISSING):
            # A tuple takes no other item, but its tensor can get other memory.
            _exchange(_at(self._shown, path), value)
        elif value is _MISSING:
            _remove(node, path[-1])
        elif isinstance(node, MutableMapping):
            node[path[-1]] = value
        elif isinstance(node, MutableSequence):
            # As a slice, since the step may have appended: there is no such index yet.
            node[path[-1] : path[-1] + 1] = [value]
        else:
            # Frozen dataclasses refuse plain assignment.
            object.__setattr__(node, path[-1], value)


def unlike_one_batch(problem: str) -> tuple[str, str]:
    """The reason for whole batches, and what to do about it, where slices write what cannot be put together."""
    return (
        f"It writes its batch, which hooks look at afterwards, and what slices write cannot be put together: {problem}",
        "For all devices to take part, write into a batch only what has a row for each of its own.",
    )


def _is_looked_at(module: LightningModule) -> bool:
    """Whether a hook of the user's gets the batch after the step, or the step may run on it again."""
    trainer: Any = module.trainer
    # The second call of a closure must find in the batch what the first one wrote there.
    runs_again = trainer.training and any(map(_calls_again, trainer.optimizers))
    return runs_again or has_hooks(module, trainer.callbacks, [_end_hook(trainer)])


def _end_hook(trainer: Any) -> str:
    """The hook at the end of a batch of the stage that is running."""
    return _HOOKS.get(str(getattr(trainer.state.stage, "value", "")), "on_train_batch_end")


def _tell_of_start_hooks(module: LightningModule) -> None:
    """Says that hooks at the start of a batch find it as it was loaded, where one device shows what it has become."""
    trainer: Any = module.trainer
    end = _end_hook(trainer)
    start = end.replace("_end", "_start")
    if has_hooks(module, trainer.callbacks, [start]) and not Transfer(trainer, module, 0).is_plain:
        trainer.strategy.announce(
            f"dpx: {start} gets every batch as it was loaded: {' and '.join(TRANSFER_HOOKS)} run on each slice, within "
            f"the step. {end} gets what they have made of it."
        )


def _calls_again(optimizer: Any) -> bool:
    """Whether an optimizer may call its closure several times for a batch."""
    plain = getattr(optimizer, "optimizer", optimizer)
    # Of torch's own optimizers LBFGS alone calls its closure again; of others nothing is known.
    return isinstance(plain, LBFGS) or not type(plain).step.__module__.startswith("torch.optim.")


def _plain_tensors(batch: Any) -> list[torch.Tensor] | None:
    """The parts of a list or tuple of plain tensors; ``None`` of anything else."""
    # A subclass, such as a named tuple, is rebuilt by its own rules: see _children.
    if type(batch) not in (list, tuple):
        return None
    for part in batch:
        if type(part) is not torch.Tensor:
            return None
    return list(batch)


def _written(given: _Given, now: dict[Path, Any]) -> Iterator[Path]:
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
        if _at(batch, start) is _MISSING:
            return start
    return None


def _opened(batch: Any, paths: Iterable[Path]) -> dict[Path, Any]:
    """The lists and tuples that ``paths`` lead through."""
    opened: dict[Path, Any] = {}
    for path in paths:
        for depth in range(len(path)):
            start = path[:depth]
            node = _at(batch, start)
            if isinstance(node, Sequence):
                opened[start] = node
    return opened


def _written_object(given: _Given) -> str | None:
    """Names the written object that a slicer cut; only its library knows how to write it to the whole one."""
    for path, before in given.objects.items():
        after = list(_contents(given.others[path].value))
        if len(after) != len(before) or any(not _is_same(*pair) for pair in zip(before, after, strict=True)):
            name = ".".join(["batch", *map(str, path)])
            return f"{name} is a {type(given.others[path].value).__name__}."
    return None


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple:  # a tensor and its version, or a key and whose it is
        return all(a is b or (isinstance(a, PLAIN) and a == b) for a, b in zip(one, other, strict=True))
    return one is other


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


def _is_exchangeable(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and not value.requires_grad


def _exchangeable(batch: Any) -> Any:
    """Containers anew, and tensors that share memory with those of the loader and can get other memory."""
    if _is_exchangeable(batch):
        # Memory is shared, so writes in place reach the loader's tensor as on one device; `.data`
        # of the new object can be set without it. A leaf that requires gradients must stay itself
        # to get them.
        return batch.detach()
    if type(batch) in (list, tuple):
        return type(batch)(map(_exchangeable, batch))
    children = None if isinstance(batch, torch.Tensor) else _children(batch)
    if children is None:
        return batch
    return rebuild(batch, [_exchangeable(child) for _, child in children])


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """As ``children_of``, with the keys themselves."""
    if isinstance(node, MutableMapping):
        return list(node.items())
    children = children_of(node)
    if children is not None and isinstance(node, Sequence) and not hasattr(node, "_fields"):
        return [(int(name), child) for name, child in children]
    return children


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
    is_made = isinstance(node, torch.Tensor) or _kind(node) != _kind(shown)
    children = None if is_made else _children(node)
    # One of another length has a row for each item. What is put in the place of a sequence is one value, too: it may
    # have as many rows as that had items.
    is_opened = _is_same_sequence(node, shown) if opened is None else _is_known(node, path, opened)
    if children is None or not (is_opened or (of_hooks and _takes_items(shown, node))):
        yield path, node
        return
    for key, child in children:
        yield from _parts(child, _child(shown, key), (*path, key), of_hooks=of_hooks, opened=opened)


def _is_plain_sequence(node: Any) -> bool:
    return isinstance(node, Sequence) and not hasattr(node, "_fields")


def _is_same_sequence(node: Any, shown: Any) -> bool:
    """Whether two sequences are of one class and length; true of everything else."""
    return not _is_plain_sequence(node) or (type(node) is type(shown) and len(node) == len(shown))


def _is_known(node: Any, path: Path, opened: dict[Path, Any]) -> bool:
    """Whether a sequence is the one that was there; true of everything else."""
    return not _is_plain_sequence(node) or node is opened.get(path)


def _takes_items(shown: Any, made: Any) -> bool:
    """Whether a list or tuple has a place for each item of another one; a list may grow."""
    if type(shown) not in (list, tuple) or type(made) not in (list, tuple):
        return False
    return len(made) == len(shown) or (type(shown) is list and len(made) > len(shown))


def _other_kind(shown: Any, made: Any, rows: tuple[int, int], name: str) -> str | None:
    """Where hooks of the transfer made another kind of container than there was, or left out items, in words.

    Args:
        shown: As loaded.
        made: By the hooks, of a slice.
        rows: Of the batch, and of the slice.
        name: Of the place.
    """
    if _kind(shown) != _kind(made):
        return f"{name} is a {type(shown).__name__} as loaded, and hooks of its transfer make a {type(made).__name__}."
    if isinstance(shown, torch.Tensor):
        return None
    if _kind(shown) == _SEQUENCES and (len(shown), len(made)) != rows and not _takes_items(shown, made):
        return f"{name} has {len(shown)} items as loaded, and {len(made)} after the hooks of its transfer."
    for key, child in _children(shown) or ():
        other = _child(made, key)
        if other is not _MISSING and (problem := _other_kind(child, other, rows, f"{name}.{key}")) is not None:
            return problem
    return None


_SEQUENCES = list | tuple


def _kind(value: Any) -> type:
    for kind in (torch.Tensor, MutableMapping, _SEQUENCES):
        if isinstance(value, kind) and not hasattr(value, "_fields"):
            return kind  # type: ignore[return-value]
    # Of anything else, such as a number or a text, hooks may make what they like.
    if children_of(value) is not None:
        return type(value)
    return object


def _all_leaves(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if node is _MISSING:
        return
    children = None if isinstance(node, torch.Tensor) else _children(node)
    if children is None:
        yield path, node
        return
    for key, child in children:
        yield from _all_leaves(child, (*path, key))


def _at(root: Any, path: Path) -> Any:
    for key in path:
        root = _child(root, key)
    return root


def _child(node: Any, key: Any) -> Any:
    if isinstance(node, MutableMapping):
        return node.get(key, _MISSING)
    if isinstance(node, Sequence) and isinstance(key, int):
        if key < len(node):
            return node[key]
        return _MISSING
    # An index leads nowhere in what a step has put in the place of a list.
    if not isinstance(key, str):
        return _MISSING
    return getattr(node, key, _MISSING)


def _remove(node: Any, key: Any) -> None:
    if isinstance(node, MutableMapping):
        node.pop(key, None)
    elif isinstance(node, MutableSequence):
        # The step has shortened the list: everything from there on is gone.
        del node[key:]
    elif not isinstance(node, tuple):
        vars(node).pop(key, None)


@torch.no_grad()
def _exchange(tensor: Any, value: Any) -> None:
    """A tensor in a tuple, or that is the batch, gets another one's memory."""
    if isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor):
        tensor.data = value.detach()
