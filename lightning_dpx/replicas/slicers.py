"""How objects that are neither arrays nor containers are cut by rows: an extension point, and the built-in slicers.

Libraries are recognized by the names of their classes and used as they were imported where the batch was made; none
is imported here.
"""

import sys
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_dpx.errors import ConfigurationError, SliceError
from lightning_dpx.replicas.array_slices import spans

SliceFunction = Callable[[Any, Sequence[int]], Sequence[Any]]


class Slicer:
    """Says how many rows a batch, or one input of it, has, and cuts it by rows.

    Examples:
        >>> class Molecules:
        ...     def __init__(self, molecules):
        ...         self.molecules = molecules
        >>> class MoleculeSlicer(dpx.Slicer):
        ...     def num_rows(self, batch):
        ...         return len(batch.molecules)
        ...     def cut(self, batch, sizes):
        ...         ends = itertools.accumulate(sizes)
        ...         return [Molecules(batch.molecules[end - size : end]) for end, size in zip(ends, sizes)]
        >>> dpx.register_slicer(Molecules, MoleculeSlicer())

    The class of an input may be registered with :func:`register_slicer`, so that it is cut wherever it occurs in a
    batch; a slicer of whole batches is given as ``DPXStrategy(batch_slicer=...)``.
    """

    def num_rows(self, batch: Any) -> int | None:
        """The rows of ``batch``; ``None`` if this one cannot be cut, so that it goes whole to the first replica."""
        raise NotImplementedError(f"{type(self).__name__} must define num_rows(batch).")

    def cut(self, batch: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """K batches, in the order of the rows.

        Args:
            batch: What :meth:`num_rows` counted.
            sizes: K positive numbers of rows, whose sum is that of ``batch``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define cut(batch, sizes).")

    def join(self, parts: Sequence[Any]) -> Any:
        """The inverse of :meth:`cut`, for what a step returns.

        Raises:
            SliceError: this slicer does not join.
        """
        raise SliceError(f"{type(self).__name__} cannot join what the replicas returned; define join(parts).")


class FunctionSlicer(Slicer):
    """A function ``(batch, sizes) -> K batches``: the rows are counted in what is beside it, or are its length."""

    def __init__(self, cut: SliceFunction) -> None:
        self._cut = cut

    def num_rows(self, batch: Any) -> int | None:
        """The batch's length, where it has one."""
        if hasattr(type(batch), "__len__"):
            return len(batch)
        return None

    def cut(self, batch: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """What the function makes of the batch."""
        return self._cut(batch, sizes)


_ENCODING = "transformers.tokenization_utils_base.BatchEncoding"
# Of the process, as classes are; what has been looked up is forgotten when it changes.
REGISTERED: dict[type, Slicer] = {}
_found: WeakKeyDictionary[type, list[Slicer]] = WeakKeyDictionary()  # by class: one slicer or none


def register_slicer(kind: type, slicer: Slicer | SliceFunction) -> None:
    """From now on objects of class ``kind``, also of classes made from it, are cut by ``slicer``.

    Of several registered classes the most specific one counts; every one goes before what is built in.

    Args:
        kind: The class of a batch or of an input.
        slicer: A :class:`Slicer`, or a function ``(batch, sizes) -> K batches``. With a function the rows are counted
            in the tensors beside the object; where there are none, they are ``len(batch)``.

    Raises:
        ConfigurationError: ``kind`` is no class, or ``slicer`` is neither of these.

    Examples:
        >>> class Sentences(list):
        ...     '''One text per row.'''
        >>> def cut(batch, sizes):
        ...     rows = iter(batch)
        ...     return [Sentences(next(rows) for _ in range(size)) for size in sizes]
        >>> dpx.register_slicer(Sentences, cut)
    """
    if not isinstance(kind, type):
        raise ConfigurationError(f"register_slicer({kind!r}, ...) is not allowed; give a class.")
    REGISTERED[kind] = make_slicer(f"The slicer of {kind.__name__}", slicer)
    _found.clear()


def unregister_slicer(kind: type) -> None:
    """Objects of ``kind`` are cut as if :func:`register_slicer` had not been called for it."""
    REGISTERED.pop(kind, None)
    _found.clear()


def make_slicer(name: str, slicer: Any) -> Slicer:
    """The slicer that was given, or one that calls the function that was given.

    Raises:
        ConfigurationError: it is neither.
    """
    if isinstance(slicer, type) and issubclass(slicer, Slicer):
        return slicer()
    if isinstance(slicer, Slicer):
        return slicer
    if callable(slicer) and not isinstance(slicer, type):
        return FunctionSlicer(slicer)
    raise ConfigurationError(
        f"{name} is {slicer!r}, which is not allowed; give a lightning_dpx.Slicer or a function (batch, sizes) -> K "
        "batches."
    )


def any_is_registered(*kinds: type) -> bool:
    """Whether a user has registered a slicer for one of these classes, or for a class that one is derived from."""
    return bool(REGISTERED) and any(base in REGISTERED for kind in kinds for base in kind.__mro__)


def slicer_of(node: Any) -> Slicer | None:
    """What cuts ``node``, if it is of a registered class or of one that is built in."""
    kind = type(node)
    slicers = _found.get(kind)
    if slicers is None:
        # In the order of inheritance, so the most specific class comes first.
        registered = [REGISTERED[base] for base in kind.__mro__ if base in REGISTERED]
        built_in = [slicer for name, slicer in _BUILT_IN.items() if name in map(_full_name, kind.__mro__)]
        # Also that there is none is remembered.
        slicers = _found[kind] = [*registered, *built_in][:1]
    if slicers:
        return slicers[0]
    return None


def with_encodings(node: Any, part: Any, start: int, stop: int) -> Any:
    """A slice of what a tokenizer of transformers returned, with the record of how its own texts became tokens.

    Raises:
        SliceError: the record is not one per row.
    """
    if not isinstance(node, UserDict) or _ENCODING not in map(_full_name, type(node).__mro__):
        return part
    encodings = node.encodings  # type: ignore[attr-defined]
    # Tokenizers written in Python keep no record of their own.
    if not encodings:
        return part
    if len(encodings) < stop:
        raise SliceError(f"{type(node).__name__} has {len(encodings)} encodings, which is not one per row")
    return type(node)(dict(part), encoding=encodings[start:stop], n_sequences=node.n_sequences)  # type: ignore


def is_registered(node: Any) -> bool:
    """Whether a slicer was registered for ``node``'s class, so that errors in it are its author's."""
    return any_is_registered(type(node))


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _PackedSlicer(Slicer):
    """Cuts packed sequences by sequence, in the order in which they were given to be packed."""

    def num_rows(self, batch: PackedSequence) -> int:
        return int(batch.batch_sizes[0])

    def cut(self, batch: PackedSequence, sizes: Sequence[int]) -> list[PackedSequence]:
        rows = unpack_sequence(batch)
        # Without the indices the rows came sorted, and slices of sorted rows are sorted as well.
        is_sorted = batch.sorted_indices is None
        return [pack_sequence(rows[start:stop], enforce_sorted=is_sorted) for start, stop in spans(sizes)]

    def join(self, parts: Sequence[PackedSequence]) -> PackedSequence:
        rows: list[torch.Tensor] = []
        for part in parts:
            rows += unpack_sequence(part)
        # Each part is sorted for itself: the rows of all may no longer be, and then the order has to be kept aside.
        lengths = [len(row) for row in rows]
        is_sorted = parts[0].sorted_indices is None and lengths == sorted(lengths, reverse=True)
        return pack_sequence(rows, enforce_sorted=is_sorted)


class _GraphSlicer(Slicer):
    """Cuts batches of PyTorch Geometric, homogeneous or not, by graph."""

    def num_rows(self, batch: Any) -> int:
        return int(batch.num_graphs)

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        batches = sys.modules["torch_geometric.data"].Batch
        # ``follow_batch`` of the loader is kept nowhere; the keys that it has added tell.
        keys = set(batch.keys())
        followed = [key for key in batch.keys() if {f"{key}_batch", f"{key}_ptr"} <= keys]  # noqa: SIM118
        graphs = batch.index_select(slice(None))
        parts = [batches.from_data_list(graphs[a:b], follow_batch=followed) for a, b in spans(sizes)]
        # Graphs that were taken apart and batched again have lost what was set on the batch alone.
        self._check(batch, parts)
        return parts

    def join(self, parts: Sequence[Any]) -> Any:
        graphs: list[Any] = []
        for part in parts:
            graphs += part.index_select(slice(None))
        return sys.modules["torch_geometric.data"].Batch.from_data_list(graphs)

    def _check(self, batch: Any, parts: Sequence[Any]) -> None:
        """What was set on a batch after it was made, or changed its size, belongs to none of its graphs."""
        for index, store in enumerate(batch.stores):
            for key, value in store.items():
                pieces = [part.stores[index].get(key) for part in parts]
                # Where each graph begins is counted anew in every part, with one entry more than
                # graphs.
                same = isinstance(value, torch.Tensor) and not key.endswith("ptr")
                if any(piece is None for piece in pieces):
                    raise SliceError(f"{key!r} was set on the batch of graphs itself, so no graph has a part of it")
                if same and sum(piece.numel() for piece in pieces) != value.numel():
                    raise SliceError(f"{key!r} has changed its size since the graphs were batched")


class _DeepGraphSlicer(Slicer):
    """Cuts batches of DGL by graph."""

    def num_rows(self, batch: Any) -> int:
        return int(batch.batch_size)

    def cut(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        dgl = sys.modules["dgl"]
        graphs = dgl.unbatch(batch)
        return [dgl.batch(graphs[start:stop]) for start, stop in spans(sizes)]

    def join(self, parts: Sequence[Any]) -> Any:
        dgl = sys.modules["dgl"]
        graphs: list[Any] = []
        for part in parts:
            graphs += dgl.unbatch(part)
        return dgl.batch(graphs)


_BUILT_IN: dict[str, Slicer] = {
    "torch.nn.utils.rnn.PackedSequence": _PackedSlicer(),
    "torch_geometric.data.batch.Batch": _GraphSlicer(),
    "dgl.heterograph.DGLGraph": _DeepGraphSlicer(),
    "dgl.heterograph.DGLHeteroGraph": _DeepGraphSlicer(),  # before version 1
}
