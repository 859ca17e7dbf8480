"""Which batch sizes are looked at."""

from typing import Any

import pytest

import lightning_dpx as dpx
from lightning_dpx.lightning.tuning import TuneOptions
from tests.commands.test_plan import Shallow
from tests.lightning.tuning.test_batch_size_tuner import Rows


def test_sizes_that_are_looked_at_unless_some_are_given() -> None:
    assert TuneOptions().sizes(64, 1) == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert TuneOptions(most_rows=300).sizes(64, 1) == [16, 32, 64, 128, 256], "no batch is larger than the data"
    assert TuneOptions().sizes(4, 3)[:2] == [4, 8], "every device gets a row"
    assert TuneOptions((8, 2, 8)).sizes(64, 1) == [2, 8]


@pytest.mark.parametrize("sizes", [(0,), (8, -1), (True,), (2.0,)])
def test_batch_sizes_that_are_none(sizes: Any) -> None:
    with pytest.raises(
        dpx.ConfigurationError, match=r"batch_sizes=.* is not allowed: .* is no positive number of rows"
    ):
        dpx.tune(Shallow(), Rows(), batch_sizes=sizes)
