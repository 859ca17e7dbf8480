"""First stage: a batch becomes one slice per replica, cut along its batch dim by workload.

Legend: B rows in the batch, K replicas, n_i rows of replica i (n_1 + ... + n_K = B). The rules are those of MXNet's
DataParallelExecutorGroup (workload list, a batch dim per input, -1 means "give it whole to every device").

    batch_reading   how many rows, which lists hold one item per row, what stands in the way
    slicers         what is cut by an extension, or by the library that it comes from
    array_slices    tensors, arrays and tensordicts
    containers      what holds them, rebuilt as its own type
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from lightning_dpx.arguments import is_number, is_whole_number
from lightning_dpx.errors import ConfigurationError, SliceError
from lightning_dpx.replicas.array_slices import cut_array, shape_of_row
from lightning_dpx.replicas.batch_reading import (
    BatchDim,
    BatchReading,
    RowShapes,
    UncuttableBatch,
    call_slicer,
    check_paths,
)
from lightning_dpx.replicas.containers import PLAIN, children_of, rebuild
from lightning_dpx.replicas.slicers import REGISTERED, FunctionSlicer, Slicer, any_is_registered, make_slicer


def parse_workload(workload: Any, num_replicas: int) -> tuple[float, ...]:
    """One positive share per replica.

    Raises:
        ConfigurationError: an unknown word, a wrong length, or an entry that is not a positive finite number.
    """
    if isinstance(workload, str):
        if workload not in ("even", "auto"):
            raise ConfigurationError(
                f"workload={workload!r} is not allowed; give 'even', 'auto' or one positive number per device, "
                f"for example workload={[1] * num_replicas}."
            )
        return (1.0,) * num_replicas
    check_workload(workload)
    shares = tuple(workload)
    if len(shares) != num_replicas:
        raise ConfigurationError(
            f"workload has {len(shares)} entries {list(shares)} for {num_replicas} devices; give one per device."
        )
    return tuple(float(share) for share in shares)


def check_workload(workload: object) -> None:
    """What can be said before the devices are known.

    Raises:
        ConfigurationError: an unknown word, or an entry that is not a positive finite number.
    """
    if isinstance(workload, str) and workload in ("even", "auto"):
        return
    if isinstance(workload, str) or not isinstance(workload, Sequence):
        raise ConfigurationError(
            f"workload={workload!r} is not allowed; give 'even', 'auto' or one positive number per device."
        )
    for index, share in enumerate(workload):
        if not is_number(share) or not math.isfinite(share) or share <= 0:
            raise ConfigurationError(
                f"workload[{index}]={share!r} is not allowed; every entry must be a positive finite number."
            )


def check_batch_dim(batch_dim: object) -> None:
    """Refuses what :func:`slice_batch` would not understand, or would not notice.

    Raises:
        ConfigurationError: neither a dim nor {input path: dim}.
    """
    dims = batch_dim if isinstance(batch_dim, Mapping) else {"": batch_dim}
    if not all(isinstance(path, str) and type(dim) is int for path, dim in dims.items()):
        raise ConfigurationError(
            f"batch_dim={batch_dim!r} is not allowed; give an int, or {{'input path': int}}, for example {{'1': 0}}."
        )


def split_sizes(num_rows: int, workload: Sequence[float], usual_rows: int = 0) -> tuple[int, ...]:
    """Rows per replica, by largest remainder, with sum exactly ``num_rows``.

    A batch shorter than usual goes to fewer replicas: the first one and those of the largest shares, as many as get at
    least half of their usual slice (or the usual one of the first, if that is smaller) and not a single row where more
    are usual: batch norm fails on one sample. The first one always takes part: to a step it is rank 0, which does what
    is done once.

    Args:
        num_rows: B, the rows of this batch.
        workload: K positive shares.
        usual_rows: Rows of a full batch; batches at least as long are full themselves.
    """
    usual_rows = max(usual_rows, num_rows)
    usual = [usual_rows * share / sum(workload) for share in workload]
    least = []
    for rows in usual:
        # Were more than the first one's asked of a large share, the first, which may be slow, would get all rows alone.
        half = min(rows / 2, usual[0])
        least.append(max(math.ceil(half), min(2, math.floor(rows)), 1))
    # The smallest shares are left out first, and of equal ones the last.
    others = sorted(range(1, len(workload)), key=lambda index: -workload[index])
    sizes = [0] * len(workload)
    # The most replicas that all get enough.
    for active in range(len(workload), 1, -1):
        chosen = [0, *sorted(others[: active - 1])]
        found = _largest_remainder(num_rows, [workload[index] for index in chosen])
        missing = max(least[0] - found[0], 0)
        found[found.index(max(found))] -= missing
        found[0] += missing
        if all(size >= least[index] for index, size in zip(chosen, found, strict=True)):
            for index, size in zip(chosen, found, strict=True):
                sizes[index] = size
            return tuple(sizes)
    return (num_rows, *sizes[1:])


def _largest_remainder(total: int, shares: Sequence[float]) -> list[int]:
    quotas = [total * share / sum(shares) for share in shares]
    sizes = [math.floor(quota) for quota in quotas]
    # Largest remainder first; sorted() is stable, so equal ones go to the earlier replica.
    by_remainder = sorted(range(len(shares)), key=lambda i: sizes[i] - quotas[i])
    for index in by_remainder[: total - sum(sizes)]:
        sizes[index] += 1
    return sizes


def batch_size(batch: Any, batch_dim: BatchDim = 0) -> int:
    """B: the common size of all inputs along their batch dims.

    Raises:
        UncuttableBatch: something stands in the way of cutting the batch; names all of it.
        SliceError: a dim is out of range.
    """
    if (size := _size_of_plain_tensors(batch, batch_dim)) is not None:
        return size
    reading = BatchReading(batch, batch_dim)
    reading.check()
    return reading.num_rows()


def slice_batch(
    batch: Any, sizes: Sequence[int], batch_dim: BatchDim = 0, loaders: Collection[str] = ("",)
) -> list[Any]:
    """K slices of ``batch``, each of the batch's own type; a replica with no rows gets ``None``.

    Args:
        batch: Nested containers of tensors, arrays, and whatever else has a slicer. Tensors are cut (views, no copy),
            and so are lists of B items, whatever these are; numbers and texts are handed to each replica.
        sizes: K numbers of rows, with sum B.
        batch_dim: One dim for all inputs, or ``{path: dim}`` with paths such as ``"0"`` or ``"image.mask"``; -1 gives
            an input, or all that is in a container, whole to every replica. A list that is named has one item per row.
        loaders: The paths of what each loader returned, where a batch has a part of each of several.

    Raises:
        UncuttableBatch: something stands in the way of cutting the batch; names all of it.
        SliceError: a dim is out of range.
    """
    if (size := _size_of_plain_tensors(batch, batch_dim)) is not None and size == sum(sizes):
        return _cut_plain_tensors(batch, sizes, batch_dim)  # type: ignore[arg-type]
    reading = BatchReading(batch, batch_dim, given_rows=sum(sizes), loaders=loaders)
    return _with_gaps(reading.cut([size for size in sizes if size]), sizes)


def _cut_plain_tensors(batch: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    """The slices of the usual batch, in every step: nothing is read, and no path is made of it."""
    columns = [cut_array(tensor, sizes, dim) for tensor in batch]
    slices: list[Any] = list(map(type(batch), zip(*columns, strict=True)))
    # An empty view is no slice: a step on it would divide by zero rows.
    for index, size in enumerate(sizes):
        if not size:
            slices[index] = None
    return slices


def _with_gaps(parts: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """One entry for each size: the next part, or ``None`` where there are no rows."""
    present = iter(parts)
    return [next(present) if size else None for size in sizes]


def _size_of_plain_tensors(batch: Any, batch_dim: BatchDim) -> int | None:
    """B of the usual batch, a flat list or tuple of dense tensors of equal size, without reading it any further."""
    # Only types without any behavior of their own; all others are read with care.
    if type(batch) not in (list, tuple) or not isinstance(batch_dim, int) or batch_dim < 0 or not batch:
        return None
    size = None
    for tensor in batch:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_nested:
            return None
        if tensor.ndim <= batch_dim or size not in (None, tensor.shape[batch_dim]):
            return None
        size = tensor.shape[batch_dim]
    # as many columns as rows may be rows
    if size == len(batch):
        return None
    # What a user has registered goes before what is known here.
    if REGISTERED and any_is_registered(type(batch), torch.Tensor):
        return None
    return size


class BatchSlicer:
    """Cuts whole batches: as a user's slicer does, or along ``batch_dim``.

    Args:
        batch_dim: See :func:`slice_batch`; not looked at where there is a user's slicer.
        slicer: A user's slicer of whole batches, if there is one, and ...
        name: ... what to call it in messages.

    Attributes:
        loaders: See :func:`slice_batch`; set where the loaders are known.
    """

    def __init__(self, batch_dim: BatchDim, slicer: Slicer | None = None, name: str = "") -> None:
        self.batch_dim = batch_dim
        self.slicer = slicer
        self.name = name
        self.loaders: Collection[str] = ("",)

    def num_rows(self, batch: Any) -> int:
        """B, in so far as it is certain; whether the batch can be cut is only known in :meth:`cut`.

        Raises:
            UncuttableBatch: it is not.
        """
        return self.read(batch).num_rows

    def read(self, batch: Any) -> "CountedBatch":
        """The batch with its rows, ready to be cut.

        Raises:
            UncuttableBatch: the rows are not certain.
        """
        if self.slicer is not None:
            return CountedBatch(self, batch, self._num_rows_by_user(self.slicer, batch))
        size = _size_of_plain_tensors(batch, self.batch_dim)
        if size is not None:
            return CountedBatch(self, batch, size)
        # It is kept, so that the batch is not read a second time when it is cut.
        reading = BatchReading(batch, self.batch_dim, loaders=self.loaders)
        return CountedBatch(self, batch, reading.num_rows(), reading)

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """K slices, ``None`` for a replica without rows.

        Raises:
            UncuttableBatch: something stands in the way of cutting the batch; names all of it.
            SliceError: a user's slicer returned something else than a batch for each positive size.
        """
        if self.slicer is None:
            return slice_batch(batch, sizes, self.batch_dim, self.loaders)
        # A user's slicer need not know of replicas without rows: a graph of none, say, may not exist.
        parts = call_slicer(self.name, self.slicer.cut, batch, [size for size in sizes if size])
        return _with_gaps(parts, sizes)

    def _num_rows_by_user(self, slicer: Slicer, batch: Any) -> int:
        # It says nothing of rows, so they are looked for in what it will cut.
        if isinstance(slicer, FunctionSlicer):
            rows = _rows_for_function(batch)
        else:
            try:
                rows = slicer.num_rows(batch)
            except BaseException as error:
                error.add_note(f"In {self.name}, counting the rows of a {type(batch).__name__}.")
                raise
        if rows is None:
            raise UncuttableBatch(
                f"{self.name} does not say how many rows a batch ({type(batch).__name__}) has.",
                "Give a lightning_dpx.Slicer, whose num_rows(batch) does.",
                ("uncounted", self.name),
            )
        if not is_whole_number(rows) or rows < 0:
            raise SliceError(f"{self.name} counted {rows!r} rows in a {type(batch).__name__}; return an int >= 0.")
        return rows


@dataclass(slots=True)  # not frozen: one is made in every step
class CountedBatch:
    """A batch whose rows are certain.

    Attributes:
        slicer: What cuts it.
        batch: The batch.
        num_rows: B.
        reading: What was found out about it on the way, if it had to be read.
    """

    slicer: BatchSlicer
    batch: Any
    num_rows: int
    reading: BatchReading | None = None

    def row_shapes(self) -> RowShapes:
        """The shapes of one row in every tensor, without the batch dim; nothing of what a user's slicer cuts."""
        if self.slicer.slicer is not None:
            return ()
        if self.reading is not None:
            return self.reading.row_shapes()
        dim = self.slicer.batch_dim
        assert isinstance(dim, int), "batches of plain tensors alone are not read"
        return tuple(shape_of_row(tensor, dim) for tensor in self.batch)

    def cut(self, sizes: Sequence[int]) -> list[Any]:
        """See :meth:`BatchSlicer.cut`."""
        if self.reading is None:
            if self.slicer.slicer is not None:
                return self.slicer.cut(self.batch, sizes)
            dim = self.slicer.batch_dim
            assert isinstance(dim, int), "batches of plain tensors alone are not read"
            return _cut_plain_tensors(self.batch, sizes, dim)
        parts = self.reading.cut([size for size in sizes if size])
        return _with_gaps(parts, sizes)


def _rows_for_function(batch: Any) -> int | None:
    """What a user's function cuts needs sizes, too: of the first input with rows, else of the lists, or its length."""
    reading = BatchReading(batch)
    if reading.counted:
        return reading.counted[0].num_rows
    lengths = {len(found.node) for found in reading.lists}
    children = None
    if len(reading.lists) == 1 and reading.lists[0].node is batch:
        children = children_of(batch)
    # A list of nothing but lists, all as long as each other, holds columns.
    if children is not None and all(isinstance(child, list | tuple) for _, child in children):
        inner = {len(child) for _, child in children}
        if len(inner) == 1:
            lengths = inner
    if len(lengths) == 1:
        return lengths.pop()
    if hasattr(type(batch), "__len__"):
        return len(batch)
    return None


def user_slicer(batch_slicer: Any, module: Any, batch_dim: BatchDim) -> BatchSlicer:
    """The slicer that was given, or else a method ``slice_batch(self, batch, sizes)`` of ``module``, or else our own.

    A module may also have a method ``num_rows(self, batch)``, as :class:`Slicer` has.

    Raises:
        ConfigurationError: ``batch_slicer`` is neither a slicer nor a function.
    """
    if batch_slicer is not None:
        return BatchSlicer(batch_dim, make_slicer("batch_slicer", batch_slicer), "batch_slicer")
    method = getattr(type(module), "slice_batch", None)
    if not callable(method) or "sizes" not in signature(method).parameters:  # or it means something else
        return BatchSlicer(batch_dim)
    slicer: Slicer = FunctionSlicer(module.slice_batch)
    if callable(getattr(type(module), "num_rows", None)):
        slicer = _MethodSlicer(module)
    return BatchSlicer(batch_dim, slicer, f"{type(module).__name__}.slice_batch")


class _MethodSlicer(Slicer):
    """Cuts and counts as the methods of the user's module do."""

    def __init__(self, module: Any) -> None:
        self.num_rows = module.num_rows  # type: ignore[method-assign]
        self.cut = module.slice_batch  # type: ignore[method-assign]


__all__ = [
    "PLAIN",
    "BatchDim",
    "BatchSlicer",
    "UncuttableBatch",
    "batch_size",
    "check_batch_dim",
    "check_paths",
    "check_workload",
    "children_of",
    "parse_workload",
    "rebuild",
    "slice_batch",
    "split_sizes",
    "user_slicer",
]
