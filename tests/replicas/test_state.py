"""What changes on replica 0 reaches the others, and what a step wrote comes back as the rules say."""

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.errors import SharedWriteError
from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replicate import replicate
from lightning_dpx.replicas.state import StateSync
from tests.conftest import SIMULATED, sim_device

CPU = torch.device("cpu")
needs_devices = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED or "there are some")


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def pair(device: torch.device = CPU) -> tuple[Replica, Replica]:
    return replicate(Net(), [CPU, device])


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


@needs_devices
def test_on_another_device_a_write_travels_and_one_without_a_trace_when_it_is_said() -> None:
    mine, theirs = pair(sim_device(1))
    sync = StateSync((mine, theirs))
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
    sync = StateSync((mine, theirs))
    sync.synchronize()
    assert sync.differing() == []
    theirs.module[0].bias.data.add_(1)
    assert sync.differing() == [("0.bias", 1)]


def test_a_parameter_that_the_step_wrote_is_refused_where_replicas_share_it() -> None:
    mine, theirs = pair()
    sync = StateSync((mine, theirs))
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
    sync = StateSync((mine, theirs))
    sync.synchronize()
    act(mine.module)
    mine.refresh()
    with pytest.raises(dpx.ReplicationError, match=message):
        sync.synchronize()


def test_buffers_come_together_by_the_mean_or_from_the_first_active_replica() -> None:
    for mode, expected in (("mean", 2.5), ("broadcast", 1.0)):
        replicas = pair()
        sync = StateSync(replicas, mode)
        for replica, value in zip(replicas, (1.0, 3.0), strict=True):
            replica.module.seen.fill_(value)
            replica.module.count.fill_(int(value))
        sync.collect_buffers(replicas, [1, 3])
        assert replicas[0].module.seen.tolist() == [expected if mode == "broadcast" else 2.0] * 2
        assert replicas[0].module.count == 1, "integers have no mean"


@pytest.mark.parametrize(("rule", "expected"), [("first", 11), ("sum", 14), ("max", 13), ("min", 11), ("mean", 12.5)])
def test_a_buffer_comes_together_by_the_rule_that_is_chosen(rule: str, expected: float) -> None:
    replicas = pair()
    sync = StateSync(replicas)
    for replica in replicas:
        replica.module.seen.fill_(10.0)
    sync.remember_buffers()
    for replica, gain in zip(replicas, (1.0, 3.0), strict=True):
        replica.module.seen.add_(gain)
    sync.collect_buffers(replicas, [1, 3], lambda name, _value: rule if name == "seen" else "first")
    assert replicas[0].module.seen.tolist() == [expected] * 2


def test_after_a_step_that_failed_the_buffers_are_what_they_were() -> None:
    mine, theirs = pair()
    sync = StateSync((mine, theirs))
    sync.remember_buffers()
    mine.module.seen.fill_(9)
    sync.restore_buffers()
    assert mine.module.seen.tolist() == [0, 0]
