"""What a reduction is said to take is what the allocator sees, and is tried once."""

import gc
from typing import Any

import pytest
import torch

from lightning_dpx.lightning.memory.reduction_memory import ReductionMemory
from lightning_dpx.reducers import REDUCERS
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from lightning_dpx.step import TrainingStep
from tests.conftest import SIMULATED
from tests.lightning.memory.test_planning import tower

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
ANYWHERE = sorted(set(REDUCERS) - {"nccl"})


def sum_of_parameters(batch_slice: BatchSlice) -> torch.Tensor:
    """A loss that gives every parameter a gradient, and that keeps nothing for backward."""
    return torch.stack([parameter.sum() for parameter in batch_slice.replica.parameters]).sum()


@pytest.mark.parametrize("packs", [0, 3])
@pytest.mark.parametrize("reducer", ANYWHERE)
def test_what_a_reduction_takes_is_what_the_allocator_sees(reducer: str, packs: int, sim: Any) -> None:
    devices = [torch.device("sim", index) for index in range(3)]
    replicas = ReplicaSet(tower().to(devices[0]), devices)
    step = TrainingStep(replicas, reducer, gradient_buckets=packs)
    reductions = ReductionMemory(step.sums)
    predicted = reductions.bytes_by_device(range(3))
    slices = replicas.slices(torch.ones(3, 1))
    step.begin()
    loss = step.merge(slices, replicas.run("training_step", slices, sum_of_parameters))
    loss.backward()
    step.backward(last=False)
    gc.collect()
    before = {device: sim.memory_allocated(device) for device in devices}
    for device in devices:
        sim.reset_peak_memory_stats(device)
    step.reduce()
    taken = {device: sim.max_memory_allocated(device) - before[device] for device in devices}
    assert max(taken.values()) > 0
    for device in devices:  # owners keep no more than they had; the others give theirs back, pack by pack
        assert taken[device] <= predicted[device]
        assert packs or taken[device] == pytest.approx(predicted[device], abs=2**10)
    assert reductions.bytes_by_device([]) == dict.fromkeys(devices, 0), "replicas without gradients reduce nothing"
    step.close()
    replicas.close()


def test_later_steps_do_not_try_the_reduction_again(sim: Any) -> None:
    """Its zeros are as large as the gradients, for which a planned step has no room."""
    devices = [torch.device("sim", index) for index in range(2)]
    replicas = ReplicaSet(tower().to(devices[0]), devices)
    step = TrainingStep(replicas, "naive")
    reductions = ReductionMemory(step.sums)
    predicted = reductions.bytes_by_device([0, 1])
    sim.reset_peak_memory_stats(devices[0])
    before = sim.memory_allocated(devices[0])
    assert reductions.bytes_by_device([0, 1]) == predicted
    assert sim.max_memory_allocated(devices[0]) == before
    assert not any(reductions.bytes_by_device([]).values()), "of other replicas it is another one"
    for parameter in replicas.root.parameters:
        parameter.requires_grad_(requires_grad=False)
    assert not any(reductions.bytes_by_device([0, 1]).values()), "and of other gradients, too"
    step.close()
    replicas.close()
