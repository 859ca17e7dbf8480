import numpy as np
import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.replicas.merging.by_type import gather, merge_by_reduction
from lightning_dpx.replicas.merging.rules import Weights

CPU = torch.device("cpu")


def test_rows_are_joined_and_scalars_weighted() -> None:
    parts = [{"y": torch.ones(3, 2), "loss": torch.tensor(1.0), "names": ["a", "b", "c"], "n": 3}]
    parts.append({"y": torch.zeros(1, 2), "loss": torch.tensor(5.0), "names": ["d"], "n": 1})
    merged = gather(parts, [3, 1], CPU)
    assert merged["y"].shape == (4, 2)
    assert merged["loss"].item() == 2.0
    assert merged["names"] == ["a", "b", "c", "d"]
    assert merged["n"] == 4


def test_none_contributes_nothing() -> None:
    assert gather([None, torch.ones(2)], [3, 2], CPU).tolist() == [1, 1]
    assert gather([None, None], [1, 1], CPU) is None


class Cache:
    """What libraries keep between calls, in a plain Python object."""

    def __init__(self, keys: torch.Tensor, device: torch.device) -> None:
        self.layers = [keys]
        self.device = device
        self.name = "cache"


def test_plain_objects_are_joined_by_their_attributes() -> None:
    parts = [Cache(torch.full((rows, 2), float(rows)), torch.device("sim", rows)) for rows in (3, 1)]
    merged = gather(parts, [3, 1], CPU)
    assert type(merged) is Cache
    assert merged.layers[0].tolist() == [[3.0, 3.0]] * 3 + [[1.0, 1.0]]
    assert (merged.name, merged.device) == ("cache", CPU)
    assert parts[0].layers[0].shape == (3, 2), "what a replica returned is not written"


def test_an_object_that_all_replicas_share_stays_that_object() -> None:
    shared = Cache(torch.ones(3, 2), CPU)
    assert gather([shared, shared], [3, 1], CPU) is shared


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"a": 1}, {"b": 1}], "different keys"),
        ([(1, 2), [1, 2]], "different types"),
        ([(torch.ones(1), 1, 1), (torch.ones(1), 1)], "different lengths"),
        (["x", "y"], "different values"),
        ([torch.ones(5), torch.ones(6)], "shapes"),
        ([np.array([["a"], ["b"]]), np.array([["a", "b"], ["c", "d"]])], r"shapes \(2, 1\), \(2, 2\)"),
        ([np.array("a"), np.array("b")], "different arrays"),
    ],
)
def test_results_that_cannot_be_merged(parts, message) -> None:
    with pytest.raises(dpx.GatherError, match=message):
        gather(parts, [2, 2], CPU)


@pytest.mark.parametrize(
    ("parts", "reduce_fx", "expected"),
    [
        ([True, False], "sum", True),
        ([False, False], "sum", False),
        ([2, 3], "sum", 5),
        ([1.0, 4.0], "mean", 3.0),
        ([torch.tensor(2.0), torch.tensor(5.0)], "max", torch.tensor(5.0)),
    ],
)
def test_logged_numbers_are_merged_by_their_reduction(parts, reduce_fx, expected) -> None:
    weights = Weights(rows=[1, 2], of_loss=[1, 2])
    assert merge_by_reduction(parts, weights, torch.device("cpu"), reduce_fx, "x") == expected


def test_complex_numbers_have_no_largest() -> None:
    weights = Weights(rows=[1, 2], of_loss=[1, 2])
    with pytest.raises(dpx.GatherError, match=r"'x', \.\.\., reduce_fx='max'\) got numbers of torch.complex64"):
        merge_by_reduction([torch.tensor(1j), torch.tensor(2j)], weights, torch.device("cpu"), "max", "x")


def test_an_integer_of_more_than_64_bits_can_be_logged() -> None:
    assert merge_by_reduction([2**70, 2**70], Weights(rows=(3, 2), of_loss=(3, 2)), CPU, "mean", "x") == 2**70
    assert merge_by_reduction(
        [2**70, 3 * 2**70], Weights(rows=(1, 1), of_loss=(1, 1)), CPU, "mean", "x"
    ) == pytest.approx(2 * 2**70)
