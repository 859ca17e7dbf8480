"""The loss of the whole batch as the mean or the sum of the slices' losses."""

import pytest
import torch

from lightning_dpx.lightning.rehearsal.comparison.loss_judge import LossJudge
from lightning_dpx.replicas import Weights
from lightning_dpx.replicas.merging.tolerance import Tolerance

WEIGHTS = Weights(rows=[3, 2], of_loss=[3, 2])


def reduction(whole: float | None, given: str = "mean", *, decides: bool = True, is_unstable: bool = False) -> str:
    loss = None if whole is None else torch.tensor(whole)
    judge = LossJudge(loss, Tolerance(1e-6), decides=decides, is_unstable=is_unstable)
    found = judge.reduction([torch.tensor(4.0), torch.tensor(-1.0)], WEIGHTS, given)
    assert judge.values == pytest.approx({"mean": 2.0, "sum": 3.0})
    return found


def test_it_is_whichever_one_device_has() -> None:
    assert reduction(2.0) == "mean"
    assert reduction(3.0) == "sum"
    assert reduction(2.0, given="sum") == "mean"


def test_what_was_given_stays_where_nothing_is_to_decide() -> None:
    assert reduction(3.0, decides=False) == "mean"
    assert reduction(None, given="sum") == "sum"


def test_a_loss_that_is_neither_is_taken_for_a_mean_unless_it_is_drawn() -> None:
    assert reduction(7.0, given="sum") == "mean"
    assert reduction(7.0, is_unstable=True) == "sum", "the nearer one"


@pytest.mark.parametrize(("losses", "rests_on_one"), [([3.0, 0.0], True), ([4.0, -1.0], False), ([1.5, 1.5], False)])
def test_a_sum_of_one_loss_and_zeros_may_be_a_mean_over_what_one_slice_has(
    losses: list[float], rests_on_one: bool
) -> None:
    judge = LossJudge(torch.tensor(3.0), Tolerance(1e-6), decides=True, is_unstable=False)
    assert judge.reduction(list(map(torch.tensor, losses)), WEIGHTS, "mean") == "sum"
    assert judge.rests_on_one == rests_on_one
