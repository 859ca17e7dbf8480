"""What changes on replica 0 reaches the others; what a step writes into memory that replicas share is refused."""

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.errors import SharedWriteError
from lightning_dpx.replicas.parameter_sync import ParameterSync
from tests.conftest import SIMULATED, sim_device
from tests.replicas.state_pairs import pair

needs_devices = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")


@needs_devices
def test_on_another_device_a_write_travels_and_one_without_a_trace_when_it_is_said() -> None:
    mine, theirs = pair(sim_device(1))
    sync = ParameterSync((mine, theirs), (mine, theirs))
    sync.synchronize()
    with torch.no_grad():
        mine.module[0].weight.fill_(5)
    sync.synchronize()
    assert theirs.module[0].weight.cpu().unique().tolist() == [5]
    mine.module[0].weight.data.fill_(6)
    sync.mark_changed()
    sync.synchronize()
    assert theirs.module[0].weight.cpu().unique().tolist() == [6]


@needs_devices
def test_a_replica_that_differs_without_a_trace_is_named() -> None:
    mine, theirs = pair(sim_device(1))
    sync = ParameterSync((mine, theirs), (mine, theirs))
    sync.synchronize()
    assert sync.differing() == []
    theirs.module[0].bias.data.add_(1)
    assert sync.differing() == [("0.bias", 1)]


def test_a_parameter_that_the_step_wrote_is_refused_where_replicas_share_it() -> None:
    mine, theirs = pair()
    sync = ParameterSync((mine, theirs), (mine, theirs))
    sync.synchronize()
    sync.refuse_shared_writes()
    sync.synchronize()
    theirs.module[0].weight.data.add_(1)
    with pytest.raises(SharedWriteError, match=r"wrote parameter 0\.weight"):
        sync.refuse_shared_writes()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda module: setattr(module[0].weight, "data", torch.ones(3, 2)), r"0\.weight was resized to \(3, 2\)"),
        (lambda module: module.append(nn.Linear(1, 1)), r"added: 1\.weight, 1\.bias"),
    ],
)
def test_other_parameters_than_the_replicas_have_are_refused(act, message: str) -> None:
    mine, theirs = pair()
    sync = ParameterSync((mine, theirs), (mine, theirs))
    sync.synchronize()
    act(mine.module)
    mine.refresh()
    with pytest.raises(dpx.ReplicationError, match=message):
        sync.synchronize()
