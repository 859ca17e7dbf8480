"""Two profiles tell of steps on any number of rows; one of one row, in proportion."""

import pytest

import lightning_dpx as dpx
from tests.commands.test_plan import Shallow
from tests.lightning.tuning.test_batch_size_tuner import Rows


def test_a_batch_of_one_row_tells_of_others_in_proportion() -> None:
    one, two = dpx.tune(Shallow(), Rows(1), devices=["cuda:0"], batch_sizes=[1, 2]).batch_sizes
    assert two.devices[0].unplanned == pytest.approx(2 * one.devices[0].unplanned, rel=0.01)
    assert two.compute == pytest.approx(2 * one.compute)
