"""What every registered reducer must do; a new entry is tested by existing."""

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.reducers import REDUCERS, make_reducer

CPU = torch.device("cpu")


def make_grads(num_replicas: int) -> list[list[torch.Tensor | None]]:
    """Four parameters: dense, unused on replica 0, unused everywhere, sparse."""
    generator = torch.Generator().manual_seed(num_replicas)
    rows: list[list[torch.Tensor | None]] = []
    for k in range(num_replicas):
        sparse = torch.sparse_coo_tensor(
            [[k % 3]], torch.randn(1, 2, generator=generator), (3, 2), check_invariants=True
        )
        used = torch.randn(5, generator=generator) if k else None
        rows.append([torch.randn(4, 3, generator=generator), used, None, sparse])
    return rows


@pytest.mark.parametrize("name", list(REDUCERS))
@pytest.mark.parametrize("num_replicas", range(1, 9))
def test_equals_the_plain_sum_and_itself(name, num_replicas) -> None:
    reducer = make_reducer(name, [CPU] * num_replicas)
    result, again = (reducer.reduce(make_grads(num_replicas)) for _ in range(2))
    for column, total, repeated in zip(zip(*make_grads(num_replicas), strict=True), result, again, strict=True):
        present = [g.to_dense() for g in column if g is not None]
        if not present:
            assert total is None
            continue
        torch.testing.assert_close(total.to_dense(), torch.stack(present).sum(0), rtol=1e-6, atol=1e-6)
        assert torch.equal(total.to_dense(), repeated.to_dense())


@pytest.mark.parametrize("name", list(REDUCERS))
def test_average_divides_by_the_number_of_replicas(name) -> None:
    grads = [[torch.full((2,), float(k))] for k in (1, 3)]
    assert make_reducer(name, [CPU] * 2).reduce(grads, average=True)[0].tolist() == [2, 2]


def test_lists_that_do_not_fit_and_unknown_names_are_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="2 lists of equal length"):
        make_reducer("naive", [CPU] * 2).reduce([[torch.ones(1)], []])
    with pytest.raises(
        dpx.ConfigurationError, match=r"Unknown reducer 'naiv'; available: .*naive.*Did you mean 'naive'"
    ):
        make_reducer("naiv", [CPU])


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(dpx.ConfigurationError, match="'naive' is taken by NaiveReducer"):
        dpx.register_reducer("naive")(dpx.GradientReducer)
