"""On simulated devices a step takes the time of their model."""

import pytest

import lightning_dpx as dpx
from tests.commands.test_plan import Shallow
from tests.conftest import SIMULATED
from tests.lightning.tuning.test_batch_size_tuner import Rows


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_the_speed_of_a_simulated_device_is_that_of_its_model() -> None:
    fakes = dpx.tune(Shallow(), Rows(), devices=["sim:0"], batch_sizes=(64, 1024), dry=True)
    found = dpx.tune(Shallow(), Rows(), devices=["sim:0"], batch_sizes=(64, 1024))
    for one, other in zip(found.batch_sizes, fakes.batch_sizes, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=0.01)
