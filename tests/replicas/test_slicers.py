"""Types of PyTorch, of Python and of other libraries, cut by rows: whatever they know of the rows stays with these."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

import lightning_dpx as dpx
from lightning_dpx.replicas import gather, slicers
from lightning_dpx.replicas.slicing import UncuttableBatch, batch_size, slice_batch, user_slicer
from tests.replicas.same_batch import assert_same, halves

# ---- tensors ----


@pytest.mark.parametrize("is_sorted", [True, False])
def test_packed_sequences_are_cut_by_sequence(is_sorted: bool) -> None:
    lengths = [5, 3, 3, 1] if is_sorted else [2, 5, 1, 3]
    rows = [torch.full((length, 2), float(row)) for row, length in enumerate(lengths)]
    parts = halves({"x": pack_sequence(rows, enforce_sorted=is_sorted), "y": torch.arange(4)}, 3)
    assert [part["x"].sorted_indices is None for part in parts] == [is_sorted] * 2
    found = [row for part in parts for row in unpack_sequence(part["x"])]
    assert_same(found, rows)
    joined = slicers.slicer_of(parts[0]["x"]).join([part["x"] for part in parts])
    assert_same(joined, pack_sequence(rows, enforce_sorted=is_sorted))


# ---- graphs ----


def graphs(data: Any, count: int = 4) -> list[Any]:
    edges = torch.tensor([[0, 1], [1, 0]])
    return [
        data.Data(x=torch.rand(row + 2, 3), edge_index=edges, y=torch.tensor([float(row)]), name=f"g{row}")
        for row in range(count)
    ]


def test_batches_of_graphs_are_cut_by_graph() -> None:
    data = pytest.importorskip("torch_geometric.data")
    samples = graphs(data)
    batch = data.Batch.from_data_list(samples, follow_batch=["x"])
    parts = [graph for graph, _ in halves((batch, torch.arange(4)), 3)]
    assert [part.num_graphs for part in parts] == [3, 1]
    assert [name for part in parts for name in part.name] == ["g0", "g1", "g2", "g3"]
    assert all(sorted(part.keys()) == sorted(batch.keys()) for part in parts)
    joined = slicers.slicer_of(batch).join(parts)
    for key in ("x", "edge_index", "y", "batch", "ptr"):
        assert torch.equal(joined[key], batch[key]), key


def test_heterogeneous_graphs_are_cut_by_graph() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graph = data.HeteroData()
    graph["a"].x, graph["b"].x = torch.rand(3, 2), torch.rand(2, 2)
    graph["a", "to", "b"].edge_index = torch.tensor([[0, 2], [1, 0]])
    parts = halves(data.Batch.from_data_list([graph] * 3), 2)
    assert [part.num_graphs for part in parts] == [2, 1]
    assert torch.equal(parts[1]["a"].x, graph["a"].x)
    assert torch.equal(parts[1]["a", "to", "b"].edge_index, graph["a", "to", "b"].edge_index)


def test_graphs_that_belong_to_no_row_are_not_cut() -> None:
    data = pytest.importorskip("torch_geometric.data")
    with pytest.raises(UncuttableBatch, match=r"the batch \(Data\) cannot be cut"):
        batch_size(graphs(data)[0])  # one large graph, as a NeighborLoader gives
    with pytest.raises(UncuttableBatch, match="cannot be cut: "):
        batch_size(data.Batch(x=torch.rand(3, 2)))  # made by hand
    changed = data.Batch.from_data_list(graphs(data))
    changed.late = torch.rand(4)
    with pytest.raises(UncuttableBatch, match="'late' was set on the batch of graphs itself"):
        halves(changed, 2)
    rewired = data.Batch.from_data_list(graphs(data))
    rewired.edge_index = torch.cat([rewired.edge_index, rewired.edge_index], 1)
    with pytest.raises(UncuttableBatch, match="'edge_index' has changed its size"):
        halves(rewired, 2)


# ---- the extension point ----


class Molecules:
    """Atoms of several molecules."""

    def __init__(self, atoms: list[str]) -> None:
        self.atoms = atoms

    def __len__(self) -> int:
        return len(self.atoms)


class Salts(Molecules):
    pass


class MoleculeSlicer(dpx.Slicer):
    def num_rows(self, batch: Molecules) -> int:
        return len(batch.atoms)

    def cut(self, batch: Molecules, sizes: Any) -> list[Molecules]:
        atoms = iter(batch.atoms)
        return [type(batch)([next(atoms) for _ in range(size)]) for size in sizes]


@pytest.fixture
def registry() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    yield
    for kind in (Molecules, Salts, PackedSequence):
        slicers.unregister_slicer(kind)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("as_function", [True, False])
def test_a_registered_class_is_cut_wherever_it_occurs(as_function: bool, beside: bool) -> None:
    batch: Any = {"m": Salts(list("abcde")), **({"x": torch.arange(5)} if beside else {})}
    with pytest.raises(UncuttableBatch, match=r"m \(Salts\) cannot be cut"):
        batch_size(batch)
    dpx.register_slicer(Molecules, MoleculeSlicer().cut if as_function else MoleculeSlicer())
    first, second = halves(batch, 3)
    assert (type(second["m"]), first["m"].atoms, second["m"].atoms) == (Salts, list("abc"), list("de"))


@pytest.mark.parametrize("kind", [tuple, torch.Tensor])
@pytest.mark.parametrize("num_rows", [2, 6])
def test_what_is_registered_goes_before_the_usual_batch_of_tensors(kind: type, num_rows: int) -> None:
    dpx.register_slicer(kind, lambda batch, sizes: [("mine", size) for size in sizes])
    try:
        parts = slice_batch((torch.zeros(num_rows, 2), torch.zeros(num_rows)), [1, num_rows - 1])
    finally:
        slicers.unregister_slicer(kind)
    first = ("mine", 1)
    assert parts[0] == (first if kind is tuple else (first, first))


@pytest.mark.usefixtures("registry")
def test_the_most_specific_registered_class_counts_and_goes_before_what_is_built_in() -> None:
    dpx.register_slicer(Molecules, lambda batch, sizes: ["molecules"] * len(sizes))
    dpx.register_slicer(Salts, lambda batch, sizes: ["salts"] * len(sizes))
    dpx.register_slicer(PackedSequence, lambda batch, sizes: ["packed"] * len(sizes))
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {"x": torch.arange(2), "m": Molecules(["a"]), "s": Salts(["b"]), "p": packed}
    assert {key: part for key, part in halves(batch, 1)[0].items() if key != "x"} == {
        "m": "molecules", "s": "salts", "p": "packed",
    }  # fmt: skip


def raises(batch: Any, sizes: Any) -> Any:
    raise KeyError("atom")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("cut", "kind", "message"),
    [
        (lambda batch, sizes: [batch], dpx.SliceError, r"returned 1 batches for sizes \[3, 2\]; return a list of 2"),
        (lambda batch, sizes: None, dpx.SliceError, "returned a NoneType"),
        (raises, KeyError, "atom"),
    ],
)
def test_errors_of_a_slicer_are_errors_with_a_note(cut: Any, kind: type[Exception], message: str) -> None:
    dpx.register_slicer(Molecules, cut)
    with pytest.raises(kind, match=message) as caught:
        slice_batch(Molecules(list("abcde")), [3, 2])
    assert not isinstance(caught.value, UncuttableBatch)
    if kind is KeyError:
        assert "the slicer of Molecules, for a Molecules and sizes [3, 2]" in caught.value.__notes__[0]


@pytest.mark.parametrize(("kind", "slicer"), [("Molecules", len), (Molecules, 3), (Molecules, None)])
def test_what_is_no_slicer_is_refused(kind: Any, slicer: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match="is not allowed; give a"):
        dpx.register_slicer(kind, slicer)


def test_a_slicer_of_batches_goes_before_a_method_of_the_module() -> None:
    class Module(torch.nn.Module):
        def slice_batch(self, batch: Any, sizes: Any) -> list[Any]:
            return ["method"] * len(sizes)

    class Helper(torch.nn.Module):
        def slice_batch(self, batch: Any) -> Any:
            raise AssertionError("of another meaning")

    batch = torch.arange(4), torch.ones(7)
    given = user_slicer(lambda batch, sizes: ["argument"] * len(sizes), Module(), 0)
    assert (given.num_rows(batch), given.cut(batch, [3, 0, 1])) == (4, ["argument", None, "argument"])
    assert user_slicer(None, Module(), 0).cut(batch, [3, 1]) == ["method"] * 2
    assert user_slicer(None, Helper(), 0).slicer is None


def test_a_function_that_cuts_batches_is_told_the_rows_of_lists_as_well() -> None:
    slicer = user_slicer(lambda batch, sizes: sizes, torch.nn.Module(), 0)
    assert slicer.num_rows(([torch.ones(3, 4)] * 5, [{"boxes": torch.ones(2, 4)}] * 5)) == 5
    assert slicer.num_rows([(torch.ones(3), "a"), (torch.ones(2), "b")]) == 2
    assert slicer.num_rows(Molecules(list("abc"))) == 3
    with pytest.raises(UncuttableBatch, match="batch_slicer does not say how many rows a batch"):
        slicer.num_rows(3)


# ---- cut, then merged ----

Pair = namedtuple("Pair", "image label")
KEYS = st.sampled_from(["a", "b", "c"])


def leaves(rows: int) -> st.SearchStrategy[Any]:
    """Inputs with an item per row, which no chance makes equal."""
    counts = st.lists(st.integers(0, 3).filter(lambda count: count != rows), min_size=rows, max_size=rows)
    return st.one_of(
        st.lists(st.integers(1, 3), max_size=2).map(lambda shape: torch.rand(rows, *shape)),
        st.just(torch.arange(rows)),
        st.just([f"row {row}" for row in range(rows)]),
        st.just(tuple({"id": row} for row in range(rows))),
        st.just(np.arange(rows * 2).reshape(rows, 2)),
        st.just(torch.eye(rows, 3).to_sparse()),
        counts.map(lambda sizes: [torch.full((size, 4), float(row)) for row, size in enumerate(sizes)]),
        st.lists(st.integers(1, 4), min_size=rows, max_size=rows).map(
            lambda sizes: pack_sequence([torch.rand(size, 2) for size in sizes], enforce_sorted=False)
        ),
    )


def nested(rows: int) -> st.SearchStrategy[Any]:
    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(KEYS, inner, min_size=1, max_size=3),
            st.dictionaries(KEYS, inner, min_size=1, max_size=3).map(OrderedDict),
            st.dictionaries(KEYS, inner, min_size=1, max_size=3).map(UserDict),
            st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        )

    batch = st.recursive(leaves(rows), containers, max_leaves=5)
    return batch.map(lambda found: {"x": torch.arange(rows), "batch": found, "scale": 3.0, "name": "n", "none": None})


def merged(parts: list[Any]) -> Any:
    """The inverse of the cut, written without it."""
    first = parts[0]
    if isinstance(first, PackedSequence):
        return slicers.slicer_of(first).join(parts)
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, Mapping):
        return type(first)({key: merged([part[key] for part in parts]) for key in first})
    if isinstance(first, Pair):
        return Pair(*(merged(list(column)) for column in zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(item for part in parts for item in part)
    return first


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cut_then_merge_is_the_identity(data: st.DataObject) -> None:
    rows = data.draw(st.integers(4, 7))
    batch = data.draw(nested(rows))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1), min_size=1, max_size=2)))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, rows], strict=True)]
    assert batch_size(batch) == rows
    assert_same(merged(slice_batch(batch, sizes)), batch)


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 7), st.integers(1, 3), st.data())
def test_cut_then_gathered_is_the_identity_for_what_steps_return(rows: int, first: int, data: st.DataObject) -> None:
    tensors = st.lists(st.integers(1, 3), max_size=2).map(lambda shape: torch.rand(rows, *shape))
    outputs = st.dictionaries(KEYS, st.one_of(tensors, st.just([f"row {row}" for row in range(rows)])), min_size=1)
    output = {"x": torch.arange(rows), "out": data.draw(outputs)}
    sizes = [first, rows - first]
    assert_same(gather(slice_batch(output, sizes), sizes, torch.device("cpu")), output)
