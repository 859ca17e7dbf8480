"""Rules that reproduce what one device made of some rows do so for any other rows, too."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpx.replicas import MergeRules, Weights
from lightning_dpx.replicas.merging.by_type import gather
from lightning_dpx.replicas.merging.equality import compare_trees
from lightning_dpx.replicas.merging.rule_search import Finding, Search
from lightning_dpx.replicas.merging.rules import Rule
from lightning_dpx.replicas.merging.tolerance import Tolerance

CPU = torch.device("cpu")
EXACT = Tolerance.of(torch.float64, 1000)

# Functions of rows (n, 4) in float64, and whether they can be put together from slices.
LEAVES: dict[str, Any] = {
    "rows": lambda x: x,
    "columns": lambda x: x.T,
    "two views": lambda x: torch.cat([x, -x]),
    "mean": lambda x: x.mean(),
    "mean over rows": lambda x: x.mean(0),
    "sum": lambda x: x.sum(0),
    "gram": lambda x: x.T @ x,
    "count": lambda x: len(x),
    "float count": lambda x: float(len(x)),
    "large ones": lambda x: (x > -1).sum(0),
    "largest": lambda x: x.amax(0),
    "smallest": lambda x: x.amin(0),
    "root mean square": lambda x: x.square().mean(0).sqrt(),
    "constant matrix": lambda x: torch.arange(144.0).view(12, 12),
    "constant": lambda x: 3.5,
    "integer": lambda x: 7,
    "word": lambda x: "word",
    "nothing": lambda x: None,
    "array": lambda x: x.numpy(),
    "number of NumPy": lambda x: np.float64(x.mean().item()),
    "words": lambda x: [f"{value:.3f}" for value in x[:, 0].tolist()],
    "records": lambda x: [{"score": value, "size": 4} for value in x[:, 0]],
    "by sample": lambda x: {f"{value:.9f}": value for value in x[:, 0].tolist()},
    "seen": lambda x: {round(value, 9) for value in x[:, 0].tolist()},
}
outputs = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3) | st.tuples(inner, inner),
    max_leaves=5,
)


def build(shape: Any, rows: torch.Tensor) -> Any:
    """The nested output that ``shape`` names, of ``rows``."""
    if isinstance(shape, dict):
        return {key: build(inner, rows) for key, inner in shape.items()}
    if isinstance(shape, tuple):
        return tuple(build(inner, rows) for inner in shape)
    return LEAVES[shape](rows)


def cut(rows: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return list(torch.split_with_sizes(rows, list(sizes)))


def by_rows(sizes: tuple[int, ...]) -> Weights:
    return Weights(rows=sizes, of_loss=sizes)


def decided(shape: Any, sizes: tuple[int, ...], seed: int) -> dict[str, Finding]:
    rows = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    search = Search(weights=by_rows(sizes), tolerance=EXACT)
    found = search.examine(build(shape, rows), [build(shape, part) for part in cut(rows, sizes)], "result")
    return {one.path: one for one in found}


def assert_alike(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(two, torch.Tensor | np.ndarray | np.generic | float):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(two))
    elif isinstance(two, dict):
        assert one.keys() == two.keys()
        for key, value in two.items():
            assert_alike(one[key], value)
    elif isinstance(two, list | tuple):
        assert len(one) == len(two)
        for mine, theirs in zip(one, two, strict=True):
            assert_alike(mine, theirs)
    else:
        assert one == two


@settings(max_examples=60, deadline=None)
@given(shape=outputs, seed=st.integers(0, 2**20), sizes=st.sampled_from([(3, 2), (3, 2, 2), (17, 16), (4, 1)]))
def test_rules_found_on_some_rows_hold_for_others(shape: Any, seed: int, sizes: tuple[int, ...]) -> None:
    found = decided(shape, sizes, seed)
    assert all(one.rules for one in found.values()), found
    rules = MergeRules({path: one.rules[0] for path, one in found.items()})
    others = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    for later in ((8, 8), (5, 11), (4, 6, 6)):
        parts = [build(shape, part) for part in cut(others, later)]
        assert_alike(rules.merge_outputs(parts, by_rows(later), CPU), build(shape, others))


def test_numbers_that_fit_by_chance_are_not_sure() -> None:
    search = Search(weights=by_rows((3, 2)), tolerance=EXACT)
    (largest,) = search.examine(torch.tensor(5.0), [torch.tensor(5.0), torch.tensor(3.0)], "x")
    assert [rule.kind for rule in largest.rules] == ["max", "first"]
    assert not largest.is_sure
    (zero,) = search.examine(torch.tensor(0), [torch.tensor(0), torch.tensor(0)], "x")
    assert zero.rules[0].kind == "by type"
    assert not zero.is_sure
    (mean,) = search.examine(1.4, [1.0, 2.0], "x")
    assert mean.rules == (Rule(kind="mean"),)
    assert mean.is_sure


@pytest.mark.parametrize("count", [int, float, torch.tensor, lambda number: torch.tensor(number, dtype=torch.float32)])
def test_a_small_whole_number_that_adds_up_may_count_what_differs(count: Any) -> None:
    search = Search(weights=by_rows((3, 2)), tolerance=EXACT)
    (found,) = search.examine(count(5), [count(3), count(2)], "x")
    assert found.rules == (Rule(kind="sum"),)
    assert found.is_count
    (of_floats,) = search.examine(0.7, [0.5, 0.2], "x")
    assert not of_floats.is_count


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        (torch.eye(5), [torch.eye(3), torch.eye(2)]),
        ("5", ["3", "2"]),
        ([1, 2, 3], [[1, 2], [4]]),
        (torch.tensor(1.0), [torch.tensor(2.0), torch.tensor(4.0)]),
        (None, [1, 2]),
        ({"a": 1}, [{"b": 1}, {"c": 1}]),
        (np.array([["a", ""], ["b", ""], ["c", "d"]]), [np.array([["a"], ["b"]]), np.array([["c", "d"]])]),
        (np.array(["a", "b"]), [np.array(["a"]), np.array([["b", "c"]])]),
        (zip("ab", "cd", strict=True), [zip("a", "c", strict=True), zip("b", "d", strict=True)]),
    ],
)
def test_what_no_rule_reproduces_has_none(whole: Any, parts: list[Any]) -> None:
    (found,) = Search(weights=by_rows((3, 2)), tolerance=EXACT).examine(whole, parts, "x")
    assert not found.rules
    assert "on one device" in found.text


@pytest.mark.parametrize(
    ("whole", "parts", "text"),
    [
        (
            torch.arange(12.0).view(3, 4),
            [torch.zeros(2, 4), torch.zeros(1, 4)],
            "shape (3, 4) on one device; slices put together have that shape, and other numbers (largest relative "
            "difference 1)",
        ),
        (torch.tensor([7, 3]), [torch.tensor([4, 3]), torch.tensor([3, 2])], "[7, 3] on one device, [4, 3] and [3, 2]"),
        (torch.ones(3, 4), [torch.ones(2, 2), torch.ones(1, 2)], "shape (3, 4) on one device, shape (2, 2) and shape"),
    ],
)
def test_what_no_rule_reproduces_is_told_by_what_differs(whole: Any, parts: list[Any], text: str) -> None:
    [found] = Search(weights=by_rows((2, 1)), tolerance=EXACT).examine(whole, parts, "x")
    assert found.text.startswith(text)


KINDS_OF_NUMPY = ("float16", "longdouble", "clongdouble", "uint8", "uint16", "uint32", "uint64", "int64", ">i4", "bool")
KINDS_OF_TORCH = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16)


@pytest.mark.parametrize("numbers", [(5, 7, 9, 1), (5, 5, 5, 5), (0, 0, 0, 0)])
@pytest.mark.parametrize("dtype", [*KINDS_OF_NUMPY, *KINDS_OF_TORCH], ids=str)
def test_all_kinds_of_numbers_are_merged(dtype: Any, numbers: tuple[int, ...]) -> None:
    def made(values: Any) -> Any:
        of_torch = isinstance(dtype, torch.dtype)
        return torch.tensor(values).to(dtype) if of_torch else np.array(values).astype(dtype)

    whole, ones = made(numbers), made([1, 1, 0, 0])
    cases = [(whole, [whole[:3], whole[3:]]), (whole, [whole, whole])]
    if not isinstance(dtype, torch.dtype):
        cases.append((whole, [(whole - ones).astype(dtype), ones] if dtype != "bool" else [whole, ones]))
        cases.append((whole[0], [whole[0], whole[0]]))
    for expected, parts in cases:
        findings = Search(weights=by_rows((3, 1)), tolerance=EXACT).examine(expected, parts, "result")
        rules = MergeRules(outputs={found.path: found.rules[0] for found in findings if found.rules})
        merged = rules.merge_outputs(parts, by_rows((3, 1)), CPU)
        assert merged.dtype == expected.dtype
        gather(parts, [3, 1], CPU)
        if findings[0].rules and findings[0].rules[0].kind != "by type":
            assert np.array_equal(_plain(merged), _plain(expected))


def _plain(value: Any) -> Any:
    return value.double().numpy() if isinstance(value, torch.Tensor) else value


BIG = 2**70


@pytest.mark.parametrize(
    ("whole", "parts", "kind"),
    [
        (BIG, [BIG, BIG], "equal"),
        (2 * BIG + 1, [BIG, BIG + 1], "sum"),
        (BIG + 1, [BIG + 1, BIG], "max"),
        (BIG, [BIG + 1, BIG], "min"),
        (2**64, [2**63, 2**63], "sum"),
        pytest.param(10**400, [10**400, 10**400], "equal", id="no float either"),
        (BIG + 5, [BIG, BIG + 1], None),
        (2**64, [3, 2], None),
    ],
)
def test_integers_of_more_than_64_bits_are_merged_exactly(whole: int, parts: list[int], kind: str | None) -> None:
    (found,) = Search(weights=by_rows((3, 2)), tolerance=EXACT).examine(whole, parts, "result")
    if kind is None:
        assert not found.rules
        assert f"{whole} on one device" in found.text
        return
    assert found.rules[0].kind == kind
    assert MergeRules(outputs={"result": found.rules[0]}).merge_outputs(parts, by_rows((3, 2)), CPU) == whole
    ((_, error),) = compare_trees(whole, whole + 1, EXACT)
    assert error == math.inf


def test_a_mean_over_tokens_takes_the_weights_of_the_loss() -> None:
    weights = Weights(rows=(3, 2), of_loss=(1, 4))
    parts = [torch.tensor([2.0, 0.0]), torch.tensor([7.0, 5.0])]
    (found,) = Search(weights=weights, tolerance=EXACT).examine(torch.tensor([6.0, 4.0]), parts, "x")
    assert found.rules == (Rule(kind="loss mean"),)
    empty = Weights(rows=(3, 2), of_loss=(0, 4))
    rules = MergeRules(logged={"x": Rule(kind="loss mean")})
    assert rules.merge_logged("x", [torch.tensor(math.nan), torch.tensor(3.0)], empty, CPU).item() == 3.0


class Columns(dict[str, torch.Tensor]):
    """A mapping as long as its batch, and without a truth value, as tensordicts are."""

    def __len__(self) -> int:
        return len(next(iter(self.values())))

    def __bool__(self) -> bool:
        raise RuntimeError("A mapping of tensors has no truth value.")


def test_a_mapping_without_a_truth_value_is_one_by_its_keys() -> None:
    rows = torch.arange(14.0, dtype=torch.float64).view(7, 2)
    search = Search(weights=Weights(rows=(4, 3), of_loss=(4.0, 3.0)), tolerance=EXACT)
    found = search.examine(Columns(x=rows), [Columns(x=rows[:4]), Columns(x=rows[4:])], "out")
    assert (found[0].path, found[0].rules[0].kind) == ("out", "children")
    assert all(one.rules for one in found)
