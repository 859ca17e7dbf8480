"""Containers are rebuilt as their own types, with everything but rows as it was."""

import copy
import dataclasses
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.containers import children_of, map_leaves, map_result, map_tensors, members_of
from tests.replicas.same_batch import assert_same, halves


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


def test_tensors_are_mapped_in_containers_of_any_kind() -> None:
    batch = {"a": [torch.ones(2), "text"], "b": (torch.ones(1), None)}
    mapped = map_tensors(lambda tensor: tuple(tensor.shape), batch)
    assert mapped == {"a": [(2,), "text"], "b": ((1,), None)}
    assert map_leaves(type, {"a": "text", "b": 3}) == {"a": str, "b": int}


class Cache:
    """A plain Python object, as libraries return for what they keep between calls."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.layers = [keys]
        self.length = 2


class Slots:
    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys = torch.ones(1)


class Reduced(Cache):
    def __reduce__(self) -> Any:
        return Cache, (self.layers[0],)


def test_members_of_a_plain_object_are_its_attributes_and_it_is_no_container_of_a_batch() -> None:
    cache = Cache(torch.ones(2, 3))
    assert members_of(cache) == [("layers", cache.layers), ("length", 2)]
    assert members_of({"a": 1}) == [("a", 1)]
    assert children_of(cache) is None


def test_objects_that_are_more_than_their_attributes_have_no_members() -> None:
    circle = Cache(torch.ones(1))
    circle.layers.append(circle)
    others = (torch.Generator(), Slots(), Reduced(torch.ones(1)), nn.Linear(1, 1), Cache, len, iter([1]), object())
    for value in (circle, *others):
        assert members_of(value) is None, value


def test_tensors_of_a_result_are_mapped_in_plain_objects_too_and_these_stay_as_they_were() -> None:
    cache = Cache(torch.ones(2, 3, requires_grad=True) * 2)
    mapped = map_result(torch.Tensor.detach, {"cache": cache, "text": "a"})
    assert type(mapped["cache"]) is Cache
    assert mapped["cache"].length == 2
    assert not mapped["cache"].layers[0].requires_grad
    assert cache.layers[0].requires_grad
    assert map_tensors(torch.Tensor.detach, cache) is cache


def test_a_tensordict_that_is_made_anew_has_its_batch_dims() -> None:
    tensordict = pytest.importorskip("tensordict")
    td = tensordict.TensorDict({"a": torch.rand(4, 3), "n": {"b": torch.arange(4)}}, batch_size=[4], names=["rows"])
    made = map_tensors(torch.Tensor.double, td)
    assert type(made) is type(td)
    assert made["a"].dtype == torch.float64
    assert (made.batch_size, made.names) == (td.batch_size, td.names)
    # Of other rows nothing is known but what the tensors are.
    assert map_tensors(lambda tensor: tensor.sum(), td).batch_size == torch.Size([])


def test_a_tensordict_with_a_constructor_of_its_own_is_made_by_that() -> None:
    tensordict = pytest.importorskip("tensordict")

    class OfRows(tensordict.TensorDict):  # type: ignore[misc,name-defined]
        def __init__(self, source: Any) -> None:
            super().__init__(source, batch_size=[len(source["a"])])

    made = map_tensors(torch.Tensor.double, OfRows({"a": torch.rand(4, 3)}))
    assert (type(made), made.batch_size) == (OfRows, torch.Size([4]))
    words = tensordict.stack([tensordict.TensorDict({"a": torch.ones(2), "word": f"{row}"}, []) for row in range(3)])
    assert map_tensors(torch.Tensor.double, words)["a"].shape == (3, 2)
