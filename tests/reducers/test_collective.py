"""A reduce-scatter and a gather of plain copies."""

import pytest

from lightning_dpx.reducers import make_reducer
from lightning_dpx.simulate import clear_traffic
from tests.conftest import SIMULATED
from tests.reducers.sim_grads import SIZE, bytes_out_and_in, sim_grads


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize("num_replicas", [2, 3, 4, 8])
def test_a_collective_all_reduce_moves_the_least_possible(num_replicas: int) -> None:
    devices, grads = sim_grads(num_replicas)
    reducer = make_reducer("collective", devices)
    clear_traffic()
    reducer.all_reduce(grads)
    least = 2 * (num_replicas - 1) / num_replicas * SIZE * 4
    for out, into in bytes_out_and_in(num_replicas):
        assert out == pytest.approx(least, rel=0.02)
        assert into == pytest.approx(least, rel=0.02)
