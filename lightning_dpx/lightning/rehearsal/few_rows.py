"""The few rows of a batch on which its step is rehearsed, whole and in parts."""

import copy
import math
from collections import Counter
from itertools import pairwise
from typing import Any

import torch

from lightning_dpx.lightning.memory.batch_shapes import arrays_in
from lightning_dpx.lightning.rehearsal.outcome import Call, NotRehearsed, in_one_line
from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.torch_compat import key_of


class FewRows:
    """Takes a few rows of a batch.

    Args:
        call: What the trainer called, with the batch.
        replicas: By whose slicer it is cut.

    Attributes:
        skipped: Of the rows that are not taken, the part in front of those that are, in [0, 1].
    """

    def __init__(self, call: Call, replicas: ReplicaSet) -> None:
        self._batch = call.args[0]
        self._num_rows = call.num_rows
        self._num_slices = len(call.active)
        self._replicas = replicas
        self.skipped: float = 0.0
        self._most_rows = 0
        self._first: int | None = None  # of the rows that are taken; found when it is asked for
        self._is_usual = True  # whether it is where the part that is skipped ends

    def keep_to_micro_batch(self) -> None:
        """Takes no more rows from here on than a micro-batch has, for which there is room; two at the least."""
        # On several devices each has a part of the rows.
        if len(self._replicas.devices) == 1:
            self._most_rows = max(2, *self.real_sizes)

    def unequal_sizes(self, factor: int) -> tuple[int, ...]:
        """How many rows each slice has in a rehearsal, times ``factor`` where that many are there.

        Fewer slices than there are where all of them together would have too many rows.
        """
        sizes = unequal_sizes(self._num_rows, self._num_slices, factor)
        if self.skipped:
            # Of other rows, and where there are no other ones of the same, the first slice has fewer.
            sizes = sizes[::-1]
        most = self._most_rows
        if not most or sum(sizes) <= most:
            return sizes
        # Slices of the run may never have a single row, which some steps cannot do.
        second = max(2 if most >= 4 else 1, (most - 1) // 2)
        return most - second, second

    def taken(self) -> tuple[int, tuple[int, ...]]:
        """Which rows are taken as they are few: those before them, and how many each slice has."""
        sizes = self.unequal_sizes(1)
        return self._num_before(sizes), sizes

    @property
    def real_sizes(self) -> tuple[int, ...]:
        """How many rows each slice has in a step of the run."""
        return tuple(size for size in self._replicas.sizes_of(self._replicas.slicer.read(self._batch)) if size)

    def whole(self, num_rows: int) -> Any:
        """So many rows as one batch, of the step's own."""
        return self._own(self._parts(num_rows)[0])

    def slices(self, sizes: tuple[int, ...]) -> list[Any]:
        """The same rows in slices."""
        parts: list[Any] = self._own(self._parts(*sizes))
        return parts

    def _parts(self, *sizes: int) -> list[Any]:
        """A few rows of the batch in parts; cut as the batch is, whose few rows alone might be read otherwise."""
        batch = self._batch
        rest = self._num_rows - sum(sizes)
        # All rows: a batch that cannot be cut can be run as one device does.
        if not rest and len(sizes) == 1:
            return [batch]
        skipped = self._num_before(sizes)
        every = [skipped, *sizes, rest - skipped]
        # Slicers of the user are never asked for empty parts.
        parts: list[Any] = self._replicas.slicer.read(batch).cut([size for size in every if size])
        first = 1 if skipped else 0
        return parts[first : first + len(sizes)]

    def _num_before(self, sizes: tuple[int, ...]) -> int:
        rest = self._num_rows - sum(sizes)
        if self._first is None:
            few = self.unequal_sizes(1)
            # By parts of what is left, so that any batch has such rows, however many it has.
            usual = int(self.skipped * (self._num_rows - sum(few)))
            self._first = _first_of_unlike_rows(self._batch, self._num_rows, few, usual)
            self._is_usual = self._first == usual
        if self._is_usual:
            return int(self.skipped * rest)
        return min(self._first, rest)

    def _own(self, rows: Any) -> Any:
        """A step may write its batch in place; the real one must find what the loader gave."""
        try:
            return copy.deepcopy(rows, _copies_of_views(rows))
        except Exception as error:  # noqa: BLE001  whatever the class of an item says to being copied
            raise NotRehearsed(f"its batch cannot be copied ({in_one_line(error)})") from None


def _first_of_unlike_rows(batch: Any, num_rows: int, sizes: tuple[int, ...], usual: int) -> int:
    """The first of a few rows some of which are rare in what is a whole number for each row, such as labels or flags.

    In a batch that is sorted, or where most rows are of one class, the ``usual`` ones may be alike: a loss that weighs
    its classes is a mean over such rows, and over no others.
    """
    taken = sum(sizes)
    rare: list[list[bool]] = []
    for array in arrays_in(batch):
        numbers = array.reshape(num_rows).tolist() if _is_one_number_a_row(array, num_rows) else []
        if numbers and all(map(_is_whole, numbers)):
            rare.append(_is_rare(numbers))
    best = usual
    most = _num_unlike(rare, usual, taken)
    for flags in rare:
        change = _first_change(flags)
        if change == num_rows or _num_unlike([flags], usual, taken):
            continue
        # The first row that is another one comes last in the first slice, so that no two slices are alike in this.
        first = max(0, min(change - sizes[0] + 1, num_rows - taken))
        unlike = _num_unlike(rare, first, taken)
        if unlike > most:
            best = first
            most = unlike
    return best


def _num_unlike(rare: list[list[bool]], first: int, taken: int) -> int:
    """How many of these flags differ among the rows that are taken."""
    return sum(_first_change(flags[first : first + taken]) < taken for flags in rare)


def _is_rare(numbers: list[Any]) -> list[bool]:
    """Flags of the rows whose number fewest rows have; where all are as frequent, of those unlike the first one."""
    counts = Counter(numbers)
    least = min(counts.values())
    if least == max(counts.values()):
        return [number != numbers[0] for number in numbers]
    return [counts[number] == least for number in numbers]


def _is_one_number_a_row(array: Any, num_rows: int) -> bool:
    if isinstance(array, torch.Tensor) and (array.layout is not torch.strided or array.is_meta):
        return False
    shape = tuple(array.shape)
    return array.dtype != object and shape[:1] == (num_rows,) and math.prod(shape) == num_rows


def _is_whole(number: Any) -> bool:
    """Whether it may be a label, also as some losses want it, in floating point."""
    return isinstance(number, int) or (isinstance(number, float) and number.is_integer())


def _first_change(flags: list[bool]) -> int:
    """The first place of another flag than the first; their count where there is none."""
    other = not flags[0]
    return flags.index(other) if other in flags else len(flags)


def _copies_of_views(rows: Any) -> dict[int, Any]:
    """Copies of a few rows by their ids: ``deepcopy`` would copy the storage that they are in, which has all rows."""
    tensors: list[torch.Tensor] = []
    places: list[tuple[int, int, int]] = []
    for array in arrays_in(rows):
        # One with attributes of its own is more than its numbers.
        is_plain = type(array) is torch.Tensor and array.layout is torch.strided and not vars(array)
        if is_plain and isinstance(array, torch.Tensor) and array.is_contiguous():
            tensors.append(array)
            start = int(array.storage_offset()) * array.itemsize
            places.append((key_of(array.untyped_storage()), start, start + array.nbytes))
        elif isinstance(array, torch.Tensor):
            return {}  # it may share its numbers with another one
    # A step may write one and read the other.
    for (storage, _, end), (other, start, _) in pairwise(sorted(places)):
        if storage == other and start < end:
            return {}
    is_data = not any(tensor.requires_grad for tensor in tensors)
    if is_data:
        return {id(tensor): tensor.clone() for tensor in tensors}
    return {}


def unequal_sizes(num_rows: int, num_slices: int, factor: int = 1) -> tuple[int, ...]:
    """Rows of each slice, and one more for the first, so that no dim fits by chance; fewer where there are few.

    The more rows, the less a loss over something else than rows (positives, tokens) looks like a mean over them by
    chance: as many as all together take no more room on one device than a slice of the batch does, eight at the most,
    but two in any case.
    """
    largest = num_rows // num_slices
    usual = max(2 * factor, min(8, (largest - 1) // num_slices))
    if num_rows >= usual * num_slices + 1:
        return (usual + 1, *(usual,) * (num_slices - 1))
    least, more = divmod(num_rows, num_slices)
    if not more and least > 1:  # 3 and 1 rather than 2 and 2
        return (least + 1, *(least,) * (num_slices - 2), least - 1)
    return tuple(least + (index < more) for index in range(num_slices))
