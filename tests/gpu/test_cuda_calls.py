"""Every call of ``torch.cuda`` of the package: on a GPU, and here on fakes that check its order and its arguments."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda import nccl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lightning_dpx as dpx
from lightning_dpx.devices import (
    OffloadedTensor,
    allocated_and_peak,
    capacity_of,
    free_bytes,
    is_host,
    is_out_of_memory,
    linked_groups,
    memory,
    num_direct_links,
    offload,
)
from lightning_dpx.reducers import ProcessReducer, make_reducer, processes
from lightning_dpx.replicas.buffer_sync import BufferSync
from lightning_dpx.replicas.draws import DrawWatch
from lightning_dpx.replicas.hidden_tensors import HiddenTensors
from lightning_dpx.replicas.parameter_copies import SMALL, ParameterCopies
from lightning_dpx.replicas.parameter_sync import ParameterSync
from lightning_dpx.replicas.replica import Replica
from tests.conftest import SIMULATED

HERE, HOST = torch.device("cuda", 0), torch.device("cpu")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Streams:
    """Streams that do nothing but write down what was asked of them, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.main = _Stream("main", self)
        self.current = self.main

    def make(self, name: str) -> "_Stream":
        return _Stream(name, self)

    @contextmanager
    def use(self, stream: "_Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class _Stream:
    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self._streams = name, streams

    def wait_stream(self, other: "_Stream") -> None:
        self._streams.asked.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self._streams.asked.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        number = sum(line.startswith(f"{self.name} records") for line in self._streams.asked)
        self._streams.asked.append(f"{self.name} records")
        return f"{self.name} event {number}"


@pytest.fixture
def streams(monkeypatch: Any) -> Iterator[Streams]:
    """In the place of CUDA's, with fake tensors on a device that need not be there."""
    found = Streams()
    side, fetch = found.make("out"), found.make("back")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.use)
    monkeypatch.setattr(offload, "_send_stream", lambda device: side)
    monkeypatch.setattr(offload, "_fetch_stream", lambda device: fetch)
    pinned = torch.empty_like

    def empty_like(tensor: torch.Tensor, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        kind = ", pinned" if pin_memory else ""
        kind += ", in plain order" if options.get("memory_format") is torch.contiguous_format else ""
        found.asked.append(f"empty on {torch.device(options['device']).type}{kind}")
        return pinned(tensor, **options)

    def copy_(tensor: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        found.asked.append(f"{found.current.name} copies to {tensor.device.type}")
        return tensor

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    with FakeTensorMode():
        yield found


def test_a_tensor_leaves_and_comes_back_beside_the_computation_and_nobody_reads_too_early(streams: Streams) -> None:
    offloaded = OffloadedTensor(torch.empty(4, device=HERE), HOST)
    assert streams.asked == ["out waits for main", "empty on cpu, pinned", "out copies to cpu", "out records"]
    streams.asked.clear()
    offloaded.free_original()
    assert streams.asked == ["main waits for out event 0"], "its memory is given away after the copy has read it"
    streams.asked.clear()
    offloaded.start_fetch()
    waits = ["back waits for main", "back waits for out event 0"]
    assert streams.asked == ["empty on cuda", *waits, "back copies to cuda", "back records"]
    streams.asked.clear()
    assert offloaded.fetch().device.type == "cuda"
    assert streams.asked == ["main waits for back event 0"]
    streams.asked.clear()
    offloaded.release()
    assert streams.asked == ["main waits for back event 0"], "the next owner of the memory writes after the copy"


@pytest.mark.parametrize(
    ("view", "order"),
    [
        (lambda packed: packed.transpose(1, 2), ""),
        (lambda packed: packed.narrow(2, 0, 2).transpose(1, 2), ", in plain order"),
        (lambda packed: packed.unflatten(-1, (8, 2)).select(-1, 0), ", in plain order"),
    ],
    ids=["transposed", "packed", "every other"],
)
def test_what_has_gaps_is_pinned_in_the_order_that_cuda_copies_to(streams: Streams, view: Any, order: str) -> None:
    """To another order it copies by way of pageable memory, and the host waits for it."""
    kept = OffloadedTensor(view(torch.empty(2, 8, 4, 16, device=HERE)), HOST)
    assert f"empty on cpu, pinned{order}" in streams.asked
    kept.release()


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_gpu)])
def test_the_host_goes_on_while_a_view_leaves(device: str) -> None:
    views = torch.randn(64, 128, 768, device=device).split(256, -1)
    parts = [view.unflatten(-1, (4, 64)).transpose(1, 2) for view in views]
    expected = [part.cpu() for part in parts]
    warm = [OffloadedTensor(part, HOST) for part in parts]
    torch.cuda.synchronize()
    del warm  # pinned memory is there from now on
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    busy = torch.cuda.Event()
    busy.record()
    kept = [OffloadedTensor(part, HOST) for part in parts]
    assert not busy.query(), "the host has waited for the device"
    for one, values in zip(kept, expected, strict=True):
        assert torch.equal(one.fetch().cpu(), values)


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_gpu)])
def test_a_tensor_comes_back_as_it_left(device: str) -> None:
    tensor = torch.randn(1000, 1000, device=device)
    expected = tensor.cpu()
    offloaded = OffloadedTensor(tensor, HOST)
    offloaded.free_original()
    del tensor
    torch.full((1000, 1000), 7.0, device=device)  # may take the memory that was given away
    offloaded.start_fetch()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        taken = offloaded.fetch().clone()
    other.synchronize()
    assert torch.equal(taken.cpu(), expected)


class CopiesToTheHost(TorchDispatchMode):
    """Notes which copies from a device to the host nobody waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        # Positions of "non_blocking", where it is given by position.
        place = {"aten::copy_": 2, "aten::_foreach_copy_": 2, "aten::_to_copy": 9}.get(name)
        if place is not None:
            targets = [result] if name == "aten::_to_copy" else args[0]
            sources = args[0] if name == "aten::_to_copy" else args[1]
            waits = not (args[place] if len(args) > place else kwargs.get("non_blocking", False))
            pairs = zip(_as_list(targets), _as_list(sources), strict=True)
            leaves = any(is_host(target.device) and not is_host(source.device) for target, source in pairs)
            self.waited += [waits] * leaves
        return result


def _as_list(tensors: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _replicas_on_a_device_and_the_host(device: str) -> list[Replica]:
    made = []
    for index, place in enumerate((device, "cpu")):
        module = nn.BatchNorm1d(SMALL + 1)
        module.small = nn.Linear(2, 2)
        replica = Replica(index, torch.device(place), module.to(place))
        replica.refresh()
        made.append(replica)
    return made


def _copy_parameters(replicas: list[Replica]) -> None:
    ParameterCopies(replicas[0].parameters, replicas[1].parameters).copy()


def _copy_from_owner(replicas: list[Replica]) -> None:
    sync = ParameterSync(replicas, replicas)
    sync.synchronize()
    # The host's copy comes from the device, after a step of what both own.
    sync.set_owners([0, 0, 1, 1])
    sync.optimizer_stepped()


def _copy_buffers(replicas: list[Replica]) -> None:
    BufferSync(replicas, "broadcast").copy()


def _copy_hidden(replicas: list[Replica]) -> None:
    source, copied = (replica.module.weight for replica in replicas)
    hidden = HiddenTensors([(source, copied)])
    with torch.no_grad():
        source.add_(1)
    hidden.follow()


@pytest.mark.parametrize("device", ["sim:0", pytest.param("cuda:0", marks=needs_gpu)])
@pytest.mark.parametrize("copy", [_copy_parameters, _copy_from_owner, _copy_buffers, _copy_hidden])
def test_what_the_host_reads_next_is_waited_for(copy: Callable[[list[Replica]], None], device: str) -> None:
    """A device copies to the host while that goes on, and what is read there too early is what was there before."""
    if SIMULATED and device == "sim:0":
        pytest.skip(SIMULATED)
    replicas = _replicas_on_a_device_and_the_host(device)
    copies = CopiesToTheHost()
    with copies:
        copy(replicas)
    assert copies.waited
    assert all(copies.waited)


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_gpu)])
def test_parameters_arrive_on_the_host_after_a_busy_device_has_written_them(device: str) -> None:
    sources = [nn.Parameter(torch.zeros(size, device=device)) for size in (7, 9, SMALL + 1)]
    targets = [nn.Parameter(torch.zeros(size)) for size in (7, 9, SMALL + 1)]
    torch.cuda._sleep(100_000_000)  # about 50 ms
    with torch.no_grad():
        for source in sources:
            source.fill_(3)
    ParameterCopies(sources, targets).copy()
    assert all(target.eq(3).all() for target in targets)


@pytest.mark.parametrize("device", ["sim:0", pytest.param("cuda:0", marks=needs_gpu)])
def test_draws_from_the_generator_of_a_device_that_replicas_share_are_noticed(device: str) -> None:
    if SIMULATED and device == "sim:0":
        pytest.skip(SIMULATED)
    watch, rows = DrawWatch(nn.Identity()), torch.ones(100, device=device)
    seen = watch.now([rows.device])
    rows.square().sum()
    assert not watch.has_drawn(seen)
    dropped = nn.functional.dropout(rows)
    assert watch.has_drawn(seen)
    seen.put_back()
    assert not watch.has_drawn(seen)
    assert torch.equal(nn.functional.dropout(rows), dropped)


@pytest.mark.filterwarnings("ignore:.*draws random numbers from a generator")
@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_gpu)])
def test_replicas_in_threads_on_one_device_drop_out_and_recompute_the_same(device: str) -> None:
    class Block(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(rows))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(16, 16) for _ in range(4))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                rows = checkpoint(block, rows, use_reentrant=False)
            return rows

    found = []
    for execution in ("inline", "threads"):
        torch.manual_seed(0)
        group = dpx.ReplicaGroup(Net().to(device), [device] * 2, execution=execution)
        for _ in range(3):
            group.forward(torch.ones(8, 16), is_train=True)
            group.backward(torch.ones(8, 16))
        found.append([parameter.grad.clone() for parameter in group.replicas[0].module.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_devices_are_grouped_by_who_reaches_whom(monkeypatch: Any) -> None:
    pairs = {frozenset(pair) for pair in ((0, 1), (2, 3))}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: frozenset((a.index, b.index)) in pairs)
    four = [torch.device("cuda", index) for index in range(4)]
    assert linked_groups(four) == [[0, 1], [2, 3]]
    assert num_direct_links(four) == 2


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=needs_gpu)])
def test_all_devices_of_the_machine_are_grouped(kind: str) -> None:
    found = [torch.device(kind, index) for index in range(torch.cuda.device_count())]
    assert sorted(index for group in linked_groups(found) for index in group) == list(range(len(found)))


def test_what_other_processes_hold_is_read_from_the_driver(monkeypatch: Any) -> None:
    module = SimpleNamespace(mem_get_info=lambda device: (600, 1000), memory_reserved=lambda device: 100)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(memory, "pynvml_handler", lambda device: "handle")
    processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=150), SimpleNamespace(pid=1, usedGpuMemory=200)]
    driver = SimpleNamespace(nvmlDeviceGetComputeRunningProcesses=lambda handle: processes, NVMLError=OSError)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert capacity_of(HERE) == (100, 1000, 200)
    processes[:] = processes[1:]  # in a container: nobody has our number
    assert capacity_of(HERE) == (100, 1000, 300), "what is neither free nor ours"


def test_a_process_that_may_take_a_part_of_a_device_has_no_more_than_that(monkeypatch: Any) -> None:
    module = SimpleNamespace(
        mem_get_info=lambda device: (600, 1000),
        memory_reserved=lambda device: 150,
        memory_allocated=lambda device: 100,
        get_per_process_memory_fraction=lambda device: fraction,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(memory, "pynvml_handler", lambda device: "handle")
    fraction = 1.0
    assert (free_bytes(HERE), capacity_of(HERE).total) == (650, 1000)
    fraction = 0.3
    assert (free_bytes(HERE), capacity_of(HERE).total) == (200, 300)
    fraction = (2**64 - 1) / 1000
    assert (free_bytes(HERE), capacity_of(HERE).total) == (650, 1000), "no limit, as cudaMallocAsync tells it"


def test_all_statistics_of_a_device_are_asked_for_once(monkeypatch: Any) -> None:
    asked = []

    def nested(device: torch.device) -> dict[str, Any]:
        asked.append(device)
        of_tensors = {"current": 7, "peak": 9, "allocated": 20, "freed": 13}
        return {"allocated_bytes": {"all": of_tensors, "small_pool": {}}} if len(asked) > 1 else {}

    module = SimpleNamespace(memory_stats_as_nested_dict=nested, mem_get_info=None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert allocated_and_peak(HERE) == (0, 0), "before its first tensor"
    assert allocated_and_peak(HERE) == (7, 9)
    assert asked == [HERE, HERE]


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=needs_gpu)])
def test_what_is_allocated_is_what_torch_says(kind: str) -> None:
    device = torch.device(kind, 0)
    kept = torch.ones(1000, 1000, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    del kept
    found = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    assert allocated_and_peak(device) == found
    assert found[1] >= found[0] + 4_000_000


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=needs_gpu)])
def test_what_is_free_of_a_part_of_a_device(kind: str) -> None:
    device = torch.device(kind, 0)
    whole = capacity_of(device).total
    torch.cuda.set_per_process_memory_fraction(0.01, device)
    try:
        # The fraction is kept as a number of bytes, divided and multiplied again.
        assert capacity_of(device).total == pytest.approx(int(0.01 * whole), abs=1)
        assert free_bytes(device) <= 0.01 * whole + 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=needs_gpu)])
def test_the_capacity_of_a_device_is_its_memory(kind: str) -> None:
    found = capacity_of(torch.device(kind, 0))
    assert found.total == torch.cuda.get_device_properties(0).total_memory
    assert 0 <= found.others <= found.total


def _sum_into(packs: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    total = torch.stack(packs).sum(0)
    for target in targets:
        assert not target.is_complex(), "NCCL has no type for it"
        target.copy_(total)


@pytest.fixture
def roots(monkeypatch: Any) -> list[int]:
    """NCCL between tensors of the host; the roots of its reductions."""
    found = []

    def reduce(packs: list[torch.Tensor], *, output: torch.Tensor, root: int) -> None:
        found.append(root)
        assert output is packs[root]
        _sum_into(packs, [output])

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "reduce", reduce)
    monkeypatch.setattr(nccl, "all_reduce", lambda packs: _sum_into(packs, packs))
    return found


@pytest.mark.parametrize("kind", [pytest.param("cuda", marks=needs_gpu)])
def test_pinned_memory_that_runs_out_is_no_end_of_the_device(kind: str) -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**44, dtype=torch.uint8, pin_memory=True)
    assert is_out_of_memory(failed.value)
    assert torch.ones(3, device=kind).sum().item() == 3


def test_nccl_is_given_one_pack_per_device_and_the_owner_as_root(roots: list[int]) -> None:
    reducer = make_reducer("nccl", [torch.device("cuda", index) for index in range(2)])
    lists = [[torch.ones(2), torch.ones(3)], [2 * torch.ones(2), 3 * torch.ones(3)]]
    summed = reducer.reduce(lists, owners=[0, 1])
    assert sorted(roots) == [0, 1]
    assert torch.equal(summed[0], 3 * torch.ones(2))
    assert torch.equal(summed[1], 4 * torch.ones(3))


def test_nccl_sums_complex_numbers_as_their_parts(roots: list[int]) -> None:
    reducer = make_reducer("nccl", [torch.device("cuda", index) for index in range(2)])

    def lists() -> list[list[torch.Tensor]]:
        return [[torch.full((2, 3), k + 1j), torch.full((1,), 1 - k * 1j).conj(), torch.ones(2)] for k in (1, 2)]

    for found in (reducer.reduce(lists(), owners=[0, 0, 0]), *reducer.all_reduce(lists())):
        assert torch.equal(found[0], torch.full((2, 3), 3 + 2j))
        assert torch.equal(found[1], torch.full((1,), 2 + 3j))
        assert torch.equal(found[2], 2 * torch.ones(2))


@pytest.mark.parametrize("one", ["reduce", "all_reduce"])
@pytest.mark.parametrize("other", ["reduce", "all_reduce"])
def test_threads_give_nccl_one_reduction_at_a_time(roots: list[int], monkeypatch: Any, one: str, other: str) -> None:
    """Else it may be queued before another one on one device, and after that on the next, which hangs."""
    meeting = threading.Barrier(2, timeout=0.3)
    met = []

    def call(*_args: Any, **_options: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait()
            met.append(True)

    monkeypatch.setattr(nccl, "reduce", call)
    monkeypatch.setattr(nccl, "all_reduce", call)
    reducers = [make_reducer("nccl", [torch.device("cuda", index) for index in range(2)]) for _ in range(2)]
    threads = []
    for reducer, name in zip(reducers, (one, other), strict=True):
        threads.append(threading.Thread(target=getattr(reducer, name), args=([[torch.ones(2)], [torch.ones(2)]],)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met


class _TwoProcesses:
    """Threads that meet in every all-reduce, as processes do, and fail where they make different ones."""

    def __init__(self) -> None:
        self._meeting = threading.Barrier(2, timeout=20)
        self._given: list[torch.Tensor] = [torch.empty(0)] * 2
        self._here = threading.local()
        self.sent: list[list[torch.device]] = [[], []]

    def get_rank(self) -> int:
        return self._here.rank

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> SimpleNamespace:
        rank = self._here.rank
        self._given[rank] = tensor.cpu()
        self.sent[rank].append(tensor.device)
        self._meeting.wait()
        total = self._given[0] + self._given[1]  # fails where one is larger
        self._meeting.wait()
        tensor.copy_(total)
        return SimpleNamespace(wait=lambda: None)

    def run(self, rank: int, call: Callable[[], None]) -> None:
        self._here.rank = rank
        try:
            call()
        except BaseException:
            self._meeting.abort()  # or the other one waits for it
            raise


@pytest.mark.parametrize(
    ("places", "sent"),
    [(([0, 1], [0, 0]), ([0], [0])), (([0, 1], [2, 3]), ([0, 1], [2, 3]))],
    ids=["unequal", "alike"],
)
def test_processes_whose_owners_lie_otherwise_send_from_their_first_device(
    sim: Any, monkeypatch: Any, places: tuple[list[int], list[int]], sent: tuple[list[int], list[int]]
) -> None:
    """Buckets by device would be two in one process and one in the other, which waits for ever."""
    between = _TwoProcesses()
    monkeypatch.setattr(torch.distributed, "all_reduce", between.all_reduce)
    monkeypatch.setattr(torch.distributed, "get_rank", between.get_rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(processes, "wire_device", lambda device: device)  # as of CUDA
    found: list[list[torch.Tensor | None]] = [[], []]

    def mean(rank: int) -> None:
        grads = [torch.full((4,), rank + 1.0, device=f"sim:{place}") for place in places[rank]]
        found[rank] = ProcessReducer(num_splits=1).mean(grads, grads, -1.0)

    threads = [threading.Thread(target=between.run, args=(rank, partial(mean, rank))) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, means in enumerate(found):
        assert [total.device.index for total in means] == places[rank]
        assert all(total.tolist() == [3.0] * 4 for total in means)
        assert between.sent[rank][0] == HOST, "what all agree on"
        assert [device.index for device in between.sent[rank][1:]] == sent[rank]
