"""Reads how a batch can be cut: its rows, which of its lists hold one item per row, and what stands in the way.

Certain rows are those of arrays that are reached by names, and not by positions in a list: a list of tensors may hold
columns, or rows that happen to be as long as each other. Once the rows are certain, a list of as many items holds one
per row, unless its items could be columns of as many rows. What is not certain is not guessed: it is a fault.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lightning_dpx.errors import SliceError, some_of
from lightning_dpx.replicas.array_slices import cut_array, is_array, shape_of, shape_of_row, spans
from lightning_dpx.replicas.containers import (
    children_of,
    is_list_of_values,
    is_sequence,
    is_value,
    join_path,
    named_nodes,
    rebuild,
    rebuild_sequence,
)
from lightning_dpx.replicas.slicers import FunctionSlicer, is_registered, slicer_of, with_encodings

BatchDim = int | Mapping[str, int]
RowShapes = tuple[tuple[Any, ...], ...]  # of one row in every tensor, without its batch dim
MOST_NAMED = 8  # inputs in one message


class UncuttableBatch(SliceError):  # noqa: N818  no error where one device takes the batch whole
    """The batch cannot be cut with certainty; one device may still run it whole.

    Args:
        reason: Why, in sentences that name all inputs at fault.
        advice: What to do about it, in sentences.
        kind: What is the same for all batches with these faults, whatever their sizes.
    """

    def __init__(self, reason: str, advice: str, kind: object) -> None:
        super().__init__(f"{reason} {advice}".rstrip())
        self.reason = reason
        self.advice = advice
        self.kind: str = str(kind)


@dataclass(frozen=True, slots=True)
class Input:
    """A part of a batch that is cut in one piece, or stands in the way of it.

    Attributes:
        path: Where it is.
        node: What it is.
        num_rows: How many rows it has, if it says so.
    """

    path: str
    node: Any
    num_rows: int | None = None

    def __str__(self) -> str:
        name = self.path or "the batch"
        if is_array(self.node):
            shape = ", ".join(map(str, shape_of(self.node)))
            return f"{name} ({type(self.node).__name__} of shape ({shape}))"
        if is_sequence(self.node):
            kinds = sorted({type(item).__name__ for item in self.node})
            return f"{name} ({type(self.node).__name__} of {len(self.node)} {' or '.join(kinds[:3])})"
        return f"{name} ({type(self.node).__name__})"


@dataclass(slots=True)
class BatchReading:
    """How one batch can be cut.

    Attributes:
        batch: The batch.
        batch_dim: One dim for all inputs, or ``{path: dim}``.
        given_rows: The rows, where the caller knows them.
        loaders: The paths of what the loaders returned: the batch itself, or its parts where there are several.
        counted: The inputs that say how many rows they have.
        uncounted: Those that can be cut, and do not say how many rows they have.
        lists: Those that may hold one item per row.
        opaque: Those that cannot be cut, with the reason.
        row_lists: The paths of lists that are cut by their items.
        columns: Lists that a loader returned, read as one column per item, as PyTorch's own collate makes them.
    """

    batch: Any
    batch_dim: BatchDim = 0
    given_rows: int | None = None
    loaders: Collection[str] = ("",)
    counted: list[Input] = field(default_factory=list)
    uncounted: list[Input] = field(default_factory=list)
    lists: list[Input] = field(default_factory=list)
    opaque: list[tuple[Input, str]] = field(default_factory=list)
    row_lists: set[str] = field(default_factory=set)
    columns: list[Input] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._walk(self.batch, "")

    # ---- what is there ----

    def _dim(self, path: str) -> int:
        if isinstance(self.batch_dim, int):
            return self.batch_dim
        return self.batch_dim.get(path, 0)

    def _is_named(self, path: str) -> bool:
        return isinstance(self.batch_dim, Mapping) and path in self.batch_dim

    def _names_items_of(self, path: str) -> bool:
        """Whether ``batch_dim`` speaks of inputs inside of a list, so that the list holds columns."""
        start = join_path(path, "") if path else ""
        named = () if isinstance(self.batch_dim, int) else self.batch_dim
        return any(name.startswith(start) and name != path for name in named)

    def _walk(self, node: Any, path: str) -> None:
        """Finds the inputs below ``node``, but not those in lists whose meaning is still open."""
        if self._dim(path) == -1 or is_value(node):
            return
        # First of all: a class that was registered may be made from a tensor, a list or a mapping.
        slicer = slicer_of(node)
        if slicer is not None:
            self._count_object(slicer, Input(path, node))
        elif is_array(node):
            self.counted.append(Input(path, node, self._size(node, path)))
        elif is_sequence(node):
            self._walk_sequence(node, path)
        else:
            self._walk_children(node, path)

    def _walk_children(self, node: Any, path: str) -> None:
        children = children_of(node)
        if children is None:
            self.opaque.append((Input(path, node), ""))
            return
        for name, child in children:
            self._walk(child, join_path(path, name))

    def _walk_sequence(self, node: Any, path: str) -> None:
        if self._is_named(path) or (path in self.loaders and _is_list_of_alike_values(node)):
            self.row_lists.add(path)
            self.counted.append(Input(path, node, len(node)))
        # What the items of a list are is known here, so they are inputs like those of a mapping.
        elif self._names_items_of(path) or _are_of_many_kinds(node) or self._holds_loaders(path):
            self._walk_children(node, path)
        elif path in self.loaders and any(is_array(item) or slicer_of(item) is not None for item in node):
            self.columns.append(Input(path, node))
            self._walk_children(node, path)
        # Still open: it depends on the rows, which may be counted further on in the batch.
        elif len(node):
            self.lists.append(Input(path, node))

    def _holds_loaders(self, path: str) -> bool:
        """Whether a list has an item for each of several loaders."""
        start = f"{path}." if path else ""
        return any(loader != path and loader.startswith(start) for loader in self.loaders)

    def _count_object(self, slicer: Any, found: Input) -> None:
        # A function cuts into sizes that it is given, and counts nothing.
        if isinstance(slicer, FunctionSlicer):
            self.uncounted.append(found)
            return
        try:
            rows = slicer.num_rows(found.node)
        except Exception as error:
            if is_registered(found.node):  # its author's
                error.add_note(f"In {type(slicer).__name__}, counting the rows of {found}.")
                raise
            self.opaque.append((found, f"{type(error).__name__}: {error}"))
            return
        if rows is None:
            self.opaque.append((found, "its slicer cannot count its rows"))
        else:
            self.counted.append(Input(found.path, found.node, int(rows)))

    def _size(self, array: Any, path: str) -> int:
        """The number of rows of an array.

        Raises:
            SliceError: it has no such dim.
        """
        dim = self._dim(path)
        shape = shape_of(array)
        if not 0 <= dim < len(shape):
            raise SliceError(
                f"batch_dim={dim} is out of range for {path or 'the batch'} of shape {shape}; "
                f"allowed: 0 to {len(shape) - 1}, or -1 for an input without a batch dim."
            )
        return int(shape[dim])

    def row_shapes(self) -> RowShapes:
        """The shapes of one row in every array that has rows."""
        arrays = [found for found in self.counted if is_array(found.node)]
        return tuple(shape_of_row(found.node, self._dim(found.path)) for found in arrays)

    # ---- how many rows ----

    def num_rows(self) -> int:
        """B: the common size of all inputs along their batch dims.

        Raises:
            UncuttableBatch: the inputs do not agree, or none has rows for certain.
        """
        if self.given_rows is not None:
            return self.given_rows
        sizes = {found.num_rows for found in self.counted}
        # Lengths are the last resort: beside tensors, what a function cuts may have any length.
        if not sizes:
            sizes = {len(found.node) for found in self.uncounted if hasattr(type(found.node), "__len__")}
        size = sizes.pop() if len(sizes) == 1 else None
        if size is None:
            self._refuse(None)
        return size

    def check(self) -> None:
        """Decides about the lists, now that the rows are certain.

        Raises:
            UncuttableBatch: something stands in the way; names all of it.
        """
        total = self.num_rows()
        doubtful = []
        while self.lists:
            # One by one, as a list of columns may add further lists, which are decided as well.
            found = self.lists.pop()
            if is_list_of_values(found.node) and len(found.node) != total:
                continue  # settings, which have nothing to do with the rows
            if len(found.node) != total:
                self._walk_children(found.node, found.path)
            # As many items as rows, which cannot be columns of so many rows: one item for each row.
            elif not self._may_be_columns(found, total):
                self.row_lists.add(found.path)
            elif _are_of_many_kinds(found.node):
                self._walk_children(found.node, found.path)
            else:
                # Three lists of three: rows and columns look alike, and a wrong guess trains on
                # mixed up rows without an error.
                doubtful.append(found)
        as_many = [found for found in self.columns if len(found.node) == total]
        doubtful += [found for found in as_many if self._may_be_columns(found, total)]
        if doubtful or self.opaque or any(found.num_rows != total for found in self.counted):
            self._refuse(total, doubtful)

    def _may_be_columns(self, found: Input, total: int) -> bool:
        """Whether there is something with rows in a list, and all of that has ``total`` of them."""
        return self.sizes_inside(found) == {total}

    def sizes_inside(self, found: Input) -> set[int | None]:
        """The sizes of all columns in a list, if its items are columns; empty if they cannot be."""
        sizes: set[int | None] = set()
        for index, item in enumerate(found.node):
            try:
                inside = BatchReading(item, self._dim_inside(join_path(found.path, str(index))))
            except SliceError:
                return set()  # it has no such dim
            if inside.opaque:
                return set()
            sizes.update(column.num_rows for column in inside.counted)
            sizes.update(len(column.node) for column in inside.lists)
        return sizes

    def _dim_inside(self, path: str) -> BatchDim:
        """What ``batch_dim`` says of the items of a list, which are read as columns here."""
        if isinstance(self.batch_dim, int):
            return self.batch_dim
        start = f"{path}."
        return {name[len(start) :]: dim for name, dim in self.batch_dim.items() if name.startswith(start)}

    # ---- what stands in the way ----

    def _refuse(self, total: int | None, doubtful: Sequence[Input] = ()) -> NoReturn:
        raise _complaint(self, total, list(doubtful))

    # ---- the cut ----

    def cut(self, sizes: Sequence[int]) -> list[Any]:
        """Slices of the batch, each of its own type.

        Args:
            sizes: Positive numbers of rows, whose sum is that of the batch.

        Raises:
            UncuttableBatch: something stands in the way, or a library refuses; names all of it.
            SliceError: the slicer of a registered class returned something else than a batch for each size.
        """
        self.check()
        return list(self._cut(self.batch, "", list(sizes)))

    def _cut(self, node: Any, path: str, sizes: list[int]) -> Sequence[Any]:
        if self._dim(path) == -1 or is_value(node):
            return [node for _ in sizes]
        slicer = slicer_of(node)
        if slicer is not None or is_array(node):
            return self._cut_input(slicer, Input(path, node), sizes)
        if path in self.row_lists:
            # A deque has no slices.
            items = list(node)
            return [rebuild_sequence(node, items[start:stop]) for start, stop in spans(sizes)]
        children = children_of(node)
        if children is None:
            return [node for _ in sizes]
        columns = [self._cut(child, join_path(path, name), sizes) for name, child in children]
        parts = []
        for index, (start, stop) in enumerate(spans(sizes)):
            parts.append(self._rebuilt(Input(path, node), [column[index] for column in columns], start, stop))
        return parts

    def _rebuilt(self, found: Input, children: list[Any], start: int, stop: int) -> Any:
        try:
            return with_encodings(found.node, rebuild(found.node, children), start, stop)
        except Exception as error:
            raise _failure(self, found, error) from error

    def _cut_input(self, slicer: Any, found: Input, sizes: list[int]) -> list[Any]:
        # Errors of a user's slicer are the user's to see. What a library refuses is only a batch
        # that cannot be cut.
        if slicer is not None and is_registered(found.node):
            name = f"the slicer of {type(found.node).__name__}"
            return call_slicer(name, slicer.cut, found.node, sizes)
        try:
            if slicer is not None:
                return list(slicer.cut(found.node, sizes))
            return cut_array(found.node, sizes, self._dim(found.path))
        except Exception as error:
            raise _failure(self, found, error) from error


def call_slicer(name: str, cut: Any, batch: Any, sizes: Sequence[int]) -> list[Any]:
    """What a user's slicer makes of a batch.

    Raises:
        SliceError: something else than one batch for each size.
        BaseException: what the slicer raises, with a note.
    """
    try:
        parts = cut(batch, list(sizes))
    except BaseException as error:
        error.add_note(f"In {name}, for a {type(batch).__name__} and sizes {list(sizes)}.")
        raise
    if not isinstance(parts, list | tuple) or len(parts) != len(sizes):
        given = f"{len(parts)} batches" if isinstance(parts, list | tuple) else f"a {type(parts).__name__}"
        raise SliceError(f"{name} returned {given} for sizes {list(sizes)}; return a list of {len(sizes)} batches.")
    return list(parts)


def _is_list_of_alike_values(node: Any) -> bool:
    return is_list_of_values(node) and len({type(item) for item in node}) == 1


def _are_of_many_kinds(node: Any) -> bool:
    """Whether the items of a list are inputs for certain: no two rows of a batch are of different kinds."""
    arrays = {(getattr(item, "dtype", None), len(shape_of(item))) for item in node if is_array(item)}
    containers = {type(item) for item in node if not is_array(item) and not is_value(item)}
    return len(arrays) > 1 or len(containers) > 1 or bool(arrays and containers)


def _complaint(reading: BatchReading, total: int | None, doubtful: list[Input]) -> UncuttableBatch:
    """All that stands in the way, and what to do about it."""
    reasons: list[str] = []
    kinds: list[tuple[str, ...]] = []
    odd = [found for found, _ in reading.opaque]
    by_rows: dict[int | None, list[Input]] = {}
    for found in reading.counted:
        by_rows.setdefault(found.num_rows, []).append(found)
    if len(by_rows) > 1 or (total is not None and any(rows != total for rows in by_rows)):
        sentences = [f"{some_of(list(map(str, inputs)), MOST_NAMED)}: {rows}" for rows, inputs in by_rows.items()]
        reasons.append(f"Its inputs do not agree on the number of rows: {'; '.join(sentences)}.")
        # The inputs at fault are those that differ from the most.
        usual = total if total is not None else max(by_rows, key=lambda rows: len(by_rows[rows]))
        for rows, inputs in by_rows.items():
            if rows != usual:
                odd += inputs
        kinds += [("sizes", found.path) for found in reading.counted]
    for found, why in reading.opaque:
        because = f": {why}" if why else ""
        reasons.append(f"{found} cannot be cut{because}.")
        kinds.append(("opaque", found.path, type(found.node).__name__))
    # Without any rows nothing could be decided about them.
    unread = reading.lists if total is None and not reading.counted else []
    # Rows rather than columns, unless it is one tensor for all rows beside others.
    ragged = [found for found in reading.columns if len(reading.sizes_inside(found)) > 1 and 1 not in by_rows]
    for found in [*doubtful, *unread]:
        reasons.append(f"{found} may hold one item per row, or columns that have all rows.")
        kinds.append(("list", found.path))
    if not reasons:
        reasons.append(f"Nothing in the batch ({type(reading.batch).__name__}) has a batch dim.")
        kinds.append(("nothing", type(reading.batch).__name__))
    # The kind, by which an announcement is made once, has no numbers in it: they differ from batch to batch.
    general = sorted({re.sub(r"\b\d+\b", "*", str(kind)) for kind in kinds})
    return UncuttableBatch(_shortened(reasons), _advice(reading, odd, [*doubtful, *unread, *ragged]), general)


def _advice(reading: BatchReading, odd: list[Input], lists: list[Input]) -> str:
    sentences: list[str] = []
    for found in lists:
        sentences += _advice_on_list(reading, found)
    # With all inputs replicated nothing would be cut: that is no advice.
    named = [found.path for found in odd if found.path][:MOST_NAMED]
    rest = [found for found in reading.counted if found.path not in named]
    if named and rest:
        whole = _dims(reading, named, -1)
        sentences.append(
            f"What belongs to all rows alike (a table, a setting) is given whole to every replica by {whole}."
        )
    sentences.append(
        "What holds something of each row is cut by lightning_dpx.register_slicer(type, slicer), "
        "DPXStrategy(batch_slicer=...) or a method slice_batch(self, batch, sizes) of the module."
    )
    return " ".join(sentences)


def _advice_on_list(reading: BatchReading, found: Input) -> list[str]:
    """How to say what a list is; first what it is most likely to be."""
    name = found.path or "the batch"
    items = list(found.node)
    # A line that names hundreds of columns would help nobody.
    if len(items) > MOST_NAMED:
        return [f"If {name} has one item per row, say so by {_dims(reading, [found.path], 0)}."]
    sentences = []
    if len(reading.sizes_inside(found)) == 1:
        columns = _dims(reading, _array_paths(found.node, found.path), 0)
        sentences.append(f"If the items of {name} are columns, say so by {columns}.")
    alike = all(is_sequence(item) and not _are_of_many_kinds(item) for item in items)
    if alike and len(set(map(len, items))) == 1:
        lists = _dims(reading, [join_path(found.path, str(index)) for index in range(len(items))], 0)
        sentences.append(f"If the items of {name} are lists with one item per row, say so by {lists}.")
    else:
        sentences.append(f"If {name} has one item per row, say so by {_dims(reading, [found.path], 0)}.")
    return sentences


def _dims(reading: BatchReading, paths: list[str], dim: int) -> str:
    """``batch_dim`` as it must be given then: with all that was given before."""
    before = reading.batch_dim
    # One dim for all inputs has to be named for each, as soon as one of them has another.
    dims: dict[str, int] = {}
    if not isinstance(before, int):
        dims.update(before)
    elif before != 0:
        for found in reading.counted:
            if found.path:
                dims[found.path] = before
    dims.update(dict.fromkeys(paths, dim))
    return f"batch_dim={dims!r}"


def _array_paths(node: Any, path: str) -> list[str]:
    """The paths of the arrays below ``node``, and of what else has rows there."""
    if is_value(node):
        return []
    children = None if is_array(node) or slicer_of(node) is not None else children_of(node)
    if children is None or is_list_of_values(node):
        return [path]
    paths: list[str] = []
    for name, child in children:
        paths += _array_paths(child, join_path(path, name))
    return paths


def _failure(reading: BatchReading, found: Input, error: Exception) -> UncuttableBatch:
    why = f"{found} cannot be cut ({type(error).__name__}: {error})."
    kind = "failure", re.sub(r"\b\d+\b", "*", found.path), type(found.node).__name__, type(error).__name__
    return UncuttableBatch(why, _advice(reading, [found], []), kind)


def _shortened(reasons: Sequence[str]) -> str:
    more = len(reasons) - MOST_NAMED
    return " ".join(reasons[:MOST_NAMED]) + (f" And {more} inputs more." if more > 0 else "")


def check_paths(batch: Any, batch_dim: BatchDim) -> None:
    """Whether every path that ``batch_dim`` names is there; the batch itself, where it is a list, is ``""``.

    Raises:
        SliceError: one is not; names those that are.
    """
    if not isinstance(batch_dim, Mapping):
        return
    known = list(named_nodes(batch))
    unknown = set(batch_dim) - {*known, ""}
    if unknown:
        names = ", ".join(map(repr, known)) or "no inputs"
        raise SliceError(f"batch_dim names {', '.join(map(repr, sorted(unknown)))}; the batch has {names}.")
