"""Owners sum the gradients of their parameters."""

import pytest

from lightning_dpx.reducers import make_reducer
from lightning_dpx.simulate import clear_traffic
from tests.conftest import SIMULATED
from tests.reducers.sim_grads import SIZE, bytes_out_and_in, sim_grads


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_colocated_owners_receive_and_send_back_their_share(num_replicas: int) -> None:
    devices, grads = sim_grads(num_replicas)
    reducer = make_reducer("colocate", devices)
    owners = reducer.owners([SIZE // 40] * 40)
    clear_traffic()
    reducer.reduce(grads)
    for owner, (out, into) in enumerate(bytes_out_and_in(num_replicas)):
        share = owners.count(owner) / 40 * SIZE * 4
        assert share == pytest.approx(SIZE * 4 / num_replicas, rel=0.02)
        assert into == pytest.approx((num_replicas - 1) * share, rel=0.02)
        assert out == pytest.approx(SIZE * 4 - share, rel=0.02)
