"""What a step wrote into buffers comes back as the rules say, and goes back where the step failed."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dpx.memory import HostAccount
from lightning_dpx.replicas import ReplicaSet
from lightning_dpx.replicas.buffer_sync import BufferSync
from tests.replicas.state_pairs import pair


def test_buffers_come_together_by_the_mean_or_from_the_first_active_replica() -> None:
    for mode, expected in (("mean", 2.5), ("broadcast", 1.0)):
        replicas = pair()
        sync = BufferSync(replicas, mode)
        for replica, value in zip(replicas, (1.0, 3.0), strict=True):
            replica.module.seen.fill_(value)
            replica.module.count.fill_(int(value))
        sync.collect(replicas, [1, 3])
        assert replicas[0].module.seen.tolist() == [expected if mode == "broadcast" else 2.0] * 2
        assert replicas[0].module.count == 1, "integers have no mean"


@pytest.mark.parametrize(("rule", "expected"), [("first", 11), ("sum", 14), ("max", 13), ("min", 11), ("mean", 12.5)])
def test_a_buffer_comes_together_by_the_rule_that_is_chosen(rule: str, expected: float) -> None:
    replicas = pair()
    sync = BufferSync(replicas)
    for replica in replicas:
        replica.module.seen.fill_(10.0)
    sync.remember()
    for replica, gain in zip(replicas, (1.0, 3.0), strict=True):
        replica.module.seen.add_(gain)
    sync.collect(replicas, [1, 3], lambda name, _value: rule if name == "seen" else "first")
    assert replicas[0].module.seen.tolist() == [expected] * 2


def test_after_a_step_that_failed_the_buffers_are_what_they_were() -> None:
    mine, theirs = pair()
    sync = BufferSync((mine, theirs))
    sync.remember()
    mine.module.seen.fill_(9)
    sync.restore()
    assert mine.module.seen.tolist() == [0, 0]


def test_what_is_remembered_in_inference_mode_is_used_again_outside_of_it() -> None:
    replicas = pair()
    sync = BufferSync(replicas)
    with torch.inference_mode():
        sync.remember()
        sync.keep()
    replicas[0].module.seen.fill_(10.0)
    sync.restore()
    assert replicas[0].module.seen.tolist() == [10.0] * 2, "the step has ended well"
    sync.remember()
    replicas[0].module.seen.add_(1.0)
    sync.restore()
    assert replicas[0].module.seen.tolist() == [10.0] * 2


@pytest.mark.parametrize("rule", ["first", "mean", "sum", "max", "min"])
def test_a_large_buffer_comes_together_without_another_of_its_size(rule: Any) -> None:
    """As a small one does, number for number; a memory of many MiB has its place in a budget once."""
    module = nn.Module()
    module.register_buffer("memory", torch.randn(300, 1000))
    replicas = ReplicaSet(module, [torch.device("cpu")] * 3).replicas
    sync = BufferSync(replicas)
    before = module.memory.clone()
    sync.copy()
    sync.remember()
    for replica in replicas:
        replica.module.memory.mul_(0.9).add_(replica.index)
    first, second, third = (replica.module.memory.clone() for replica in replicas)
    expected = {
        "first": first,
        "mean": first * (2 / 6) + second * (3 / 6) + third * (1 / 6),
        "sum": before + (first - before) + (second - before) + (third - before),
        "max": third,
        "min": first,
    }
    account = HostAccount()
    started = account.start()
    sync.collect(replicas, [2, 3, 1], lambda name, value: rule)
    taken = account.stop(started)
    assert torch.equal(module.memory, expected[rule])
    assert taken.most < before.nbytes


class Starts(TorchDispatchMode):
    """Counts operators that start on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rule", "most"), [("first", 0), ("max", 3 * 64)])
def test_a_large_buffer_comes_together_in_few_operators(rule: Any, most: int) -> None:
    """An accelerator is through with each piece before the host has started the next one."""
    module = nn.Module()
    module.register_buffer("table", torch.arange(2**24, dtype=torch.int8))
    replicas = ReplicaSet(module, [torch.device("cpu")] * 2).replicas
    sync = BufferSync(replicas)
    sync.copy()
    replicas[1].module.table.fill_(100)
    with Starts() as starts:
        sync.collect(replicas, [1, 1], lambda name, value: rule)
    assert starts.num <= most


def test_an_expanded_buffer_is_as_it_was_after_a_step_that_failed() -> None:
    """Torch refuses to write such a tensor as a whole, and would have told of that instead of the step's own error."""
    module = nn.Module()
    module.register_buffer("places", torch.arange(3.0).expand(2, 3))
    sync = BufferSync(ReplicaSet(module, [torch.device("cpu")] * 2).replicas)
    sync.remember()
    module.places[0].fill_(5)
    sync.restore()
    assert module.places.tolist() == [[0.0, 1.0, 2.0]] * 2


@pytest.mark.parametrize("has_some", [True, False])
def test_buffers_that_a_failed_step_has_registered_or_made_longer_are_as_they_were(has_some: bool) -> None:
    module = nn.Module()
    if has_some:
        module.register_buffer("count", torch.zeros(()))
        module.register_buffer("memory", torch.zeros(2))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    sync = BufferSync(ReplicaSet(module, [torch.device("cpu")] * 2).replicas)
    for _ in range(2):
        sync.remember()
        if has_some:
            module.count += 1
            module.memory = torch.ones(3)
        module.register_buffer("late", torch.ones(1))
        sync.restore()
    after = dict(module.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_count_comes_together_beside_a_buffer_that_the_step_has_registered() -> None:
    module = nn.Module()
    module.first = nn.Module()
    module.register_buffer("count", torch.ones(()))
    replicas = ReplicaSet(module, [torch.device("cpu")] * 2).replicas
    sync = BufferSync(replicas)
    sync.remember()
    sync.copy()
    for replica in replicas:
        replica.module.first.register_buffer("late", torch.ones(1))
        replica.module.count = replica.module.count + 2
    sync.collect(replicas, [1, 1], lambda name, value: "sum")
    assert module.count.item() == 5


@pytest.mark.parametrize(("registers", "written"), [((0, 1), ["count"]), ((1,), ["late"])])
def test_what_is_written_is_found_where_a_step_registers_buffers(registers: Any, written: list[str]) -> None:
    """What some slices register, and others do not, is not what one device has."""
    module = nn.Module()
    module.first = nn.Module()
    module.register_buffer("count", torch.ones(()))
    replicas = ReplicaSet(module, [torch.device("cpu")] * 2).replicas
    sync = BufferSync(replicas)
    sync.watch(frozenset())
    sync.copy()
    sync.remember()
    for index in registers:
        replicas[index].module.first.register_buffer("late", torch.ones(1))
    if len(registers) == 2:
        module.count += 1
    assert [name.removeprefix("first.") for name in sync.written(replicas)] == written


def test_a_buffer_that_a_step_has_deleted_is_no_place_to_look_at() -> None:
    module = nn.Module()
    for name in ("cache", "count"):
        module.register_buffer(name, torch.ones(()))
    replicas = ReplicaSet(module, [torch.device("cpu")] * 2).replicas
    sync = BufferSync(replicas)
    sync.watch(frozenset())
    sync.copy()
    for replica in replicas:
        del replica.module.cache
    assert sync.written(replicas) == []
