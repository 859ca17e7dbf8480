"""Sums within groups, then one between the groups."""

import pytest

import lightning_dpx as dpx
from lightning_dpx.reducers import HierarchicalReducer
from lightning_dpx.simulate import clear_traffic, traffic
from tests.conftest import SIMULATED
from tests.reducers.sim_grads import SIZE, sim_grads


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_only_one_sum_crosses_between_groups() -> None:
    devices, grads = sim_grads(8)
    clear_traffic()
    HierarchicalReducer(devices, groups=[[0, 1, 2, 3], [4, 5, 6, 7]]).reduce(grads)
    crossed = [t for t in traffic() if (t.source.index < 4) != (t.target.index < 4)]
    assert sum(t.num_bytes for t in crossed) == SIZE * 4
    assert {t.source.index for t in crossed} == {4, 5, 6, 7}, "every place of the group leads some"
    with pytest.raises(dpx.ConfigurationError, match="name every device from 0 to 7 once"):
        HierarchicalReducer(devices, groups=[[0, 1], [4, 5, 6, 7]])
