"""Numbers that steps give to attributes: what the slices of a batch make of one comes together as on one device.

    self.num_hits = 40     one device adds 7 to it         47
                           two slices add 4 and 3          44 and 43, together 40 + 4 + 3
    self.last_loss         is 0.6 on one device            0.5 and 0.9 of slices, their mean by rows

Of any other attribute that a step rebinds, the first replica's value counts. Which attributes hold such numbers, and
how those of slices become one, is found by a rehearsal.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_dpx.replicas.merging.number_types import ADDED_IN, NUMBERS, as_tensor, is_numeric, like
from lightning_dpx.replicas.remote_tensor import RemoteTensor, source_of, version_of

_MOST = 2**16  # elements of a tensor: a matrix of counts, and no activations


def numbers_of(attributes: Iterable[tuple[str, Any]], read: Collection[str] = ()) -> dict[str, Any]:
    """Copies of all numbers among attributes, and of tensors of a few.

    Args:
        attributes: Values by path.
        read: Paths of those that hooks read, which count however many numbers they are.
    """
    found: dict[str, Any] = {}
    for path, value in attributes:
        if _is_few_numbers(value) or (path in read and _can_be_joined(value)):
            # Copies, since a step may write them in place.
            found[path] = _copied(value)
    return found


def changed_numbers(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The paths of those that are others now, or were not there."""
    return {path for path, now in after.items() if not _is_equal(before.get(path), now)}


class NumberWatch:
    """Attributes before a step, and what the replicas have made of them after it.

    Args:
        modules: Of the replicas that take part.
        root: The user's module, which gets what comes together.
        paths: Of the attributes.
        read: Those of them that hooks read, which count however many numbers they are.
    """

    def __init__(
        self, modules: Sequence[nn.Module], root: nn.Module, paths: Iterable[str], read: Collection[str] = ()
    ) -> None:
        self._read = read
        self._before: dict[str, Any] = {}
        self._noted: dict[str, list[tuple[Any, int]]] = {}  # by path, what each replica has, and its version
        places = {path: path.rpartition(".")[::2] for path in paths}
        owners = {owner for owner, _ in places.values()}
        self._places = places
        self._root = _attributes_of(root, owners)
        self._replicas = [_attributes_of(module, owners) for module in modules]
        for path, (owner, name) in places.items():
            value = _found(self._root[owner], name)
            self._before[path] = _copied(value) if _is_few_numbers(value) else None
            self._noted[path] = [_noted(_found(replica[owner], name)) for replica in self._replicas]

    def before(self, path: str) -> Any:
        """What the attribute was; ``None`` if it was no number."""
        return self._before[path]

    def parts(self, path: str) -> list[Any]:
        """What each replica has made of it; nothing where none did, or one has no number."""
        owner, name = self._places[path]
        parts = [_found(replica[owner], name) for replica in self._replicas]
        # There is no sum or mean of something that is no number on one of them.
        counts = _can_be_joined if path in self._read else _is_few_numbers
        if not all(map(counts, parts)):
            return []
        before = self._before[path]
        # One replica that has changed it is enough; what the others have is their part of it.
        for part, noted in zip(parts, self._noted[path], strict=True):
            if not _is_as_noted(part, noted, before):
                return parts
        return []

    def put_back(self) -> None:
        """Gives the user's attributes what they were, where they were numbers."""
        for path, before in self._before.items():
            if before is not None:
                self.replace(path, before)

    def replace(self, path: str, value: Any) -> None:
        """Gives the user's attribute its value for the whole batch; a tensor that was written in place stays itself."""
        owner, name = self._places[path]
        attributes = self._root[owner]
        now = _found(attributes, name)
        was_kept = any(now is noted for noted, _ in self._noted[path])
        is_tensor = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
        # That a tensor of inference mode was written is seen by nobody: replicas get another one.
        if is_tensor and was_kept and not now.is_inference() and (now.shape, now.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                now.copy_(value)
        else:
            attributes[name] = value


def increments(parts: Sequence[Any], before: Any) -> list[Any] | None:
    """What each replica has added to what was there; ``None`` if that can be no sum."""
    # A count that a step begins, where no number was, is all of it what was added.
    if before is None:
        return _added_to_nothing(parts)
    # A difference of truths is no truth.
    if _is_truth(before):
        return None
    if not all(_can_be_added(part, before) for part in parts):
        return None
    if isinstance(before, torch.Tensor):
        # torch cannot subtract them.
        if before.dtype in ADDED_IN:
            return None
        return [part.detach().to(before.device) - before for part in parts]
    return [part - before for part in parts]


def _added_to_nothing(parts: Sequence[Any]) -> list[Any] | None:
    if not all(_can_be_added(part, parts[0]) for part in parts):
        return None
    if isinstance(parts[0], torch.Tensor):
        # Those of several devices, and of graphs, are no terms of a sum.
        return [part.detach().to(parts[0].device) for part in parts]
    return list(parts)


def joined_changes(parts: Sequence[Any], before: Any) -> tuple[Any, bool] | None:
    """Each element as the last replica that has changed it has it, and whether several have changed one of them.

    ``None`` for what are no arrays like the one before: a single number is what all replicas change.
    """
    if not isinstance(before, torch.Tensor | np.ndarray) or _numel(before) < 2:
        return None
    if not all(type(part) is type(before) and _shape(part) == _shape(before) for part in parts):
        return None
    start = before if isinstance(before, torch.Tensor) else as_tensor(before)
    joined = start
    times_changed = torch.zeros(start.shape, dtype=torch.int64, device=start.device)
    for part in parts:
        value = part.detach().to(start.device) if isinstance(part, torch.Tensor) else as_tensor(part)
        if value.dtype != start.dtype:
            return None
        changed = (value != start) & ~(value.isnan() & start.isnan())
        joined = torch.where(changed, value, joined)
        times_changed += changed
    overlap = bool((times_changed > 1).any())
    return (joined if isinstance(before, torch.Tensor) else like(joined, before)), overlap


def _can_be_added(part: Any, before: Any) -> bool:
    """Whether their difference is what was added: a count that begins at 0 may well become a sum of floats."""
    if _shape(part) != _shape(before) or _is_truth(part):
        return False
    are_numbers = isinstance(part, NUMBERS) and isinstance(before, NUMBERS)
    return are_numbers or type(part) is type(before)


def _is_truth(value: Any) -> bool:
    dtype = getattr(value, "dtype", type(value))
    return dtype in (bool, torch.bool, np.dtype(bool))


def _attributes_of(module: nn.Module, owners: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The attributes of each submodule by its path; looked up once, as there may be thousands."""
    return {path: vars(module.get_submodule(path)) for path in owners}


def _found(attributes: dict[str, Any], name: str) -> Any:
    value = attributes.get(name)
    # The tensor itself: to look at its values a device must not copy them first.
    if isinstance(value, RemoteTensor):
        return source_of(value)
    return value


def _noted(value: Any) -> tuple[Any, int]:
    return value, version_of(value) if isinstance(value, torch.Tensor) else 0


def _is_as_noted(value: Any, noted: tuple[Any, int], copied: Any) -> bool:
    """Asked in every step, and so never of the values of tensors: a device would be waited for."""
    before, version = noted
    if isinstance(value, torch.Tensor) and not value.is_inference():  # of those nobody counts what is written
        return value is before and version_of(value) == version
    if isinstance(value, torch.Tensor | np.ndarray):
        return _is_equal(copied, value)  # it may have been written in place
    return bool(value is before or (type(value) is type(before) and value == before))


def _is_few_numbers(value: Any) -> bool:
    if not _is_plain(value):
        return False
    if isinstance(value, torch.Tensor) and value.ndim and value.requires_grad:
        return False  # part of a graph that the step, or its hooks, still use
    return _numel(value) <= _MOST


def _can_be_joined(value: Any) -> bool:
    """Whether it may have another tensor in its place, of all rows and without a graph."""
    # Its gradient would be looked for there after the backward.
    has_gradient = isinstance(value, torch.Tensor) and value.requires_grad and (value.is_leaf or value.retains_grad)
    return _is_plain(value) and not has_gradient


def _is_plain(value: Any) -> bool:
    """Whether it is a number, or an array of numbers and nothing else."""
    if isinstance(value, torch.Tensor) and (type(value) is not torch.Tensor or value.is_meta or value.is_quantized):
        return False
    return is_numeric(value)


def _numel(value: Any) -> int:
    shape = _shape(value)
    return torch.Size(shape).numel()


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return value


def _is_equal(one: Any, two: Any) -> bool:
    if type(one) is not type(two) or _shape(one) != _shape(two):
        return False
    if isinstance(one, torch.Tensor):
        # NaN is equal here: what was NaN and is so still has not changed.
        other = two.detach().to(one.device)
        return one.dtype == other.dtype and bool(((one == other) | (one.isnan() & other.isnan())).all())
    # NumPy would make an object of an integer of more than 64 bits, of which it cannot say whether it is NaN.
    if isinstance(one, int):
        return bool(one == two)
    return bool(np.array_equal(one, two, equal_nan=True))
