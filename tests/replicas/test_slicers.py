"""Types of PyTorch, of Python and of other libraries, cut by rows: whatever they know of the rows stays with these."""

import copy
import dataclasses
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
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
from tests.replicas.same_batch import assert_same


def halves(batch: Any, first: int, **options: Any) -> list[Any]:
    return slice_batch(batch, [first, batch_size(batch, **options) - first], **options)


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


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|Sparse CSC|nested tensors).*:UserWarning")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
def test_sparse_tensors_are_cut_by_rows(layout: str) -> None:
    dense = torch.tensor([[0.0, 1, 0], [0, 0, 0], [2, 0, 3], [0, 4, 0]])
    parts = halves((dense.to_sparse(layout=getattr(torch, layout)), torch.arange(4)), 1)
    assert {part.layout for part, _ in parts} == {getattr(torch, layout)}
    assert torch.equal(torch.cat([part.to_dense() for part, _ in parts]), dense)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("kind", ["jagged", "transposed", "strided"])
def test_nested_tensors_are_cut_by_rows(kind: str) -> None:
    rows = [torch.rand(length, 2) for length in (2, 1, 4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.strided if kind == "strided" else torch.jagged)
    nested = nested.transpose(1, 2) if kind == "transposed" else nested
    found = [row for part, _ in halves((nested, torch.arange(4)), 3) for row in part.unbind()]
    assert_same(found, [row.t() for row in rows] if kind == "transposed" else rows)


def test_jagged_tensors_of_equal_lengths_still_fit_together() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(5, 2), torch.ones(1, 2)], layout=torch.jagged)
    for first, second, _ in halves((nested, nested * 2, torch.arange(3)), 2):
        assert torch.equal((first + second).values(), torch.full_like(first.values(), 3.0))


def test_a_slice_of_a_tensor_keeps_its_attributes_and_may_be_written() -> None:
    rows = torch.rand(4, 2)
    rows.unit = "mm"
    weight = torch.ones(2, requires_grad=True)
    first, second = halves({"rows": rows}, 2)
    assert first["rows"].unit == second["rows"].unit == "mm"
    product = (first["rows"] * weight).sum()
    second["rows"].zero_()
    product.backward()
    assert not rows[2:].any()


class Tagged(torch.Tensor):
    """A subclass that loses nothing but its attributes in operations."""


class Unwrapping(torch.Tensor):
    """A subclass whose operations return plain tensors, as those of torchvision do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Tagged, Unwrapping])
def test_a_tensor_subclass_keeps_class_and_attributes_along_any_dim(kind: type[torch.Tensor]) -> None:
    tagged = torch.arange(8).view(2, 4).as_subclass(kind)
    tagged.tag = "t"
    for dim, expected in ((0, [[4, 5, 6, 7]]), (1, [[3], [7]])):
        part = halves(tagged, -1 + tagged.shape[dim], batch_dim=dim)[1]
        assert (type(part), part.tag, part.tolist()) == (kind, "t", expected)


def test_boxes_of_torchvision_keep_their_format() -> None:
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    boxes = tv_tensors.BoundingBoxes(torch.rand(4, 4), format="XYWH", canvas_size=(9, 7))
    image = tv_tensors.Image(torch.rand(4, 3, 5, 5))
    for part, pixels in halves((boxes, image), 1):
        assert (type(part), part.format, part.canvas_size) == (type(boxes), boxes.format, (9, 7))
        assert type(pixels) is tv_tensors.Image
    assert torch.equal(torch.cat([part for part, _ in halves((boxes, image), 1)]), boxes)


@pytest.mark.filterwarnings("ignore")
def test_meta_tensors_of_monai_keep_the_meta_data_of_their_rows() -> None:
    data = pytest.importorskip("monai.data")
    samples = [data.MetaTensor(torch.full((1, 4), float(row)), meta={"filename": f"f{row}"}) for row in range(4)]
    for row, sample in enumerate(samples):
        sample.push_applied_operation({"class": "Flip", "row": row})
    batch = data.list_data_collate(samples)
    parts = halves({"image": batch, "label": torch.arange(4)}, 1)
    expected = [batch[:1], batch[1:]]  # as the library itself does
    for part, theirs in zip((part["image"] for part in parts), expected, strict=True):
        assert (type(part), part.is_batch) == (data.MetaTensor, True)
        assert part.meta["filename"] == theirs.meta["filename"]
        assert [done[0]["row"] for done in part.applied_operations] == [
            done[0]["row"] for done in theirs.applied_operations
        ]
        assert torch.equal(part.as_tensor(), theirs.as_tensor())


def test_tensordicts_are_cut_by_their_own_batch_size() -> None:
    tensordict = pytest.importorskip("tensordict")
    td = tensordict.TensorDict({"a": torch.rand(4, 3), "n": {"b": torch.arange(4)}}, batch_size=[4])
    parts = [part["td"] for part in halves({"td": td, "y": torch.arange(4)}, 3)]
    assert [part.batch_size for part in parts] == [torch.Size([3]), torch.Size([1])]
    assert bool((torch.cat(parts) == td).all())
    unsized = tensordict.TensorDict({"a": torch.rand(4, 3)}, batch_size=[])
    assert [(type(part), len(part["a"])) for part in halves(unsized, 3)] == [(type(td), 3), (type(td), 1)]


def test_arrays_are_cut_along_the_batch_dim() -> None:
    array = np.arange(12).reshape(3, 4)
    parts = halves({"x": array, "y": torch.ones(2, 4)}, 1, batch_dim=1)
    np.testing.assert_array_equal(np.concatenate([part["x"] for part in parts], 1), array)


# ---- containers ----


@dataclasses.dataclass(slots=True)
class Slotted:
    rows: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.rows.sum(1)


@dataclasses.dataclass(frozen=True)
class Frozen:
    rows: torch.Tensor
    unset: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", self.rows + 1)  # no field, but with rows all the same


class Demanding(dict[str, Any]):
    """Its constructor wants something else."""

    def __init__(self, owner: object) -> None:
        super().__init__()
        self.owner = owner

    def update(self, *_: object, **__: object) -> None:
        raise TypeError("not allowed")


class Own(MutableMapping[str, Any]):
    """Keeps its items in a dict of its own, which a shallow copy shares."""

    def __init__(self, items: Mapping[str, Any] = types.MappingProxyType({})) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Names(list[str]):
    """A list that came from somewhere."""

    def __init__(self, source: str, items: list[str]) -> None:
        super().__init__(items)
        self.source = source


Pair = namedtuple("Pair", "image label")
ROWS = torch.arange(10.0).view(5, 2)


def demanding() -> Demanding:
    made = Demanding("me")
    made["x"] = ROWS
    return made


def default() -> defaultdict[str, Any]:
    made = defaultdict(list)
    made["x"] = ROWS
    return made


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "ordered": (lambda: OrderedDict(y=ROWS, x=ROWS), lambda b: [b["x"], b["y"], list(b)]),
    "default": (default, lambda b: [b["x"], b.default_factory()]),
    "counter": (lambda: Counter(x=ROWS), lambda b: [b["x"]]),
    "user dict": (lambda: UserDict(x=ROWS), lambda b: [b["x"]]),
    "proxy": (lambda: types.MappingProxyType({"x": ROWS}), lambda b: [b["x"]]),
    "demanding": (demanding, lambda b: [b["x"], b.owner]),
    "own": (lambda: Own({"x": ROWS}), lambda b: [b["x"]]),
    "slotted": (lambda: Slotted(ROWS), lambda b: [b.rows, b.total]),
    "frozen": (lambda: Frozen(ROWS), lambda b: [b.rows, b.extra]),
    "named tuple": (lambda: Pair(ROWS, ROWS), list),
    "result": (lambda: ROWS.max(1), list),
    "names": (lambda: {"x": ROWS, "n": Names("here", list("abcde"))}, lambda b: [b["x"], list(b["n"]), b["n"].source]),
    "user list": (lambda: {"x": ROWS, "n": UserList("abcde")}, lambda b: [b["x"], list(b["n"])]),
    "deque": (lambda: {"x": ROWS, "n": deque("abcde", 5)}, lambda b: [b["x"], list(b["n"]), b["n"].maxlen]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_rebuilt_as_its_own_type_and_the_batch_stays_as_it_was(name: str) -> None:
    make, look = CONTAINERS[name]
    batch, untouched = make(), copy.deepcopy(look(make()))
    parts = halves(batch, 3)
    assert {type(part) for part in parts} == {type(batch)}
    assert_same(look(batch), untouched)
    for seen, first, second in zip(look(batch), *map(look, parts), strict=True):
        if isinstance(seen, torch.Tensor):
            assert torch.equal(torch.cat([first, second]), seen)
        elif isinstance(seen, list) and len(seen) == 5:
            assert [*first, *second] == seen
        else:
            assert first == second == seen


def test_attrs_objects_are_rebuilt() -> None:
    attrs = pytest.importorskip("attrs")

    @attrs.frozen
    class Sample:
        rows: torch.Tensor
        name: str = "n"

    first, second = halves(Sample(ROWS), 3)
    assert (type(first), first.name, second.rows.tolist()) == (Sample, "n", ROWS[3:].tolist())


def test_outputs_and_encodings_of_transformers_are_rebuilt() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import BatchEncoding, PreTrainedTokenizerFast

    logits = outputs.SequenceClassifierOutput(logits=ROWS, hidden_states=(ROWS, ROWS + 1))
    first, second = halves(logits, 3)
    assert (type(second), list(second)) == (type(logits), ["logits", "hidden_states"])
    assert torch.equal(second.hidden_states[1], ROWS[3:] + 1)
    assert torch.equal(first["logits"], first.logits)

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[UNK]")
    batch = tokenizer(["a", "a b", "b b a"], padding=True, return_tensors="pt")
    parts = halves({"text": batch, "label": torch.arange(3)}, 2)
    assert all(type(part["text"]) is BatchEncoding and part["text"].is_fast for part in parts)
    assert parts[1]["text"].tokens(0) == batch.tokens(2)
    assert torch.equal(torch.cat([part["text"]["input_ids"] for part in parts]), batch["input_ids"])


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
    before = dict(slicers._registered)
    yield
    slicers._registered.clear()
    slicers._registered.update(before)
    slicers._found.clear()


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
