"""Before a step the replicas become what replica 0 is."""

import pytest
import torch

from lightning_dpx.replicas.state import StateSync
from tests.conftest import SIMULATED, sim_device
from tests.replicas.state_pairs import pair


def test_on_one_device_new_storage_flags_and_buffers_are_followed() -> None:
    mine, theirs = pair()
    sync = StateSync((mine, theirs))
    mine.module[0].weight.data = torch.full((2, 2), 7.0)
    mine.module[0].bias.requires_grad_(False)
    mine.module.seen.add_(3)
    mine.module.eval()
    sync.synchronize()
    assert theirs.module[0].weight.data_ptr() == mine.module[0].weight.data_ptr()
    assert not theirs.module[0].bias.requires_grad
    assert theirs.module.seen.tolist() == [3, 3]
    assert not theirs.module[0].training


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")
def test_every_so_many_steps_a_write_without_a_trace_is_told_and_undone() -> None:
    mine, theirs = pair(sim_device(1))
    sync = StateSync((mine, theirs), check_every=2)
    sync.synchronize()
    theirs.module[0].bias.data.add_(1)
    with pytest.warns(UserWarning, match=r"Parameter 0\.bias on replica 1 differed from replica 0"):
        sync.synchronize()
    assert torch.equal(theirs.module[0].bias.cpu(), mine.module[0].bias)
